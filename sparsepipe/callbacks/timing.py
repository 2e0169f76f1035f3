"""Records when the ranks of a pipeline compute, and when the steps of an emulation end."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from operator import mul
from statistics import fmean
from typing import Any, NamedTuple

import pytorch_lightning as pl
from typing_extensions import override

from sparsepipe.emulate import set_limits
from sparsepipe.emulate.training import Rates, rates, steady_part
from sparsepipe.runtime.base_worker import StageWorker
from sparsepipe.runtime.collectives import process_group
from sparsepipe.schedule.asynchronous import steady_rounds
from sparsepipe.strategies import PipelineStrategy, StagedStrategy

Interval = tuple[float, float]
"""Begin and end, in seconds, of a period in which a rank computes."""

_KEPT = 64
"""Number of latest steps whose times are kept."""


class Step(NamedTuple):
    """Times of one rank in one step.

    Attributes:
        busy: periods in which the rank computed, in seconds of the clock.
        end_s: when the step ended, in seconds of the clock.
        round: number of steps before this one since the pipeline was last empty.
    """

    busy: list[Interval]
    end_s: float
    round: int


class BusyTimes(pl.Callback):
    """Records when this rank computes, if it belongs to a pipeline on CPUs.

    Args:
        clock: returns seconds that never decrease, the same on all ranks of a host.
    """

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._steps: deque[Step] = deque(maxlen=_KEPT)
        self._now: list[Interval] = []
        self._round = self._ahead = 0
        self._synchronous = False
        self._worker: StageWorker[Any] | None = None

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        strategy, self._worker = trainer.strategy, None
        if not isinstance(strategy, StagedStrategy) or strategy.pipeline is None:
            return
        if strategy.root_device.type != "cpu":
            return  # a GPU's kernels outlast the host's calls
        self._steps.clear()  # of an earlier Trainer of the run
        self._worker = strategy.pipeline.worker
        self._synchronous = not isinstance(strategy, PipelineStrategy)
        self._ahead = strategy.plan.warmup(0)
        self._worker.watch(self._around)

    @override
    def on_train_batch_start(self, trainer: pl.Trainer, *args: Any, **kwargs: Any) -> None:
        if self._worker is not None:
            # Computations of a drain or a validation since the last step do not count.
            self._now, self._round = [], self._worker.rounds

    @override
    def on_train_batch_end(self, *args: Any, **kwargs: Any) -> None:
        if self._worker is not None:
            self._steps.append(Step(self._now, self._clock(), self._round))
            self._now = []

    def values(self) -> dict[str, float]:
        """Returns the mean and smallest idle share of the ranks, for ``result.json``; collective.

        Empty if no pipeline or too few steps ran, or if ranks are on several hosts.
        """
        own = (os.uname().nodename, list(self._steps)) if self._worker is not None else None
        watched: list[Any] = process_group.gather_objects(own)
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


def idle_shares(
    ranks: Sequence[Sequence[Interval]], *, begin: float | None = None, end: float | None = None
) -> list[float]:
    """Returns, for each rank, the share of the time from ``begin`` to ``end`` in which it is idle.

    ``ranks``: the periods in which each rank computes. By default, the time lasts from the first
    begin to the last end of these periods.
    """
    begin = min(a for own in ranks for a, _ in own) if begin is None else begin
    end = max(b for own in ranks for _, b in own) if end is None else end
    return [
        1 - sum(max(0.0, min(b, end) - max(a, begin)) for a, b in own) / (end - begin)
        for own in ranks
    ]


def synchronous_bubbles(ranks: Sequence[Sequence[Step]]) -> list[float] | None:
    """Returns each rank's mean idle share of a minibatch's time, without the update, the last busy
    period of a step; None: only the first minibatch, which does not count, ran.
    """
    count = min(map(len, ranks))
    minibatches = [[steps[number].busy[:-1] for steps in ranks] for number in range(1, count)]
    found = [idle_shares(each) for each in minibatches if any(each)]
    return [fmean(shares) for shares in zip(*found, strict=True)] if found else None


def steady_idle(ranks: Sequence[Sequence[Step]], *, ahead: int) -> list[float] | None:
    """Returns each rank's idle share of the time in which an asynchronous pipeline was full; None:
    it never was.

    Filling, draining, and the time between a drain and the next step are left out: they depend on
    the length of epochs and on validations and checkpoints in them. All ranks drain after the same
    steps; ``ahead``: that of :func:`steady_rounds`.
    """
    runs: list[list[Step]] = []  # from one drain to the next
    for step in ranks[0]:
        if not runs or step.round == 0:
            runs.append([])
        runs[-1].append(step)
    parts: list[Interval] = []  # of each run, while the pipeline was full
    for run in runs:
        # Other ranks lag behind this one, and their times before their first kept step are
        # unknown: until then the pipeline counts as still filling.
        kept = run[0].round
        steady = steady_rounds(run[-1].round + 1, ahead=kept + ahead)
        if steady is not None:
            first, last = steady
            parts.append((run[first - kept].end_s, run[last - kept].end_s))
    if not parts:
        return None
    busy = [[interval for step in steps for interval in step.busy] for steps in ranks]
    lengths_s = [end_s - begin_s for begin_s, end_s in parts]
    shares = [idle_shares(busy, begin=begin_s, end=end_s) for begin_s, end_s in parts]
    return [sum(map(mul, each, lengths_s)) / sum(lengths_s) for each in zip(*shares, strict=True)]


class StepTimer(pl.Callback):
    """Records when each step of an emulated epoch ends; limits the links' speed during training.

    Args:
        time_scale: factor by which the emulation runs slower than the cluster.
        clock: returns seconds that never decrease.
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
        """Returns the training speed of the epoch, once it is over."""
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
        steady_part(int(trainer.num_training_batches), ahead=self._ahead)  # refuses too few batches
        process_group.gather_objects(True, what="limiting the links")
        if trainer.is_global_zero:
            set_limits()
        process_group.gather_objects(True, what="limiting the links")

    @override
    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._begin_s = self._clock()

    @override
    def on_train_batch_end(self, *args: Any, **kwargs: Any) -> None:
        self._ends_s.append(self._clock())

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        process_group.gather_objects(True, what="lifting the links' limits")
        if trainer.is_global_zero:
            set_limits(lifted=True)
