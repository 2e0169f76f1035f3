"""LightningDataModule of several domains: a labelled source and its targets."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
from pytorch_lightning.utilities.combined_loader import CombinedLoader
from torch.utils.data import DataLoader

from sparsepipe.data.datamodule import SplitDataModule
from sparsepipe.data.files import digest_values, explaining_storage, log_once, require_root
from sparsepipe.errors import ConfigError, DataError


class DomainDataModule(pl.LightningDataModule):
    """Data module of several domains, the first of which is the source.

    A training batch maps names of domains to their batches. Within an epoch, smaller domains repeat
    their samples in new orders until the largest is finished. An evaluation batch has samples of
    one domain, and its name as ``domain``.

    Under :class:`sparsepipe.strategies.DomainStrategy`, a process reads only its rank's domains.

    Args:
        domains: data module of each domain by name, the source first; or callables that make them
            from ``common``.
        common: keyword arguments for all callables, such as ``batch_size``.
        targets: names of the targets, or a number n for the first n; None: all other domains.
        source: name of the domain to be the source; None: the first one.
        evaluated: names of the domains to evaluate on; None: the source and all targets.
        root: not used here; in a configuration, ``common`` can refer to it.
        batch_size: number of samples of each domain in a batch; ``common`` can refer to it as well.
    """

    def __init__(
        self,
        domains: Mapping[str, Any],
        *,
        common: Mapping[str, Any] | None = None,
        targets: int | Sequence[str] | None = None,
        source: str | None = None,
        evaluated: Sequence[str] | None = None,
        root: Path | str | None = None,
        batch_size: int | None = None,
    ) -> None:
        super().__init__()
        del root
        self.batch_size = batch_size
        names = _chosen(tuple(domains), targets=targets, source=source)
        if unknown := [name for name in evaluated or () if name not in names]:
            raise ConfigError(
                f"data.evaluated names {unknown[0]!r}, which is not the source or a chosen target",
                remedy=f"choose among {', '.join(names)}, or choose other data.targets",
            )
        self._domains: dict[str, SplitDataModule] = {}
        for number, name in enumerate(names):
            given = domains[name]
            each = given if isinstance(given, SplitDataModule) else given(**(common or {}))
            if not isinstance(each, SplitDataModule):
                raise ConfigError(
                    f"data.domains.{name} builds a {type(each).__name__}, which is not a data "
                    "module of sparsepipe.data",
                    remedy="set its _target_ to such a data module, with _partial_: true",
                )
            each.stream = number
            self._domains[name] = each
        self._source: Any = self._domains[names[0]]
        self.domains = names
        """Names of the domains, the source first."""
        self._evaluated = tuple(names if evaluated is None else evaluated)
        self._own = names
        """Names of the domains that this process reads."""
        self._placement: Any = None
        self._longest = 0  # samples that a process reads of each of its domains in an epoch

    @property
    def classes(self) -> tuple[str, ...]:
        """Class names of the source, indexed by the labels."""
        return tuple(self._source.classes)

    @property
    def num_classes(self) -> int:
        """Number of classes."""
        return len(self.classes)

    @property
    def in_channels(self) -> int:
        """Number of input channels (for shapes, features of a voxel) of the source's samples."""
        return int(self._source.in_channels)

    @property
    def input_kind(self) -> str | None:
        """Kind of the source's inputs, such as ``sparse`` or ``dense 2D``; None if unknown."""
        return getattr(self._source, "input_kind", None)

    def fingerprint(self) -> str:
        """Returns a hex digest of the data of all domains."""
        return digest_values([[name, each.fingerprint()] for name, each in self._domains.items()])

    def prepare_data(self) -> None:
        """Prepares all domains; checks that the source is labelled, and that classes agree."""
        for each in self._domains.values():
            each.prepare_data()
        if not self._source.is_labelled:
            raise DataError(
                f"the source {self.domains[0]} has samples without labels",
                remedy="label all of them (in folders: put each file into its class's folder), or "
                "choose another domain as source with data.source",
            )
        for name, each in self._domains.items():
            classes = tuple(each.classes)  # type: ignore[attr-defined]
            if classes != self.classes and (classes or each.is_labelled):
                raise DataError(
                    f"the domain {name} has the classes {', '.join(classes)}, but the source has "
                    f"{', '.join(self.classes)}",
                    remedy="use data of the same classes in the same order, or remove the labels "
                    "of the target (in folders: put its files directly into the domain's folder)",
                )

    def setup(self, stage: str | None = None) -> None:
        """Opens all domains, and determines how many samples of each an epoch has."""
        self.prepare_data()
        labelled, bare = list[str](), list[str]()
        for name, each in self._domains.items():
            each.trainer = self.trainer
            each.setup(stage)
            (labelled if each.is_labelled else bare).append(name)
            if not each.num_train:
                raise DataError(
                    f"the domain {name} has no training samples",
                    remedy="add samples, or choose other domains with data.source and data.targets",
                )
        if labelled[1:]:
            log_once(
                "the labels of targets are ignored in training and used only in evaluations: "
                f"{', '.join(labelled[1:])}"
            )
        if bare:
            log_once(f"targets without labels are evaluated without accuracy: {', '.join(bare)}")
        strategy = None if self.trainer is None else self.trainer.strategy
        placement = self._placement = getattr(strategy, "placement", None)
        own = getattr(strategy, "domains", None)  # empty on a rank that only computes losses
        self._own = self.domains if own is None else tuple(own)
        replicas = {
            name: 1 if placement is None else len(placement.ranks_of(name)) for name in self.domains
        }
        self._longest = max(
            math.ceil(each.num_train / replicas[name]) for name, each in self._domains.items()
        )
        for name, each in self._domains.items():
            each.epoch_samples = self._longest * replicas[name]
            if each.num_train < each.epoch_samples:
                log_once(
                    f"domain {name}: an epoch needs {each.epoch_samples} samples, so the "
                    f"domain's {each.num_train} are repeated"
                )

    def train_dataloader(self) -> Any:
        """Loader of minibatches of this process's domains.

        Lightning compares the lengths of all processes' loaders one by one, so every process needs
        the same number of loaders; surplus ones, without a domain, yield empty minibatches.
        """
        loaders: dict[str, Any] = {
            name: self._domains[name].train_dataloader() for name in self._own
        }
        batches = math.ceil(self._longest / self._source.batch_size)
        placement = self._placement
        ranks = range(0 if placement is None else placement.ranks)
        most = max((len(placement.domains_of(rank)) for rank in ranks), default=0)
        for number in range(len(loaders), most):  # a name with a space is not a domain's
            loaders[f"nothing {number}"] = DataLoader([{}] * batches, batch_size=None)  # type: ignore[arg-type]
        return CombinedLoader(loaders, "max_size")

    def val_dataloader(self) -> Any:
        """Loader of validation batches, one domain after the other; without any, an empty list."""
        if not any(self._domains[name].num_val for name in self._evaluated):
            return []
        return self._evaluation("val_dataloader")

    def test_dataloader(self) -> Any:
        """Loader of test batches, one domain after the other."""
        return self._evaluation("test_dataloader")

    predict_dataloader = test_dataloader

    def some_tested(self, name: str, *, count: int) -> Any:
        """Returns the input of a domain's first ``count`` test samples on any rank."""
        loader = self._domains[name].test_dataloader()
        samples: Any = loader.dataset
        some = [samples[index] for index in range(min(count, len(samples)))]
        return loader.collate_fn(some)["input"]

    def _evaluation(self, hook: str) -> Any:
        names = [name for name in self._own if name in self._evaluated]
        loaders = {name: getattr(self._domains[name], hook)() for name in names}
        return InTurn({name: each for name, each in loaders.items() if each})


