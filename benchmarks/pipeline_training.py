"""One row of the pipeline benchmark: a training as users run it, with a clock in it."""

from __future__ import annotations

import logging
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Self

import pytorch_lightning as pl
from pipeline_workloads import LossAlone, Workload, loader, module
from typing_extensions import override

from sparsepipe.runtime.asynchronous_worker import AsynchronousWorker
from sparsepipe.schedule import Plan
from sparsepipe.strategies import (
    DataParallelStrategy,
    PipelineStrategy,
    StagedStrategy,
    SynchronousPipelineStrategy,
)

TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """How to train.

    Args:
        name: of the row.
        ranks: processes.
        plan: of a pipeline; None for one process or data parallelism.
        schedule: of a synchronous pipeline, gpipe or 1f1b; None: an asynchronous one.
        microbatches: T, of a synchronous one.
        recompute: layers of it that run once more before their backward: none or all.
        accelerator: of all ranks; ``gpu``: they share one device, each as a node of its own, since
            Lightning gives no device to two ranks of a node.
        metrics: the module has metrics and logs, as users' have; else it has its loss alone.
    """

    name: str
    ranks: int
    plan: Plan | None = None
    schedule: Literal["gpipe", "1f1b"] | None = None
    microbatches: int = 1
    recompute: Literal["none", "all"] = "none"
    accelerator: Literal["cpu", "gpu"] = "cpu"
    metrics: bool = True

    @property
    def readers(self) -> int:
        """Ranks that read minibatches."""
        return self.ranks if self.plan is None else self.plan.replicas(0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Epoch:
    """What one rank measured of an epoch.

    Attributes:
        whole_s: from its beginning to the end of its last step.
        steady_s: between the ends of two steps, mean over its middle.
        steps: of it.
    """

    whole_s: float
    steady_s: float
    steps: int

    @classmethod
    def of(cls, begun_s: float, ends_s: Sequence[float]) -> Self:
        """Of the times when it began and steps ended; fill and drain lie outside of the middle."""
        edge = min(8, len(ends_s) // 4)
        middle = ends_s[edge : len(ends_s) - edge]
        return cls(
            whole_s=ends_s[-1] - begun_s,
            steady_s=(middle[-1] - middle[0]) / (len(middle) - 1),
            steps=len(ends_s),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """What one rank measured.

    Attributes:
        epochs: in their order; the first one has warmed up.
        sent: by kind of message, over all epochs: messages, bytes of tensors, of headers.
        peak_versions: sets of weights on this rank; 0 without a pipeline.
        peak_bytes: of these sets.
    """

    epochs: tuple[Epoch, ...]
    sent: Mapping[str, tuple[int, int, int]] = field(default_factory=dict)
    peak_versions: int = 0
    peak_bytes: int = 0

    @property
    def last(self) -> Epoch:
        """The last epoch."""
        return self.epochs[-1]


class Clock(pl.Callback):
    """Notes when epochs begin and steps end, and what the pipeline has to tell."""

    def __init__(self) -> None:
        self.epochs: list[tuple[float, list[float]]] = []
        self.pipeline: dict[str, Any] = {}

    @override
    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.epochs.append((time.perf_counter(), []))

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any, **kwargs: Any
    ) -> None:
        self.epochs[-1][1].append(time.perf_counter())

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if not isinstance(trainer.strategy, StagedStrategy):
            return
        pipeline = trainer.strategy.pipeline
        assert pipeline is not None
        worker = pipeline.worker
        self.pipeline["sent"] = {
            kind.value: (traffic.messages, traffic.payload_bytes, traffic.overhead_bytes)
            for kind, traffic in worker.network.sent.items()
        }
        if isinstance(worker, AsynchronousWorker):
            assert worker.weights is not None
            self.pipeline["peak_versions"] = worker.weights.memory.peak_versions
            self.pipeline["peak_bytes"] = worker.weights.memory.peak_bytes

    def found(self) -> Trained:
        """What was measured."""
        return Trained(epochs=tuple(Epoch.of(*each) for each in self.epochs), **self.pipeline)


def train(
    rank: int,
    workload: Workload,
    way: Way,
    minibatches: int,
    epochs: int,
    *,
    callbacks: Sequence[pl.Callback] = (),
) -> Trained:
    """As :func:`fit`, without the module."""
    return fit(rank, workload, way, minibatches, epochs, callbacks=callbacks)[0]


def fit(
    rank: int,
    workload: Workload,
    way: Way,
    minibatches: int,
    epochs: int,
    *,
    callbacks: Sequence[pl.Callback] = (),
) -> tuple[Trained, pl.LightningModule]:
    """Trains on this rank; what it measured, and the trained module.

    Args:
        rank: this one.
        workload: network and data.
        way: how.
        minibatches: of an epoch, over all readers.
        epochs: how many.
        callbacks: that are called before the clock's.
    """
    warnings.filterwarnings("ignore")
    for name in ("pytorch_lightning", "lightning_fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    clock = Clock()
    trainer = pl.Trainer(
        accelerator=way.accelerator,
        devices=way.ranks if way.accelerator == "cpu" else 1,
        num_nodes=1 if way.accelerator == "cpu" else way.ranks,
        strategy=_strategy(way),
        max_epochs=epochs,
        callbacks=[*callbacks, clock],
        use_distributed_sampler=False,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    net = module(workload) if way.metrics else LossAlone(workload)
    trainer.fit(net, loader(workload, minibatches // way.readers))
    return clock.found(), net


def _strategy(way: Way) -> Any:
    if way.plan is None:
        return "auto" if way.ranks == 1 else DataParallelStrategy(timeout_s=TIMEOUT_S)
    split: dict[str, Any] = {"config": way.plan.config, "cuts": list(way.plan.cuts)}
    if way.schedule is None:
        return PipelineStrategy(**split, timeout_s=TIMEOUT_S)
    return SynchronousPipelineStrategy(
        schedule=way.schedule,
        microbatches=way.microbatches,
        recompute=way.recompute,
        **split,
        timeout_s=TIMEOUT_S,
    )
