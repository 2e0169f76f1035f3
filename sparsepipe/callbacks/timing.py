"""When the stages of a pipeline compute and wait, traces, and times of an emulation's steps."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from operator import mul
from statistics import fmean
from typing import Any, NamedTuple

import pytorch_lightning as pl
import torch
from typing_extensions import override

from sparsepipe.emulate import lift_limits, set_limits
from sparsepipe.emulate.training import Rates, rates, steady_part
from sparsepipe.errors import ConfigError
from sparsepipe.runtime.base_worker import StageWorker
from sparsepipe.runtime.collectives import process_group
from sparsepipe.runtime.recording import Recorder
from sparsepipe.schedule import Action, Span
from sparsepipe.schedule.asynchronous import steady_rounds
from sparsepipe.schedule.timeline import Interval, bubbles, idle_shares
from sparsepipe.strategies import PipelineStrategy, StagedStrategy

_KEPT = 64
"""Steps whose times are kept, the last ones."""


class Step(NamedTuple):
    """Times of a rank in a step.

    Attributes:
        busy: when it computed, seconds of the clock.
        end_s: when the step ended.
        round: how many steps had gone before it since the pipeline was empty.
    """

    busy: list[Interval]
    end_s: float
    round: int


class BusyTimes(pl.Callback):
    """Records when this rank of a pipeline computes; does nothing with other strategies.

    Args:
        clock: seconds that only grow, the same for all ranks.
    """

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._steps: deque[Step] = deque(maxlen=_KEPT)
        self._now: list[Interval] = []
        self._round = self._ahead = 0
        self._synchronous = self._watches = False

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        worker, strategy = _watched(trainer), trainer.strategy
        if worker is None:
            return
        assert isinstance(strategy, StagedStrategy)
        self._steps.clear()  # of the Trainer before, in a run of several
        self._watches, self._synchronous = True, not isinstance(strategy, PipelineStrategy)
        self._ahead = strategy.plan.warmup(0)
        worker.watch(self._around)

    @override
    def on_train_batch_start(self, trainer: pl.Trainer, *args: Any, **kwargs: Any) -> None:
        worker = _watched(trainer)
        if worker is not None:
            # Computations of a drain or a validation since the last step do not count.
            self._now, self._round = [], worker.rounds

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any, **kwargs: Any
    ) -> None:
        if self._watches:
            self._steps.append(Step(self._now, self._clock(), self._round))
            self._now = []

    def values(self) -> dict[str, float]:
        """Shares of time without computing, for ``result.json``; collective.

        Nothing where no pipeline ran, too few steps did, or ranks are on several machines, whose
        clocks differ.
        """
        own = (os.uname().nodename, list(self._steps)) if self._watches else None
        everyone: list[tuple[str, list[Step]] | None] = process_group.gather_objects(own)
        watched = [each for each in everyone if each is not None]
        if len(watched) < process_group.world_size() or len({name for name, _ in watched}) > 1:
            return {}
        steps = [each for _, each in watched]
        if self._synchronous:
            found = synchronous_bubbles(steps)
        else:
            found = steady_idle(steps, ahead=self._ahead)
        if found is None:
            return {}
        return {"bubble_share": fmean(found), "bubble_share_of_busiest": min(found)}

    @contextmanager
    def _around(self, inner: Callable[[], AbstractContextManager[None]]) -> Iterator[None]:
        begin_s = self._clock()
        with inner():
            yield
        self._now.append((begin_s, self._clock()))


def _watched(trainer: pl.Trainer) -> StageWorker[Any] | None:
    """This rank's worker of a pipeline on CPU; None on a GPU, whose kernels outlast host calls."""
    strategy = trainer.strategy
    if not isinstance(strategy, StagedStrategy) or strategy.root_device.type != "cpu":
        return None
    return None if strategy.pipeline is None else strategy.pipeline.worker


def synchronous_bubbles(ranks: Sequence[Sequence[Step]]) -> list[float] | None:
    """Bubble of each rank, mean over minibatches but the first; None if there are too few.

    Args:
        ranks: steps of each, a minibatch each, the last thing in which is the update.
    """
    count = min(map(len, ranks))
    minibatches = [[steps[number].busy[:-1] for steps in ranks] for number in range(1, count)]
    found = [bubbles(each) for each in minibatches if any(each)]
    return [fmean(shares) for shares in zip(*found, strict=True)] if found else None


def steady_idle(ranks: Sequence[Sequence[Step]], *, ahead: int) -> list[float] | None:
    """Idle share of each rank of an asynchronous pipeline while it was full; None if it never was.

    Times in which it fills or drains, and what lies between a drain and the next step, are left
    out: they depend on how long epochs are, and on validations and checkpoints in them.

    Args:
        ranks: steps of each; all drain after the same ones.
        ahead: as of :func:`steady_rounds`.
    """
    parts = _steady_parts(ranks[0], ahead=ahead)
    if not parts:
        return None
    busy = [[interval for step in steps for interval in step.busy] for steps in ranks]
    lengths_s = [end_s - begin_s for begin_s, end_s in parts]
    shares = [idle_shares(busy, begin=begin_s, end=end_s) for begin_s, end_s in parts]
    return [sum(map(mul, each, lengths_s)) / sum(lengths_s) for each in zip(*shares, strict=True)]


def _steady_parts(steps: Sequence[Step], *, ahead: int) -> list[Interval]:
    """Begin and end of the steady part of each run from one drain to the next."""
    runs: list[list[Step]] = []
    for step in steps:
        if not runs or step.round == 0:
            runs.append([])
        runs[-1].append(step)
    found = []
    for run in runs:
        # Other ranks are behind this one, and their times before their first kept step are
        # unknown: there the pipeline counts as if it still filled.
        kept = run[0].round
        part = steady_rounds(run[-1].round + 1, ahead=kept + ahead)
        if part is not None:
            begin_s, end_s = (run[number - kept].end_s for number in part)
            found.append((begin_s, end_s))
    return found


