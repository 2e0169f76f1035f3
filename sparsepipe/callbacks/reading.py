"""What a training reads: it depends on the seed, the epoch and the number of the batch alone.

A loader of a data set with indices is resumed within an epoch: its sampler draws the same order
again, and the batches that are done are left out. A loader with ``state_dict`` and
``load_state_dict`` is resumed by its state. Any other begins its epoch again.
"""

from __future__ import annotations

import itertools
import logging
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import pytorch_lightning as pl
import torch
from lightning_fabric.utilities.data import has_iterable_dataset, sized_len
from pytorch_lightning.utilities.combined_loader import CombinedLoader
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    get_worker_info,
)
from typing_extensions import override

from sparsepipe.data.dataloaders import TrainSampler
from sparsepipe.errors import ConfigError
from sparsepipe.runs.randomness import (
    GLOBAL,
    SeparateDraws,
    mixed,
    seed_epoch,
    seed_generators,
    seeded,
    set_randomness,
)
from sparsepipe.runtime.collectives import process_group
from sparsepipe.runtime.random_generators import Generator, is_generator
from sparsepipe.strategies import trainer_internals as internals
from sparsepipe.strategies.pipeline.dataloaders import Padded, Placeholders, has_state

log = logging.getLogger(__name__)

_END = object()
_BEGIN, _ORDER = 2**40, 2**41  # in the place of a batch's number: draws of iterators, of orders
_SEARCHED = 2_000  # objects among which generators are searched for
_SAMPLERS = ("batch_sampler", "sampler", "_sampler")
_PLAIN = (int, float, str, bool, type(None))
_WITHOUT_GENERATORS = (*_PLAIN, bytes, type, ModuleType, torch.Tensor)


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a training goes on.

    Args:
        epoch: number of the epoch that comes next or is under way.
        batches: how many of its batches are done.
        randomness: state of the random generators of each rank.
        loaders: of each rank, what each of its loaders needs beside that.
    """

    epoch: int
    batches: int
    randomness: list[dict[str, Any]]
    loaders: list[list[Any]]

    def of_rank(self, entries: list[Any]) -> Any:
        """This rank's entry, where as many ranks run as before; else None."""
        if len(entries) != process_group.world_size():
            return None
        return entries[process_group.rank()]

    def restore_randomness(self) -> None:
        """Sets this rank's random generators, where as many ranks run as before."""
        if (state := self.of_rank(self.randomness)) is not None:
            set_randomness(state)


