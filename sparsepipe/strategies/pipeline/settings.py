"""Options of the strategies that reach the worker, and the worker that they ask for."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import nn
from torch.optim import Optimizer

from sparsepipe.errors import ConfigError
from sparsepipe.partition.microbatches import check_microbatches
from sparsepipe.partition.recompute.layers import Setting, StageSpans
from sparsepipe.runtime.minibatch_norms import MinibatchNorms, NormMode, check_norms
from sparsepipe.runtime.stage_worker import StageWorker
from sparsepipe.runtime.synchronous_worker import SynchronousWorker
from sparsepipe.runtime.weights import Mode, Weights
from sparsepipe.runtime.worker import Worker
from sparsepipe.schedule import SYNCHRONOUS, Plan
from sparsepipe.strategies.pipeline.events import MicrobatchEvents, StepEvents, TrainingEvents
from sparsepipe.strategies.pipeline.layers import Share
from sparsepipe.strategies.pipeline.recomputed import check_recompute, spans_of

MakeWorker = Callable[..., StageWorker[Any]]
"""Makes a worker of what all of them need (:class:`StageWorker`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings(ABC):
    """What all pipelines have; see the strategies."""

    send_input: bool
    keyed_randomness: bool
    timeout_s: float
    direct: bool
    slowed: Callable[[], AbstractContextManager[None]]

    @property
    @abstractmethod
    def as_plain(self) -> bool:
        """Whether a single rank has nothing to do that a plain Trainer does not."""

    @property
    @abstractmethod
    def events(self) -> type[StepEvents]:
        """What the worker tells."""

    @property
    def queue_depth(self) -> int | None:
        """Messages of training that a channel holds; None: the channel's own number."""
        return None

    @property
    def clips_whole(self) -> bool:
        """Whether the gradients of all stages are there at once, to be clipped by one norm."""
        return False

    @abstractmethod
    def check_module(self, module: nn.Module) -> None:
        """Refuse a module that is to be trained.

        Raises:
            ConfigError: it does not suit the options.
        """

    @abstractmethod
    def check(self, plan: Plan) -> None:
        """Refuse a plan.

        Raises:
            ConfigError: it does not suit the options.
        """

    def recomputed(self, plan: Plan, layers: nn.Sequential | None = None) -> StageSpans:
        """The spans of each stage's layers that run once more in their backward.

        Args:
            plan: the stages.
            layers: the whole Sequential, where it is to be looked through as well.

        Raises:
            ConfigError: there are no such layers or stages, or they cannot run again.
        """
        del layers
        return ((),) * plan.num_stages

    @abstractmethod
    def worker(self, plan: Plan, rank: int, share: Share, over: Optimizer | None) -> MakeWorker:
        """Makes the maker of a worker, so that what may be refused is, before ranks meet.

        Args:
            plan: the stages and their ranks.
            rank: this one's number.
            share: what it holds of the module.
            over: the optimizer of its parameters; None for evaluation only.

        Raises:
            ConfigError: the optimizer does not suit.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class AsynchronousSettings(Settings):
    """Of the asynchronous pipeline."""

    mode: Mode | str
    predict_backward: bool

    def __post_init__(self) -> None:
        if self.mode not in list(Mode):
            raise ConfigError(
                f"mode={str(self.mode)!r} is unknown", remedy=f"use one of {', '.join(Mode)}"
            )

    @property
    def as_plain(self) -> bool:
        return not self.keyed_randomness

    @property
    def events(self) -> type[StepEvents]:
        return TrainingEvents

    def check_module(self, module: nn.Module) -> None:
        """Every module will do."""

    def check(self, plan: Plan) -> None:
        """Every plan will do."""

    def worker(self, plan: Plan, rank: int, share: Share, over: Optimizer | None) -> MakeWorker:
        if over is None:
            return partial(Worker, weights=None)
        weights = Weights(
            dict(share.parameters()),
            self.mode,
            over,
            replicas=plan.replicas(plan.stage_of(rank)),
            predict_backward=self.predict_backward,
        )
        return partial(Worker, weights=weights)


@dataclass(frozen=True, slots=True, kw_only=True)
class SynchronousSettings(Settings):
    """Of a synchronous pipeline."""

    schedule: str
    batch_norm: NormMode | str
    microbatches: int
    recompute: Setting = "none"

    def __post_init__(self) -> None:
        if self.schedule not in SYNCHRONOUS:
            raise ConfigError(
                f"schedule={self.schedule!r} is unknown",
                remedy=f"use one of {', '.join(SYNCHRONOUS)}",
            )
        if self.batch_norm not in list(NormMode):
            raise ConfigError(
                f"batch_norm={str(self.batch_norm)!r} is unknown",
                remedy=f"use one of {', '.join(NormMode)}",
            )
        check_microbatches(self.microbatches)
        check_recompute(self.recompute)

    @property
    def as_plain(self) -> bool:
        cut = self.microbatches > 1 or self.batch_norm != NormMode.MICROBATCH
        return self.recompute == "none" and not self.keyed_randomness and not cut

    @property
    def events(self) -> type[StepEvents]:
        return MicrobatchEvents

    @property
    def queue_depth(self) -> int | None:
        """Room for all of a minibatch: what is under way the schedule bounds."""
        return self.microbatches

    @property
    def clips_whole(self) -> bool:
        return True

    def check_module(self, module: nn.Module) -> None:
        check_norms(module, NormMode(self.batch_norm))

    def check(self, plan: Plan) -> None:
        check_microbatches(self.microbatches, plan.replicas_of_stages)

    def recomputed(self, plan: Plan, layers: nn.Sequential | None = None) -> StageSpans:
        return spans_of(self.recompute, plan, layers)

    def worker(self, plan: Plan, rank: int, share: Share, over: Optimizer | None) -> MakeWorker:
        trains = over is not None
        norms = MinibatchNorms(
            share.norms() if trains else {},
            NormMode(self.batch_norm),
            of_others=share.norms_of_others() if trains else {},
        )
        return partial(
            SynchronousWorker,
            order=SYNCHRONOUS[self.schedule],
            microbatches=self.microbatches,
            parameters=dict(share.parameters()) if trains else {},
            norms=norms,
        )
