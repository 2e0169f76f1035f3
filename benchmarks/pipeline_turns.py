"""Profilers and trainers that take turns, so that both see the same machine.

Both are ranks of their own that know nothing of the other kind but when its turn is.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial

import pytorch_lightning as pl
import torch
import torch.distributed as dist
from pipeline_bound import TIMEOUT_S
from pipeline_calls import CallTimes
from pipeline_ranks import Turns
from pipeline_training import Epoch, Way, train
from pipeline_workloads import Workload, fresh, module
from typing_extensions import override

from sparsepipe.profiling import Profile
from sparsepipe.profiling.measure import measure
from sparsepipe.profiling.timing import step_seconds
from sparsepipe.runtime.collectives import process_group

CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """Of a repetition.

    Attributes:
        turns: of profilers and of trainers, without the first that warms up.
        passes: of a profiler's turn.
        minibatches: of a trainer's turn, which is an epoch.
    """

    turns: int
    passes: int
    minibatches: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RankTimes:
    """What one rank of the pipeline measured, without the first epoch.

    Attributes:
        epochs: how fast it went.
        busy: seconds a minibatch of each of :data:`~pipeline_calls.CALLS`, by epoch.
    """

    epochs: tuple[Epoch, ...]
    busy: tuple[Mapping[str, float], ...]

    def busy_s(self, kind: str) -> float:
        """Of a minibatch."""
        return statistics.median(epoch[kind] for epoch in self.busy)


class TakesTurns(pl.Callback):
    """An epoch begins when the profilers have had their turn, and then they have the next one."""

    def __init__(self, turns: Turns) -> None:
        self._turns = turns

    @override
    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._turns.meet()

    @override
    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._turns.meet()


def trained(rank: int, workload: Workload, way: Way, turns: Turns, size: Size) -> RankTimes:
    """Trains in turn with the profilers."""
    calls = CallTimes()
    epochs = size.turns + 1
    callbacks = [TakesTurns(turns), calls]
    found = train(rank, workload, way, size.minibatches, epochs, callbacks=callbacks)
    return RankTimes(epochs=found.epochs[1:], busy=tuple(calls.epochs[1:]))


def profiled(rank: int, workload: Workload, turns: Turns, size: Size) -> Profile:
    """Profiles the network while all other profilers do, in turn with the trainers."""
    process_group.join("gloo", timeout_s=TIMEOUT_S)
    layers = module(workload).layers
    inputs = [workload.input(number) for number in range(3)]
    step = partial(step_seconds, layers, device=CPU, slowed=nullcontext)
    profile = measure(
        layers,
        inputs,
        device=CPU,
        num_warmup=size.passes,
        num_measured=size.turns * size.passes,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=1e-4, momentum=0.9),
        between=partial(give_way, turns, size, lambda: step(fresh(inputs[0]))),
        meta={"batch_size": workload.batch_size},
    )
    dist.barrier()
    process_group.leave()
    return profile


def give_way(turns: Turns, size: Size, stay_busy: Callable[[], object], number: int) -> None:
    """Ends a turn after its last pass; comes back when the next one begins."""
    turn, left = divmod(number + 1, size.passes)
    if left:
        return
    store = process_group.store()
    store.add(f"turn {turn}", 1)
    while store.add(f"turn {turn}", 0) < dist.get_world_size():  # the others are not done yet
        stay_busy()
    turns.meet()
    turns.meet()  # at the end of the trainers' turn