class FolderDomains(DomainDataModule):
    """Data module with a domain for each folder of a directory: the source, then others by name.

    Folders whose names begin with ``.`` or ``_`` are left out. Only the source needs labels.

    Args:
        root: the directory.
        module: class (or partial) of a domain's data module, called with the domain's folder and
            with ``cache_dir``, ``batch_size`` and ``num_workers``.
        source: name of the source's folder; required. ``targets`` and ``evaluated`` are as for
            :class:`DomainDataModule`.
    """

    def __init__(
        self,
        root: Path | str | None,
        *,
        module: Callable[..., Any],
        source: str | None,
        targets: int | Sequence[str] | None = None,
        evaluated: Sequence[str] | None = None,
        cache_dir: Path | str,
        batch_size: int = 32,
        num_workers: int | None = 0,
    ) -> None:
        what = "a directory with a folder for each domain"
        layout = "a folder for the source, with folders of its classes, and one for each target"
        directory = require_root(root, what=what, where_from=f"it needs {layout}")
        with explaining_storage(directory, setting="data.root"):
            folders = sorted(path for path in directory.iterdir() if path.is_dir())
        found = {path.name: path for path in folders if not path.name.startswith((".", "_"))}
        if len(found) < 2:
            raise DataError(
                f"data.root={root} needs at least two folders, one for each domain, but has "
                f"{', '.join(found) or 'none'}",
                remedy=f"create {layout} in it",
            )
        if source is None:
            raise ConfigError(
                f"data.source is not set; data.root={root} has the folders {', '.join(found)}",
                remedy="set data.source to the name of the folder whose samples have labels",
            )
        super().__init__(
            {name: partial(module, path) for name, path in found.items()},
            common={"cache_dir": cache_dir, "batch_size": batch_size, "num_workers": num_workers},
            targets=targets,
            source=source,
            evaluated=evaluated,
            batch_size=batch_size,
        )


@dataclass(eq=False)
class InTurn:
    """Yields the batches of one domain after the other, each with the domain's name as ``domain``.

    Without loaders, it yields one empty batch, because all processes take part in an evaluation.
    """

    loaders: Mapping[str, DataLoader[dict[str, Any]]]

    def __len__(self) -> int:
        return sum(map(len, self.loaders.values())) or 1

    def __iter__(self) -> Iterator[dict[str, Any]]:
        if not self.loaders:
            yield {}
        for name, loader in self.loaders.items():
            for batch in loader:
                yield {**batch, "domain": name}


def _chosen(
    domains: tuple[str, ...], *, targets: int | Sequence[str] | None, source: str | None
) -> tuple[str, ...]:
    """Returns the names of the source and of the targets chosen; see ``DomainDataModule``."""
    if source is not None and source not in domains:
        raise ConfigError(
            f"data.source={source!r} is not a domain of the data",
            remedy=f"choose one of {', '.join(domains)}",
        )
    first, *others = sorted(domains, key=lambda name: name != source) if source else domains
    if targets is None or isinstance(targets, int):
        chosen = others if targets is None else others[:targets]
        is_valid = targets is None or 1 <= targets <= len(others)
    else:
        chosen = list(dict.fromkeys(targets))
        is_valid = {*chosen} <= {*others}
    if not is_valid or not chosen:
        raise ConfigError(
            f"data.targets={targets} is not valid; possible targets: {', '.join(others) or 'none'}",
            remedy="have at least two domains, and set data.targets to names of possible targets, "
            "to a number of them, or to null for all",
        )
    return (first, *chosen)
