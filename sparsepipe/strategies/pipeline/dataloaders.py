"""Data loaders of equal length for every rank.

Only stage 0 reads batches. Every rank walks through as many steps, with a stand-in for the
batch on ranks that do not read, or have read all of theirs.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from lightning_fabric.utilities.data import has_iterable_dataset, sized_len
from torch.utils import _pytree as pytree
from torch.utils.data import DataLoader, DistributedSampler

from sparsepipe.errors import ConfigError
from sparsepipe.runtime.collectives import process_group


class Elsewhere:
    """Stands for a batch that another rank reads, in hooks of ranks that do not read it."""

    __slots__ = ()

    def to(self, *args: Any, **kwargs: Any) -> Elsewhere:
        """Itself, on any device."""
        return self

    def __repr__(self) -> str:
        return "<a batch on another rank>"


ELSEWHERE = Elsewhere()
_STATE = ("state_dict", "load_state_dict")
_PASSED_ON = ("sampler", "batch_sampler", "dataset", "generator", *_STATE)


class Placeholders:
    """A loader of stand-ins."""

    def __init__(self, length: int) -> None:
        self._length = length

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Elsewhere]:
        return iter([ELSEWHERE] * self._length)


class StatefulPlaceholders(Placeholders):
    """Stand-ins beside a loader with a state, which Lightning restores on every rank."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Nothing: stand-ins begin anew."""


class Padded:
    """A loader followed by stand-ins up to a length, whatever length the loader reports."""

    def __init__(self, loader: Iterable[Any], length: int) -> None:
        self.loader = loader
        self._length = length

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Any]:
        count = 0
        for batch in self.loader:
            if count == self._length:
                return
            yield batch
            count += 1
        yield from [ELSEWHERE] * (self._length - count)

    def __getattr__(self, name: str) -> Any:
        # Lightning sets the epoch of samplers and restores states; others read the data set.
        if name in _PASSED_ON:
            return getattr(self.loader, name)
        raise AttributeError(name)


class Lengths:
    """Lengths of each loader on each reader of stage 0, known to all ranks.

    Args:
        reader: which of them this rank is; None where it does not read.
    """

    def __init__(self, *, readers: int, reader: int | None) -> None:
        self._readers = readers
        self._reader = reader
        self._known: dict[int, tuple[Any, tuple[int, ...]]] = {}  # by id, as long as it lives

    def adapt(self, loader: Any) -> Any:
        """A loader for this rank; every rank must call this, in the same order.

        Raises:
            ConfigError: the loader has no length, or the readers' lengths differ by more than
                a last, partial round.
        """
        length = sized_len(loader)
        reported = process_group.gather_objects((self._reader, -1 if length is None else length))
        lengths = tuple(
            length for _, length in sorted((r, n) for r, n in reported if r is not None)
        )
        _check(lengths, loader)
        longest = lengths[0]
        adapted = loader
        if self._reader is None:
            adapted = (StatefulPlaceholders if has_state(loader) else Placeholders)(longest)
        elif lengths[self._reader] < longest or not _exact(loader):
            adapted = Padded(loader, longest)
        self._known[id(adapted)] = (self._watched(adapted), lengths)
        return adapted

    def _watched(self, loader: Any) -> Any:
        """A weak reference, since a Trainer may make new loaders in each epoch."""
        number = id(loader)
        try:
            return weakref.ref(loader, lambda _: self._known.pop(number, None))
        except TypeError:
            return loader  # keeps it alive, so that no other loader gets its id

    def count(self, loaders: Sequence[Any], batch_idx: int) -> int:
        """Minibatches that the readers together have in a step.

        Raises:
            ConfigError: of loaders that are read side by side one ends before another's
                stand-ins.
        """
        known = [self._known[id(loader)][1] for loader in loaders if id(loader) in self._known]
        assert known, "a loader that the strategy has not seen"
        if len(known) > 1 and any(lengths[0] != lengths[-1] for lengths in known):
            raise ConfigError(
                "several loaders are read side by side, and not all ranks have as many batches",
                remedy="use samplers that give each rank the same number, or one loader",
            )
        if len(known) > 1:
            return self._readers
        return sum(length > batch_idx for length in known[0])


def has_state(loader: Any) -> bool:
    """Whether a loader knows its own place."""
    return all(callable(getattr(loader, name, None)) for name in _STATE)


def is_elsewhere(batch: Any) -> bool:
    """Whether a batch is, or contains, a stand-in."""
    return any(isinstance(leaf, Elsewhere) for leaf in pytree.tree_leaves(batch))


def _check(lengths: tuple[int, ...], loader: Any) -> None:
    if min(lengths) < 0:
        raise ConfigError(
            f"the number of batches of {type(loader).__name__} is not known, and a pipeline must "
            "know when to drain",
            remedy="use a data set with a length (no IterableDataset), or give the loader one",
        )
    ordered = all(a >= b for a, b in itertools.pairwise(lengths))
    if not ordered or lengths[0] - lengths[-1] > 1:
        raise ConfigError(
            f"the replicas of stage 0 have {', '.join(map(str, lengths))} batches",
            remedy="use a sampler that deals batches out in turn, as DistributedSampler does",
        )


def _exact(loader: Any) -> bool:
    """Whether a loader certainly yields as many batches as its length."""
    return isinstance(loader, DataLoader) and not has_iterable_dataset(loader)


def repeat_nothing(sampler: DistributedSampler[Any]) -> None:
    """Lets a sampler of Lightning's end where its data do.

    It repeats samples until all readers have as many, and here they need not: see
    :class:`Lengths`. In validation and test every sample is to count once.
    """
    size = len(sampler.dataset)  # type: ignore[arg-type]
    sampler.total_size = size
    sampler.num_samples = len(range(sampler.rank, size, sampler.num_replicas))
