"""Domain separation networks in one process and over ranks, on the same samples."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytorch_lightning as pl
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from sparsepipe import sparse
from sparsepipe.domains import Placement
from sparsepipe.models import DomainLosses, DomainSeparation, dsn_2d, dsn_3d, dsn_sparse
from sparsepipe.strategies import DomainStrategy
from tests.support.pipeline_cases import QUIET, own_node

STEPS, SAMPLES, CLASSES = 8, 6, 3
"""Minibatches, and samples of a domain in each."""
_SIZES = {"2d": (9, 8), "3d": (6, 5, 4), "sparse": (8, 8, 8)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A training.

    Attributes:
        kind: of the samples: 2d, 3d or sparse.
        targets: N.
        ranks: that share the domains.
        roles: of the ranks.
        similarity: the loss between domains.
        norm: of the encoders.
        clip: the norm that gradients are clipped by, if any.
        accumulate: minibatches for each update.
        grid: that each sample is cut over, if any.
    """

    kind: str = "2d"
    targets: int = 1
    ranks: int = 2
    roles: str = "equal"
    similarity: str = "dann"
    norm: str = "domain"
    clip: float | None = None
    accumulate: int = 1
    grid: tuple[int, ...] | None = None

    @property
    def domains(self) -> tuple[str, ...]:
        return ("cad", *(f"scan_{number}" for number in range(self.targets)))

    def module(self) -> DomainSeparation:
        torch.manual_seed(1)
        common = {"domains": self.domains, "code": 5, "width": 0.1, "norm": self.norm}
        decoded = {"2d": (8, 7), "3d": (4, 5, 4), "sparse": (4, 4, 4)}[self.kind]
        make: Any = {"2d": dsn_2d, "3d": dsn_3d, "sparse": dsn_sparse}[self.kind]
        losses = DomainLosses(
            alpha=0.01,
            beta=0.075,
            gamma=0.25,
            similarity=self.similarity,  # type: ignore[arg-type]
        )
        network = make(CLASSES, decoded=decoded, losses=losses, **common)
        optimizer = partial(torch.optim.SGD, lr=0.02, momentum=0.9, weight_decay=1e-3)
        return DomainSeparation(network, optimizer=optimizer).double()

    def batch(self, name: str, step: int, replica: int, replicas: int) -> dict[str, Any]:
        """A replica's part of a domain's samples in a step."""
        number = self.domains.index(name)
        generator = torch.Generator().manual_seed(100 * step + number)
        size = _SIZES[self.kind]
        x = torch.rand(SAMPLES, 1, *size, generator=generator, dtype=torch.float64)
        x = x * (1 + number / 4)
        first, last = (each * SAMPLES // replicas for each in (replica, replica + 1))
        x = x[first:last]
        label = torch.randint(CLASSES, (SAMPLES,), generator=generator)[first:last]
        if self.kind == "sparse":
            return {
                "input": sparse.SparseTensor.from_dense(x * (x > 0.7)),
                "label": label,
                "index": torch.arange(first, last),
            }
        return {"input": x, "label": label, "index": torch.arange(first, last)}


class Minibatches(Dataset[dict[str, Any]]):
    """The minibatches of some domains."""

    def __init__(
        self,
        case: Case,
        domains: tuple[str, ...],
        replica: int,
        replicas: int,
        *,
        first: int = 0,
    ) -> None:
        self._case, self._domains, self._first = case, domains, first
        self._replica, self._replicas = replica, replicas

    def __len__(self) -> int:
        return STEPS * self._case.accumulate

    def __getitem__(self, step: int) -> dict[str, Any]:
        return {
            name: self._case.batch(name, self._first + step, self._replica, self._replicas)
            for name in self._domains
        }


class Evaluated(Dataset[dict[str, Any]]):
    """Two batches of each of some domains, with its name."""

    def __init__(self, case: Case, domains: tuple[str, ...], replica: int, replicas: int) -> None:
        self._case, self._domains = case, domains
        self._replica, self._replicas = replica, replicas

    def __len__(self) -> int:
        return 2 * len(self._domains) or 1  # the rank of the losses takes part

    def __getitem__(self, number: int) -> dict[str, Any]:
        if not self._domains:
            return {}
        name = self._domains[number // 2]
        batch = self._case.batch(name, 50 + number % 2, self._replica, self._replicas)
        return {**batch, "domain": name}


class Data(pl.LightningDataModule):
    """Reads the domains that the strategy gives to this rank, or all."""

    def __init__(self, case: Case, *, first: int = 0) -> None:
        super().__init__()
        self._case, self._first = case, first

    def _own(self) -> tuple[tuple[str, ...], int, int]:
        assert self.trainer is not None
        strategy = self.trainer.strategy
        if not isinstance(strategy, DomainStrategy):
            return self._case.domains, 0, 1
        assert strategy.placement is not None
        assert strategy.domains is not None
        kwargs = strategy.distributed_sampler_kwargs
        return strategy.domains, kwargs["rank"], kwargs["num_replicas"]

    def train_dataloader(self) -> DataLoader[Any]:
        data = Minibatches(self._case, *self._own(), first=self._first)
        return DataLoader(data, batch_size=None)

    def val_dataloader(self) -> DataLoader[Any]:
        return DataLoader(Evaluated(self._case, *self._own()), batch_size=None)

    test_dataloader = val_dataloader


def trainer_of(case: Case, *, strategy: Any, ranks: int = 1, **more: Any) -> pl.Trainer:
    settings: dict[str, Any] = {
        "devices": ranks,
        "max_epochs": 1,
        "gradient_clip_val": case.clip,
        "accumulate_grad_batches": case.accumulate,
        "use_distributed_sampler": False,
        **more,
    }
    return pl.Trainer(strategy=strategy, **{**QUIET, **settings})


def plain(case: Case, **more: Any) -> tuple[dict[str, Tensor], dict[str, float]]:
    """The state and what is logged after a training in one process."""
    module = case.module()
    trainer = trainer_of(case, strategy="auto", **more)
    trainer.fit(module, Data(case))
    return dict(module.state_dict()), _logged(trainer)


def _logged(trainer: pl.Trainer) -> dict[str, float]:
    return {name: float(value) for name, value in trainer.callback_metrics.items()}


def strategy_of(case: Case) -> Any:
    """The strategy of a case; of one rank a plain Trainer's."""
    if case.ranks == 1:
        return "auto"
    return DomainStrategy(
        roles=case.roles,  # type: ignore[arg-type]
        grid=case.grid,
        process_group_backend="gloo",
        timeout_s=20,
    )


def parallel(
    rank: int, case: Case, settings: Mapping[str, Any]
) -> tuple[dict[str, Tensor], dict[str, float]]:
    """The same on one of the ranks."""
    module = case.module()
    trainer = trainer_of(case, strategy=strategy_of(case), ranks=case.ranks, **settings)
    trainer.fit(module, Data(case))
    return dict(module.state_dict()), _logged(trainer)


def parallel_on(
    rank: int, accelerator: str, case: Case
) -> tuple[dict[str, Tensor], dict[str, float]]:
    """The same where all ranks have one device."""
    return parallel(rank, case, own_node(rank, case.ranks, accelerator=accelerator))


def placement_of(case: Case) -> Placement:
    return Placement(case.domains, case.ranks, case.roles)  # type: ignore[arg-type]


def gap(mine: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> dict[str, float]:
    """The relative error of each group of parameters and buffers, by the norms of all of it."""
    assert mine.keys() == theirs.keys()
    errors: dict[str, list[Tensor]] = {}
    for name, value in theirs.items():
        _, group, *inner = name.split(".")
        group = f"{group}.{inner[0]}" if group == "private" else group
        squares = torch.stack([(mine[name] - value).square().sum(), value.square().sum()])
        errors.setdefault(group, []).append(squares)
    totals = {group: torch.stack(found).sum(0).sqrt() for group, found in errors.items()}
    return {group: float(error / norm) for group, (error, norm) in totals.items()}