class TrainingReads(pl.Callback):
    """Lets random numbers of an epoch, and what it reads, depend on (seed, epoch, rank) alone.

    What an earlier epoch, its validation or a loader drew has no influence, so that a resumed run
    and one with another number of loader workers read and draw the same.

    Args:
        seed: the run's.
        place: where the training goes on, if it was begun before.
    """

    def __init__(self, seed: int, *, place: Place | None = None) -> None:
        self.seed = seed
        self._place = place
        self._pending = place
        self._trainer: pl.Trainer | None = None
        self._combined: CombinedLoader | None = None
        self._loaders: list[_Order | _Stateful | _Unknown] = []
        self._read = 0

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if stage != "fit":
            return
        self._trainer = trainer
        internals.replace_loader_restoration(trainer, self._prepare)
        if self._place is not None and self._place.batches:
            internals.before_first_batch(trainer, self._place.restore_randomness)

    @override
    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        seed_epoch(self.seed, trainer.current_epoch)

    @override
    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        self._pending = None

    def position(self) -> tuple[int, int]:
        """The epoch under way, and how many of its batches are done."""
        if self._pending is not None:  # Lightning may read before it knows where it goes on
            return self._pending.epoch, self._pending.batches
        assert self._trainer is not None
        return internals.reading_position(self._trainer)

    def batches_to_skip(self, epoch: int) -> int:
        """How many batches an iterator that is made now leaves out."""
        found = self._pending
        return found.batches if found is not None and found.epoch == epoch else 0

    @property
    def begins_again(self) -> bool:
        """Whether a loader that has ended begins again beside longer ones."""
        combined = self._combined
        return combined is not None and internals.loaders_cycle(combined)

    def obstacle(self, batches: int) -> str | None:
        """Why this rank cannot go on after so many batches of the epoch; None if it can."""
        found = (loader.obstacle(batches) for loader in self._loaders)
        return next((text for text in found if text is not None), None)

    def state(self, batches: int) -> list[Any]:
        """What each loader of this rank needs to go on after so many batches; 0 ends an epoch."""
        return [loader.state(batches) for loader in self._loaders]

    def _prepare(self) -> None:
        """Adapts new loaders; Lightning calls it before it makes their iterators."""
        trainer, place = self._trainer, self._pending
        assert trainer is not None
        combined = self._combined = internals.combined_loader(trainer)
        found = [
            entry.loader if isinstance(entry, Padded) else entry for entry in combined.flattened
        ]
        self._loaders = [
            self._adapted(loader, number)
            for number, loader in enumerate(found)
            if not isinstance(loader, Placeholders)
        ]
        internals.wrap_reading(combined, begin=self._begin, read=self._next)
        unknown = [loader for loader in self._loaders if isinstance(loader, _Unknown)]
        if place is None:
            if unknown and self.position() == (0, 0):
                log.info("a stop within an epoch will repeat the epoch: %s", unknown[0].obstacle(0))
            return
        if place.batches and unknown:
            log.warning(
                "this epoch's data begin again after %d batches: %s",
                place.batches,
                unknown[0].obstacle(0),
            )
        if place.batches == 0:
            # An epoch's last checkpoint, which Lightning with ``max_steps`` takes for one within.
            internals.clear_restarting(trainer)
        states = place.of_rank(place.loaders) if place.loaders else None
        for loader, state in zip(self._loaders, states or [], strict=False):
            loader.load(state)
            if place.batches and isinstance(loader, _Stateful):
                loader.warn_of_workers()
        place.restore_randomness()

    def _adapted(self, loader: Any, number: int) -> _Order | _Stateful | _Unknown:
        if has_state(loader):
            return _Stateful(loader, self, number)
        if not isinstance(loader, DataLoader) or has_iterable_dataset(loader):
            return _Unknown(loader)
        known = getattr(vars(loader).get("_get_iterator"), "__self__", None)
        return known if isinstance(known, _Order) else _Order(loader, self, number)

    def _begin(self) -> AbstractContextManager[None]:
        """Around the making of an epoch's iterators."""
        epoch, _ = self.position()
        self._read = self.batches_to_skip(epoch)
        for entry in self._loaders:
            _set_epoch(_samplers_of(entry.loader), epoch)
            seed_generators(entry.epoch_generators(), mixed(self.seed, epoch))
        return seeded(mixed(self.seed, epoch, process_group.reader(), _BEGIN))

    def _next(self) -> AbstractContextManager[None]:
        """Around the reading of a batch."""
        number, self._read = self._read, self._read + 1
        if all(isinstance(entry, _Order) for entry in self._loaders):
            return nullcontext()  # which seed what they read
        epoch, _ = self.position()
        seed = mixed(self.seed, epoch, process_group.reader(), number)
        for entry in self._loaders:
            if isinstance(entry, _Stateful):
                entry.note(seed)
        return seeded(seed)

    @property
    def read(self) -> int:
        """How many batches of the epoch were read, those of earlier processes among them."""
        return self._read

    @property
    def is_limited(self) -> bool:
        """Whether an epoch ends after a number of batches that is known."""
        assert self._trainer is not None
        return self._trainer.num_training_batches != float("inf")

    def iterator(self, number: int) -> Any:
        """The iterator of one loader."""
        assert self._combined is not None
        return internals.iterator_of(self._combined, number)


class _Unknown:
    """A loader of which nothing is known but that it yields batches."""

    def __init__(self, loader: Any) -> None:
        self.loader = loader

    def epoch_generators(self) -> Iterator[Generator]:
        return generators_in([self.loader])

    def obstacle(self, batches: int) -> str | None:
        if isinstance(self.loader, DataLoader):
            return f"{type(self.loader.dataset).__name__} is an iterable data set without a state"
        return f"{type(self.loader).__name__} is no DataLoader and has no state"

    def state(self, batches: int) -> None:
        return None

    def load(self, state: Any) -> None:
        pass


