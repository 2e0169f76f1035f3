"""How much of their time the stages of a pipeline wait: from what they computed when."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from statistics import fmean
from typing import Any

import pytorch_lightning as pl
from typing_extensions import override

from sparsepipe.runtime import group
from sparsepipe.schedule.bubbles import Interval, bubbles, idle_shares
from sparsepipe.strategies import PipelineStrategy, StagedStrategy

_KEPT = 64
"""Steps whose times are kept, the last ones."""

Step = tuple[list[Interval], float]
"""What a rank computed in a step, and when the step ended."""


class Busy(pl.Callback):
    """Notes when this rank of a pipeline computes; nothing of other strategies.

    Args:
        clock: seconds that only grow, the same for all ranks.
    """

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._steps: deque[Step] = deque(maxlen=_KEPT)
        self._now: list[Interval] = []
        self._synchronous = self._watches = False

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        strategy = trainer.strategy
        if not isinstance(strategy, StagedStrategy) or strategy.pipeline is None:
            return
        if strategy.root_device.type != "cpu":
            return  # a GPU computes after the host has gone on
        if self._watches:  # Trainers of one run: the worker is a new one
            self._steps.clear()
        self._watches, self._synchronous = True, not isinstance(strategy, PipelineStrategy)
        strategy.pipeline.worker.watch(self._around)

    @override
    def on_train_batch_start(self, *args: Any, **kwargs: Any) -> None:
        if self._synchronous:
            self._now = []  # what a validation computed since the last step is of no step

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any, **kwargs: Any
    ) -> None:
        if self._watches:
            self._steps.append((self._now, self._clock()))
            self._now = []

    def values(self) -> dict[str, float]:
        """Shares of time without computing, for ``result.json``; every rank must ask.

        Nothing where no pipeline ran, too few steps did, or ranks are on several machines, whose
        clocks differ.
        """
        machine = os.uname().nodename
        told = (machine, list(self._steps)) if self._watches else None
        everyone: list[tuple[str, list[Step]] | None] = group.gather_objects(told)
        watched = [each for each in everyone if each is not None]  # as it gives them
        if len(watched) < group.world_size() or len({name for name, _ in watched}) > 1:
            return {}
        steps = [each for _, each in watched]
        found = synchronous_bubbles(steps) if self._synchronous else steady_idle(steps)
        if found is None:
            return {}
        return {"bubble_share": fmean(found), "bubble_share_of_busiest": min(found)}

    @contextmanager
    def _around(self, inner: Callable[[], AbstractContextManager[None]]) -> Iterator[None]:
        begin_s = self._clock()
        with inner():
            yield
        self._now.append((begin_s, self._clock()))


def synchronous_bubbles(ranks: Sequence[Sequence[Step]]) -> list[float] | None:
    """Of each rank, mean over minibatches but the first; None where there are too few.

    Args:
        ranks: steps of each, a minibatch each, the last thing in which is the update.
    """
    count = min(map(len, ranks))
    minibatches = [[steps[number][0][:-1] for steps in ranks] for number in range(1, count)]
    found = [bubbles(each) for each in minibatches if any(each)]
    return [fmean(shares) for shares in zip(*found, strict=True)] if found else None


def steady_idle(ranks: Sequence[Sequence[Step]]) -> list[float] | None:
    """Of each rank in the second half of the steps but the last, after which pipelines drain.

    None where there are too few.

    Args:
        ranks: steps of each.
    """
    ends_s = [end_s for _, end_s in ranks[0]]
    first, last = len(ends_s) // 2, len(ends_s) - 2
    if last <= first:
        return None
    busy = [[interval for intervals, _ in steps for interval in intervals] for steps in ranks]
    return idle_shares(busy, begin=ends_s[first], end=ends_s[last])
