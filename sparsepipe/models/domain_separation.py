"""The LightningModule that trains domain separation networks, written as if for one device.

A :class:`DomainExchange` brings the domains of a minibatch together, in one process or, with
:mod:`sparsepipe.domains`, over several ranks.

Shapes: B samples of all domains, C values of a code, K classes.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer

from sparsepipe import sparse
from sparsepipe.errors import ConfigError
from sparsepipe.models.classifier import LRSchedule, Optimised, built
from sparsepipe.models.domain_losses import RECONSTRUCTIONS, difference
from sparsepipe.models.dsn import (
    DomainNorm,
    DomainSeparationNetwork,
    PerDomain,
    batch_size,
    of_domain,
)
from sparsepipe.models.metrics import confusion_of, known_columns, predicted, predictions_of

log = logging.getLogger(__name__)

_UNKNOWN = -1
"""Label of a sample whose class is unknown or hidden."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Codes:
    """Codes and labels of a minibatch, whose samples are ordered by domain.

    Attributes:
        shared_BC: shared codes.
        private_BC: private codes.
        target: samples to reconstruct, [B, ...].
        label_B: classes of the source's samples; -1 for samples of targets.
        sizes: number of samples of each domain, by name.
    """

    shared_BC: Tensor
    private_BC: Tensor
    target: Tensor
    label_B: Tensor
    sizes: Mapping[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """Input of the losses: :class:`Codes` with each sample's reconstruction error in its place."""

    shared_BC: Tensor
    private_BC: Tensor
    error_B: Tensor
    label_B: Tensor
    sizes: Mapping[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class MinibatchLosses:
    """The losses of a minibatch.

    Attributes:
        objective: the minimised loss.
        parts: values to log, by name: losses without their weights, and the source's accuracy.
        samples: number of samples of all domains, the weight of the minibatch in epoch means.
    """

    objective: Tensor
    parts: Mapping[str, Tensor]
    samples: int


class DomainExchange:
    """Computes the losses of minibatches whose domains are all in this process.

    Subclasses bring together the domains of several processes.
    """

    def losses(self, module: DomainSeparation, batch: Mapping[str, Any]) -> MinibatchLosses:
        """Computes the losses of a minibatch; ``batch`` maps this process's domains to batches."""
        return module.losses(module.decoded(module.encoded(batch)))

    def total(self, counts: Tensor) -> Tensor:
        """Returns the sum of ``counts`` over all processes."""
        return counts

    def add_up(self, value: Tensor, domain: str | None) -> Tensor:
        """Adds up a batch norm's sums ``value`` over the processes with ``domain`` (None: all)."""
        return value

    def whole(self, value: Tensor) -> Tensor:
        """Returns complete samples [B, ...], of which ``value`` may be this process's shard."""
        return value


class DomainSeparation(Optimised):
    """Trains a classifier on a labelled source domain for target domains without labels.

    A training batch maps names of domains to batches with ``input``, ``label`` and ``index``; an
    evaluation batch is one of these, with the domain's name as ``domain``. Labels of targets are
    used in evaluation only.

    The objective is eq. 4 of Bousmalis et al., ``task + alpha * reconstruction + beta * difference
    + gamma * similarity``; reconstruction and difference are the source's plus the mean of the
    targets'.

    Logged per step: ``train/loss_step`` (the objective); per epoch: ``train/loss``, ``train/task``,
    ``train/accuracy`` (the source's), ``train/similarity`` and, for each domain,
    ``train/<domain>/reconstruction`` and ``train/<domain>/difference``. Evaluations log, for each
    domain, ``val/<domain>/accuracy``, ``val/<domain>/loss`` and ``val/<domain>/reconstruction``;
    ``val/accuracy`` and ``val/loss`` are the source's, ``val/target_accuracy`` is the mean over
    targets. Tests log the same with ``test/``. Accuracies and losses leave out samples with
    label -1.

    Args:
        network: the network; or a mapping with ``_target_`` that describes it.
        optimizer: see :class:`~sparsepipe.models.classifier.Optimised`, also for ``schedule``.
        class_names: K names, for reports; None: the numbers from 0.

    Attributes:
        domains: names of the domains, the source first.
        exchange: brings the domains of a minibatch together.
        test_confusions: counts int64 [K, K] of the last test, by domain, with a row for each true
            class, and a further column if logits were not finite; zeros for a domain without
            labels.
    """

    def __init__(
        self,
        network: DomainSeparationNetwork | Mapping[str, Any],
        *,
        optimizer: Callable[[Iterable[nn.Parameter]], Optimizer] | Mapping[str, Any],
        schedule: LRSchedule | Callable[..., Any] | Mapping[str, Any] | None = None,
        class_names: Sequence[str] | None = None,
    ) -> None:
        super().__init__(optimizer, schedule)
        self.network: DomainSeparationNetwork = built(network)
        classes = self.network.num_classes
        self.class_names = tuple(class_names or map(str, range(classes)))
        self.domains = self.network.domains
        self.use()
        self.test_confusions: dict[str, Tensor] = {}
        self._seen: dict[str, Tensor] = {}

    def use(self, exchange: DomainExchange | None = None) -> None:
        """Uses ``exchange`` from now on; None: all domains are in this process."""
        self.exchange = exchange or DomainExchange()
        for each in self.modules():
            if isinstance(each, DomainNorm):
                each.add_up = self.exchange.add_up

    @property
    def parts_of_domains(self) -> dict[str, str]:
        """Maps the name of each parameter and buffer of a single domain to that domain's name."""
        found = {}
        for path, each in self.named_modules():
            if isinstance(each, PerDomain):
                for name, _ in [*each.named_parameters(), *each.named_buffers()]:
                    found[f"{path}.{name}"] = name.partition(".")[0]
        return found

    def adapt_weights(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Returns the weights of a network with other domains, adapted to this network's domains.

        Private encoders, norm statistics and discriminator logits of new domains keep their values
        in this network; those of domains that this network lacks are left out.
        """
        pattern = re.compile(r"network\.private\.(\w+)\.")
        named = [match[1] for name in weights if (match := pattern.match(name))]
        known = list(dict.fromkeys(named))
        if not known or known == list(self.domains):
            return dict(weights)
        own, parts = self.state_dict(), self.parts_of_domains
        found = {name: value for name, value in weights.items() if name in own}
        for name, domain in parts.items():
            if domain not in known and name in own:
                found[name] = own[name]
        for name in own:
            if name.startswith("network.discriminator.") and found[name].shape != own[name].shape:
                rows = [
                    found[name][known.index(domain)] if domain in known else own[name][number]
                    for number, domain in enumerate(self.domains)
                ]
                found[name] = torch.stack(rows)
        log.info("adapted weights of domains %s to %s", ", ".join(known), ", ".join(self.domains))
        return found

    def forward(self, x: Any, domain: str | None = None) -> Tensor:
        """Returns logits [B, K] of an input of ``domain``; None: of the source."""
        codes_BC = self.network.shared_codes({domain or self.domains[0]: self.cast(x)})
        logits_BK: Tensor = self.network.head(*codes_BC.values())
        return logits_BK

    def encoded(self, batch: Mapping[str, Any]) -> Codes:
        """Computes the codes of ``batch``, which maps names of domains to their batches."""
        network = self.network
        if unknown := [name for name in batch if name not in self.domains]:
            raise ConfigError(
                f"a batch has the domain {unknown[0]!r}, but the network's domains are "
                f"{', '.join(self.domains)}",
                remedy="give the data and the network the same domains",
            )
        inputs = {name: self.cast(batch[name]["input"]) for name in self.domains if name in batch}
        private, labels = [], []
        for name, each in inputs.items():
            with of_domain(network.private[name], name):
                private.append(network.private[name](each))
            known_B = batch[name]["label"]
            is_source = name == self.domains[0]
            labels.append(known_B if is_source else torch.full_like(known_B, _UNKNOWN))
        return Codes(
            shared_BC=torch.cat(list(network.shared_codes(inputs).values())),
            private_BC=torch.cat(private),
            target=torch.cat(
                [self.exchange.whole(network.decoded(each)) for each in inputs.values()]
            ),
            label_B=torch.cat(labels),
            sizes={name: batch_size(each) for name, each in inputs.items()},
        )

    def decoded(self, codes: Codes) -> Rows:
        """Reconstructs each sample from the sum of its two codes, and computes the errors."""
        output = self.network.decoder(codes.shared_BC + codes.private_BC)
        return Rows(
            shared_BC=codes.shared_BC,
            private_BC=codes.private_BC,
            error_B=RECONSTRUCTIONS[self.network.losses.reconstruction](output, codes.target),
            label_B=codes.label_B,
            sizes=codes.sizes,
        )

    @torch.no_grad()
    def reconstructions(self, name: str, input: Any) -> dict[str, Tensor]:
        """Returns, in the shape of the decoder's output, ``input`` of the domain ``name`` and its
        reconstructions from the sum of ``both`` codes, the ``shared`` and the ``private`` codes.
        """
        was_training = self.training
        self.eval()
        x = self.cast(input.to(self.device))
        with of_domain(self.network.private[name], name):
            private_BC = self.network.private[name](x)
        shared_BC = self.network.shared_codes({name: x})[name]
        decoder = self.network.decoder
        self.train(was_training)
        return {
            "input": self.network.decoded(x),
            "both": decoder(shared_BC + private_BC),
            "shared": decoder(shared_BC),
            "private": decoder(private_BC),
        }

    def losses(self, rows: Rows) -> MinibatchLosses:
        """Computes the losses of a minibatch with samples of all domains."""
        counts = [rows.sizes[name] for name in self.domains]
        shared = rows.shared_BC.split_with_sizes(counts)
        private = rows.private_BC.split_with_sizes(counts)
        label_S = rows.label_B[: counts[0]]
        logits_SK = self.network.head(shared[0])
        task = F.cross_entropy(logits_SK, label_S)
        errors = [each.mean() for each in rows.error_B.split_with_sizes(counts)]
        differences = [difference(*codes) for codes in zip(shared, private, strict=True)]
        weights = self.network.losses
        reconstruction, separation = (
            values[0] + torch.stack(values[1:]).mean() for values in (errors, differences)
        )
        objective = task + weights.alpha * reconstruction + weights.beta * separation
        parts = {"task": task, "accuracy": (predicted(logits_SK) == label_S).double().mean()}
        if self._is_similarity_on:
            parts["similarity"] = weights.dissimilarity(shared, self.network.discriminator)
            objective = objective + weights.gamma * parts["similarity"]
        for number, name in enumerate(self.domains):
            parts[f"{name}/reconstruction"] = errors[number]
            parts[f"{name}/difference"] = differences[number]
        found = {name: value.detach() for name, value in parts.items()}
        return MinibatchLosses(objective=objective, parts=found, samples=sum(counts))

    @property
    def part_names(self) -> list[str]:
        """Names of the values in :attr:`MinibatchLosses.parts`, in that order."""
        own = [
            f"{name}/{kind}" for name in self.domains for kind in ("reconstruction", "difference")
        ]
        return ["task", "accuracy", *(["similarity"] if self._is_similarity_on else []), *own]

    @property
    def _is_similarity_on(self) -> bool:
        losses = self.network.losses
        if losses.similarity == "none":
            return False
        return self._trainer is None or self.global_step >= losses.similarity_from

    def training_step(self, batch: Mapping[str, Any], batch_idx: int) -> Tensor:
        losses = self.exchange.losses(self, batch)
        loss, size = losses.objective.detach(), losses.samples
        self.log("train/loss_step", loss, prog_bar=True, batch_size=size)
        for name, value in {"loss": loss, **losses.parts}.items():
            self.log(f"train/{name}", value, on_step=False, on_epoch=True, batch_size=size)
        return losses.objective

    def predict_step(
        self, batch: Mapping[str, Any], batch_idx: int = 0, dataloader_idx: int = 0
    ) -> dict[str, Any]:
        found = predictions_of(batch, self(batch["input"], batch["domain"]))
        return {"domain": batch["domain"], **{name: each.cpu() for name, each in found.items()}}

    def validation_step(
        self, batch: Mapping[str, Any], batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        if not batch:  # this process has no domain
            return
        name, label_B = batch["domain"], batch["label"]
        rows = self.decoded(self.encoded({name: batch}))
        logits_BK = self.network.head(rows.shared_BC)
        loss = F.cross_entropy(logits_BK, label_B, reduction="sum", ignore_index=_UNKNOWN)
        samples = logits_BK.new_tensor(len(logits_BK), dtype=torch.float64)
        sums = torch.stack([samples, loss.double(), rows.error_B.sum().double()])
        # In double precision, which holds counts exactly.
        seen = torch.cat([sums, confusion_of(logits_BK, label_B).flatten().double()])
        self._seen[name] = self._seen[name] + seen if name in self._seen else seen

    test_step = validation_step

    def on_validation_epoch_start(self) -> None:
        self._seen.clear()

    on_test_epoch_start = on_validation_epoch_start

    def on_validation_epoch_end(self) -> None:
        self._log_evaluation("val")

    def on_test_epoch_end(self) -> None:
        self.test_confusions = self._log_evaluation("test")

    def _log_evaluation(self, split: str) -> dict[str, Tensor]:
        """Logs means over all processes; returns the confusion matrices of domains with samples."""
        classes = len(self.class_names)
        none = torch.zeros(3 + classes * (classes + 1), dtype=torch.float64, device=self.device)
        mine = torch.stack([self._seen.get(name, none) for name in self.domains])
        confusions, accuracies = {}, {}
        for name, seen in zip(self.domains, self.exchange.total(mine), strict=True):
            samples, loss, error = seen[:3]
            counts_KK = known_columns(seen[3:].view(classes, classes + 1))
            if not samples:
                continue
            confusions[name] = counts_KK.long().cpu()
            values = {"reconstruction": error / samples}
            if labelled := counts_KK.sum():
                accuracies[name] = counts_KK.diagonal().sum() / labelled
                values |= {"accuracy": accuracies[name], "loss": loss / labelled}
            for key, value in values.items():
                self.log(f"{split}/{name}/{key}", value.float())
                if name == self.domains[0] and key != "reconstruction":
                    self.log(f"{split}/{key}", value.float(), prog_bar=True)
        if targets := [accuracies[name] for name in self.domains[1:] if name in accuracies]:
            self.log(f"{split}/target_accuracy", torch.stack(targets).mean().float(), prog_bar=True)
        return confusions

    def cast(self, x: Any) -> Any:
        """Casts an input to the parameters' dtype; Lightning casts plain tensors only."""
        dtype = next(self.network.head.parameters()).dtype
        return x.to(dtype) if isinstance(x, Tensor | sparse.SparseTensor) else x