class _Stateful:
    """A loader that knows its own place."""

    def __init__(self, loader: Any, reads: TrainingReads, number: int) -> None:
        self.loader = loader
        self._reads, self._number = reads, number
        self._previous: Any = None

    def epoch_generators(self) -> Iterator[Generator]:
        """Those of its samplers; others may be part of its state."""
        places = [getattr(self.loader, "generator", None), *_samplers_of(self.loader)]
        return generators_in(places, apart_from=getattr(self.loader, "dataset", None))

    def note(self, seed: int) -> None:
        """Before a batch is read: keeps the state, where Lightning reads one batch ahead."""
        seed_generators(generators_in([getattr(self.loader, "dataset", None)]), seed)
        if sized_len(self.loader) is None:
            self._previous = self.loader.state_dict()

    def obstacle(self, batches: int) -> str | None:
        if self._reads.read - batches in (0, int(self._previous is not None)):
            return None
        return f"{type(self.loader).__name__} was read ahead"

    def state(self, batches: int) -> Any:
        if batches:
            return self._previous if self._reads.read > batches else self.loader.state_dict()
        # A DataLoader begins anew where limits end an epoch early; others decide for themselves.
        return self.loader.state_dict() if self._ended() or not self._begins_anew else None

    @property
    def _begins_anew(self) -> bool:
        return isinstance(self.loader, DataLoader)

    def _ended(self) -> bool:
        """Whether the epoch was read to its end, so that the state leads to the next one."""
        size = sized_len(self.loader)
        if size is None:
            return not self._reads.is_limited
        if self._reads.begins_again or self._reads.read < size:
            return False
        with seeded(0):  # Lightning does not read on to see the end
            return next(self._reads.iterator(self._number), _END) is _END

    def load(self, state: Any) -> None:
        if state is not None:
            self.loader.load_state_dict(state)
            if isinstance(self.loader, DataLoader):
                vars(self.loader)["_get_iterator"] = self._first_iterator

    def _first_iterator(self) -> Any:
        """The iterator that takes up the state. That of an epoch's end makes generators of samplers
        what they were in that epoch, and the loader draws the next one's order right afterwards.
        """
        del vars(self.loader)["_get_iterator"]
        iterator = self.loader._get_iterator()
        epoch, batches = self._reads.position()
        if not batches:
            seed_generators(self.epoch_generators(), mixed(self._reads.seed, epoch))
        return iterator

    def warn_of_workers(self) -> None:
        """Says what of a loader's place within an epoch its state does not have."""
        if getattr(self.loader, "num_workers", 0):
            log.warning(
                "%s goes on by its state, in which random numbers of its workers are not: what "
                "they draw, as for augmentation, is other than without the stop",
                type(self.loader).__name__,
            )