def _nothing() -> None:
    return None


_SKIPPED = 2
"""Minibatches for each rank before those of a trace: the pipeline fills, and memory is warm."""

_TRACED = 3
"""Minibatches of a trace for each rank."""


class Trace(pl.Callback):
    """Records what each rank of a pipeline does on a few minibatches.

    Ranks of one host share a clock. Those of other hosts are shifted by what their clocks show
    when all have met, which is exact to the time that such a meeting takes.
    """

    def __init__(self) -> None:
        self._recorder: Recorder | None = None

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        strategy = trainer.strategy
        if not isinstance(strategy, StagedStrategy) or strategy.pipeline is None:
            raise ConfigError(
                "trainer.trace=true records the stages of a pipeline on several ranks, and this "
                "training has none",
                remedy="choose parallel=hete_mp, pipeline or gpipe with two devices or more, or "
                "leave trainer.trace out; trainer.profiler=simple times the parts of any step",
            )
        is_cuda = strategy.root_device.type == "cuda"
        ranks = strategy.plan.without_grids.num_ranks
        parts = 1 if isinstance(strategy, PipelineStrategy) else ranks
        self._recorder = Recorder(
            rank=trainer.global_rank,
            skipped=-(-_SKIPPED * ranks // parts),
            count=-(-_TRACED * ranks // parts),
            finish=torch.cuda.synchronize if is_cuda else _nothing,
        )
        strategy.pipeline.worker.record(self._recorder)

    def gathered(self) -> Measured | None:
        """What all ranks recorded; None where training ended before. Collective."""
        own = self._recorder
        if own is None:
            return None
        process_group.gather_objects(own.rank, what="comparing clocks")
        now_s, host = own.clock(), os.uname().nodename
        spans = [(s.action.kind, s.action.number, s.action.microbatch, s.start, s.end)
                 for s in own.spans]  # fmt: skip
        moments = [(moment.part, moment.start, moment.end) for moment in own.moments]
        everyone = process_group.gather_objects((own.rank, host, now_s, spans, moments))
        starts_s = [row[3] for each in everyone for row in each[3]]
        if not starts_s:
            return None
        _, first_host, first_s, _, _ = everyone[0]
        shifts_s = {r: 0.0 if h == first_host else first_s - t for r, h, t, _, _ in everyone}
        begin_s = min(
            row[3] + shifts_s[rank] for rank, _, _, theirs, _ in everyone for row in theirs
        )
        found = Measured(first=min(row[1] for each in everyone for row in each[3]))
        for rank, _, _, theirs, parts in everyone:
            to_s = shifts_s[rank] - begin_s
            found.spans += [
                Span(rank, Action(kind, number, part), start + to_s, end + to_s)
                for kind, number, part, start, end in theirs
            ]
            found.beside += [(rank, part, start + to_s, end + to_s) for part, start, end in parts]
        return found


@dataclass(slots=True, kw_only=True)
class Measured:
    """What ranks did; seconds from the first action on.

    Attributes:
        first: number of the first minibatch.
        spans: the actions of each rank, rank by rank and in order.
        beside: rank, what, begin and end of what else took its time.
    """

    first: int
    spans: list[Span] = field(default_factory=list)
    beside: list[tuple[int, str, float, float]] = field(default_factory=list)

    def shares(self, rank: int) -> dict[str, float]:
        """Shares of a rank's time from its first action to its last: what it computes, what is
        beside that, and as ``else`` what is left (loading, hooks and logging).
        """
        own = [span for span in self.spans if span.rank == rank]
        begin, end = own[0].start, own[-1].end
        parts = {"computes": sum(span.end - span.start for span in own)}
        for of_rank, part, start, stop in self.beside:
            if of_rank == rank and start < end and stop > begin:
                inside = min(stop, end) - max(start, begin)
                parts[part] = parts.get(part, 0.0) + inside
        parts["else"] = max(0.0, end - begin - sum(parts.values()))
        return {part: took / (end - begin) for part, took in parts.items()}


class StepTimer(pl.Callback):
    """Records when each step of one emulated epoch ends, while the links have their limits.

    Before the training and after it the links have none.

    Args:
        time_scale: how many times slower than the cluster the emulation runs.
        clock: seconds that only grow.
    """

    def __init__(
        self, time_scale: float, *, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self.time_scale = time_scale
        self._clock = clock
        self._begin_s = 0.0
        self._ends_s: list[float] = []
        self._per_step, self._ahead = 1, 0

    def rates(self) -> Rates:
        """Speed of the epoch, once it is over."""
        return rates(
            self._ends_s,
            begin_s=self._begin_s,
            per_step=self._per_step,
            time_scale=self.time_scale,
            ahead=self._ahead,
        )

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        strategy = trainer.strategy
        self._per_step = trainer.world_size
        if isinstance(strategy, StagedStrategy):
            self._per_step = strategy.plan.replicas(0)
        if isinstance(strategy, PipelineStrategy):  # a synchronous one is empty after each step
            self._ahead = strategy.plan.warmup(0)
        steady_part(int(trainer.num_training_batches), ahead=self._ahead)  # refused early
        _together("limiting the links")
        if trainer.is_global_zero:
            set_limits()
        _together("limiting the links")

    @override
    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._begin_s = self._clock()

    @override
    def on_train_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        self._ends_s.append(self._clock())

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        _together("lifting the links' limits")
        if trainer.is_global_zero:
            lift_limits()


def _together(what: str) -> None:
    process_group.gather_objects(True, what=what)