class _Order:
    """In place of a loader's batch sampler: its batches, drawn from the seed and the epoch.

    Iterators of the loader read from here; the loader itself keeps the samplers of its maker.

    Args:
        loader: of a data set with indices.
        reads: knows the epoch and the place in it.
        number: of the loader, among those that are read side by side.
    """

    def __init__(self, loader: DataLoader[Any], reads: TrainingReads, number: int) -> None:
        self.loader = loader
        self._reads, self._number = reads, number
        self._source: Any = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
        self._samplers = _samplers_of(loader)
        self._new = self._values()
        self._begun = self._new  # values as the epoch began
        self._epoch, self._cycle, self._drawn, self._ended = -1, 0, 0, False
        self._expected: int | None = None
        ahead = loader.num_workers * (loader.prefetch_factor or 0)
        self._digests: deque[tuple[int, int]] = deque(maxlen=ahead + 8)
        vars(loader)["_get_iterator"] = self.make_iterator

    def make_iterator(self) -> Any:
        """Does what the loader's own method does, with this order and random numbers by batch."""
        loader, attributes = self.loader, vars(self.loader)
        replaced = {
            "sampler" if loader.batch_sampler is None else "batch_sampler": self,
            "dataset": _SeededDataset(loader),
            "collate_fn": _unchanged,
        }
        kept = {name: attributes[name] for name in replaced}
        attributes.update(replaced)
        try:
            return type(loader)._get_iterator(loader)
        finally:
            attributes.update(kept)

    def __len__(self) -> int:
        return len(self._source)

    def __iter__(self) -> Iterator[_Drawn]:
        # Iterators of several processes begin twice and use the second; only that draws.
        epoch, done = self._reads.position()
        skipped = 0
        if epoch != self._epoch or not done:
            self._epoch, self._cycle, self._drawn, self._ended = epoch, 0, 0, False
            skipped = self._reads.batches_to_skip(epoch)
            self._begun = self._values()
            self._digests.clear()
        else:
            self._cycle += 1
        seed, rank = self._reads.seed, process_group.reader()
        while True:
            first = self._drawn
            for indices in self._cycle_of(epoch, self._cycle):
                self._note(indices)
                if self._drawn == skipped:
                    self._check()
                if self._drawn > skipped:
                    yield _Drawn(indices, mixed(seed, epoch, rank, self._drawn - 1, self._number))
            if self._drawn in range(first + 1, skipped) and self._reads.begins_again:
                self._cycle += 1
                continue
            if self._drawn < skipped:
                self._check()
            self._ended = True
            return

    def epoch_generators(self) -> Iterator[Generator]:
        return generators_in([self.loader])

    def obstacle(self, batches: int) -> str | None:
        """See :meth:`TrainingReads.obstacle`; draws the epoch's order once more to see."""
        if not self._digests or (self._drawn < batches and not self._ended):
            return self._elsewhere()
        expected = self._digest(batches)
        self._put(self._begun)
        if self._drawn_again(batches) != expected:
            name = type(self._source).__name__
            return f"{name} draws another order each time, whatever the seed and the epoch"
        return None

    def state(self, batches: int) -> dict[str, Any]:
        """What of the samplers is not as when they were made, and what was read of the epoch."""
        values = self._begun if batches else self._values()
        changes = {n: v for n, v in values.items() if n not in self._new or self._new[n] != v}
        digest = self._digest(batches) if batches else None
        return {"samplers": changes, "digest": digest, "is_read": bool(self._digests)}

    def load(self, state: Mapping[str, Any] | None) -> None:
        """Makes the samplers what they were."""
        if state is not None:
            self._put(state["samplers"])
            self._expected = state["digest"]
            if not state["is_read"]:
                log.warning("the order of what is read may be another one: %s", self._elsewhere())

    def _elsewhere(self) -> str:
        name = type(self._source).__name__
        return f"{type(self.loader).__name__} does not read by its {name}"

    def _cycle_of(self, epoch: int, cycle: int) -> Iterator[Any]:
        """The batches of an epoch; of its later cycles where longer loaders are read beside it."""
        seed, rank = self._reads.seed, process_group.reader()
        _set_epoch(self._samplers, epoch)
        numbers = (seed, epoch, cycle) if cycle else (seed, epoch)
        seed_generators(generators_in(self._samplers), mixed(*numbers))
        drawing: Callable[[], AbstractContextManager[None]] = nullcontext
        if not all(map(_draws_by_itself, self._samplers)):
            last = _ORDER + cycle
            torch_seed = mixed(seed, epoch, rank, last)
            drawing = SeparateDraws(mixed(seed, epoch, last), torch_seed=torch_seed).drawing
        with drawing():
            batches = iter(self._source)
        while True:
            with drawing():
                indices = next(batches, _END)
            if indices is _END:
                return
            yield indices

    def _drawn_again(self, batches: int) -> int:
        digest = count = 0
        for cycle in itertools.count():
            first = count
            for indices in self._cycle_of(self._epoch, cycle):
                count, digest = count + 1, _digest(indices, digest)
                if count == batches:
                    return digest
            if count == first or not self._reads.begins_again:
                break
        return digest

    def _note(self, indices: Any) -> None:
        self._drawn += 1
        before = self._digests[-1][1] if self._digests else 0
        self._digests.append((self._drawn, _digest(indices, before)))

    def _digest(self, batches: int) -> int | None:
        """Of the epoch's batches up to that number, or all if there are fewer."""
        return next((d for number, d in reversed(self._digests) if number <= batches), None)

    def _check(self) -> None:
        expected, self._expected = self._expected, None
        if expected not in (None, self._digests[-1][1]):
            raise ConfigError(
                f"{type(self._source).__name__} does not draw again what the run had read before "
                "it was stopped",
                remedy="let its order depend on the seed and the epoch (set_epoch) alone, or start "
                "anew by force=true",
            )

    def _values(self) -> dict[str, Any]:
        """Plain attributes of the samplers, such as a count of epochs."""
        return {
            f"{number}.{name}": value
            for number, sampler in enumerate(self._samplers)
            for name, value in getattr(sampler, "__dict__", {}).items()
            if isinstance(value, _PLAIN)
        }

    def _put(self, values: Mapping[str, Any]) -> None:
        for name, value in values.items():
            number, _, attribute = name.partition(".")
            if int(number) < len(self._samplers):
                vars(self._samplers[int(number)])[attribute] = value


def _digest(indices: Any, before: int) -> int:
    return zlib.crc32(repr(indices).encode(), before)


@dataclass(frozen=True, slots=True)
class _Drawn:
    """One batch of indices (or one index), and the seed of what is drawn while it is read."""

    indices: Any
    seed: int


class _SeededDataset(Dataset[Any]):
    """Reads and collates a loader's batches with random numbers that depend on the batch alone."""

    def __init__(self, loader: DataLoader[Any]) -> None:
        self.dataset: Any = loader.dataset
        self._collate: Callable[[Any], Any] = loader.collate_fn
        self._batched = loader.batch_sampler is not None
        self._generators: list[Generator] | None = None  # found in the process that reads

    def __getitem__(self, drawn: _Drawn) -> Any:
        if self._generators is None:
            self._generators = list(generators_in([self.dataset, self._collate]))
        with seeded(drawn.seed):
            seed_generators(self._generators, drawn.seed)
            return self._collate(self._samples(drawn.indices))

    __getitems__ = __getitem__

    def _samples(self, indices: Any) -> Any:
        if not self._batched:
            return self.dataset[indices]
        if getattr(self.dataset, "__getitems__", None):
            return self.dataset.__getitems__(indices)
        return [self.dataset[index] for index in indices]


def _unchanged(batch: Any) -> Any:
    return batch


def show_dataset() -> None:
    """Lets a loader's worker see its maker's data set as ``get_worker_info().dataset``."""
    info = get_worker_info()
    if info is not None and isinstance(info.dataset, _SeededDataset):
        object.__setattr__(info, "dataset", info.dataset.dataset)


def _samplers_of(loader: Any) -> list[Any]:
    """A loader's samplers, and those within them."""
    found: list[Any] = []

    def add(place: Any) -> None:
        for name in _SAMPLERS:
            sampler = getattr(place, "__dict__", {}).get(name)
            if sampler is not None and not any(sampler is other for other in found):
                found.append(sampler)
                add(sampler)

    add(loader)
    return found


def _draws_by_itself(sampler: Any) -> bool:
    """Whether a sampler certainly leaves the global generators alone: to ensure it takes time."""
    if type(sampler) is RandomSampler:
        return sampler.generator is not None
    return type(sampler) in (BatchSampler, SequentialSampler, DistributedSampler, TrainSampler)


def _set_epoch(samplers: list[Any], epoch: int) -> None:
    for sampler in samplers:
        if callable(set_epoch := getattr(sampler, "set_epoch", None)):
            set_epoch(epoch)


def generators_in(places: Iterable[Any], *, apart_from: Any = None) -> Iterator[Generator]:
    """Generators in attributes, lists and mappings of objects, as far as a search is short."""
    seen = {id(generator) for generator in (*GLOBAL, apart_from)}
    waiting = deque(places)
    while waiting and len(seen) < _SEARCHED:
        place = waiting.popleft()
        if id(place) in seen or isinstance(place, _WITHOUT_GENERATORS):
            continue
        seen.add(id(place))
        if is_generator(place):
            yield place
        elif isinstance(place, Mapping):
            waiting.extend(itertools.islice(place.values(), _SEARCHED))
        elif isinstance(place, (list, tuple)):
            waiting.extend(place[:_SEARCHED])
        else:
            waiting.extend(getattr(place, "__dict__", {}).values())
