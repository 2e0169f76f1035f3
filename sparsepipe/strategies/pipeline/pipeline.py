"""One rank's pipeline while a Trainer runs: options, worker, and the exchange at drains."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.plugins.precision import Precision
from torch import Tensor, nn
from torch.optim import Optimizer

from sparsepipe.errors import ConfigError
from sparsepipe.partition.activation_checkpointing.setting import StageSpans
from sparsepipe.runtime.base_worker import StageWorker, merge_in_order
from sparsepipe.runtime.collectives import process_group
from sparsepipe.runtime.collectives.halo import ProcessGroup
from sparsepipe.runtime.collectives.process_group import destroy_group, make_stage_group
from sparsepipe.runtime.collectives.replicas import GridRanks, Replicas
from sparsepipe.runtime.random_generators import KeyedRandomness
from sparsepipe.runtime.stage import Stage
from sparsepipe.runtime.transport import Network, SharedMessages
from sparsepipe.schedule import Plan
from sparsepipe.strategies.metrics import Metrics
from sparsepipe.strategies.pipeline.grids import on_shards
from sparsepipe.strategies.pipeline.layers import Placement, Shard
from sparsepipe.strategies.pipeline.logging import LogReplay, Logs
from sparsepipe.strategies.pipeline.optimizer_step import OptimizerStep
from sparsepipe.strategies.pipeline.steps import ModuleSteps
from sparsepipe.strategies.sharding import ShardedModule

TRAINING = "training_step"


class StepEvents(ABC):
    """Hooks, updates, and logs, which are kept for the next drain by what orders them.

    Args:
        updates: applies gradients; None where nothing is trained.
        keeps: whether this rank is of the last stage, where steps log.
    """

    def __init__(
        self,
        module: pl.LightningModule,
        *,
        updates: OptimizerStep | None,
        precision: Precision,
        keeps: bool,
    ) -> None:
        self._module = module
        self._updates = updates
        self._precision = precision
        self._keeps = keeps
        self.loss = torch.zeros((), device=module.device)
        self._kept: list[tuple[Any, Any]] = []
        self.repeater = LogReplay(module)

    def begin(self, step: int) -> None:
        """A round enters; steps count from 0 after a drain."""
        assert self._updates is not None
        self._updates.record(step)

    def before_backward(self, loss: Tensor) -> None:
        self._precision.pre_backward(loss, self._module)

    def update(self, gradients: Mapping[str, Tensor | None], *, step: int) -> None:
        assert self._updates is not None
        self._updates.apply(gradients, loss=self.loss, step=step)

    def end(self) -> None:
        """The run has ended, perhaps between a step's beginning and its update."""
        if self._updates is not None:
            self._updates.hooks.resume()

    @abstractmethod
    def logs_of(self, kept: Iterable[Any]) -> list[Logs]:
        """The logs of each minibatch, from the values kept of them, both in order."""

    def keep(self, found: Iterable[tuple[Any, Any]]) -> None:
        """Keeps what minibatches logged, on ranks of the last stage."""
        if self._keeps:
            self._kept += found

    def take(self) -> list[tuple[Any, Any]]:
        """The logs kept since the last call."""
        kept, self._kept = self._kept, []
        return kept


MakeWorker = Callable[..., StageWorker[Any]]
"""Makes a worker of what all of them need (:class:`StageWorker`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings(ABC):
    """Settings common to all pipelines; see the strategies."""

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
        """The callbacks of the worker."""

    @property
    def queue_depth(self) -> int | None:
        """Messages of training that a channel holds; None: the channel's own number."""
        return None

    @property
    def clips_globally(self) -> bool:
        """Whether the gradients of all stages are there at once, to be clipped by one norm."""
        return False

    @abstractmethod
    def check_module(self, module: nn.Module) -> None:
        """Refuse a module that is to be trained."""

    @abstractmethod
    def check(self, plan: Plan) -> None:
        """Refuse a plan."""

    def recomputed(self, plan: Plan, layers: nn.Sequential | None = None) -> StageSpans:
        """The spans of each stage's layers that run once more in their backward.

        ``layers`` is the whole Sequential, where it is to be looked through as well.

        Raises:
            ConfigError: there are no such layers or stages, or they cannot run again.
        """
        del layers
        return ((),) * plan.num_stages

    @abstractmethod
    def worker(self, plan: Plan, rank: int, shard: Shard, over: Optimizer | None) -> MakeWorker:
        """A function that makes the worker; refuses unsuitable settings before ranks connect.

        ``over`` is the optimizer of the rank's parameters; None for evaluation only.
        """


class Pipeline:
    """Trains and evaluates on one rank."""

    def __init__(
        self,
        worker: StageWorker[Any],
        *,
        plan: Plan,
        rank: int,
        steps: ModuleSteps,
        events: StepEvents,
        metrics: Metrics,
        shard: Shard,
        trained: Collection[str],
        end: Callable[[], Any],
    ) -> None:
        self.worker = worker
        self._plan = plan
        self._steps = steps
        self._events = events
        self._metrics = metrics
        self._shard = shard
        self._trained = trained
        last, leads = plan.num_stages - 1, plan.leader_of(rank) == rank
        is_last = plan.stage_of(rank) == last and leads
        self._last_replica = plan.replica_of(rank) if is_last else None
        self._reads = plan.stage_of(rank) == 0 and leads
        self._end = end

    @property
    def loss(self) -> Tensor:
        """The loss of the last step, or minibatch, that came back to this rank."""
        return self._events.loss

    def train(self, batch: Any, arguments: tuple[Any, ...], *, count: int, number: int) -> None:
        """One Lightning step: a round of stage 0 enters."""
        self._steps.choose(TRAINING, arguments)
        if not self.worker.rounds:
            self._shard.check_trained(self._trained)
        with self._shard.absence.silent():
            self._events.begin(self.worker.rounds)
            self.worker.feed(batch, count=count, number=number)

    def drain(self) -> None:
        """Finishes what is under way; every rank then knows all that was logged.

        Every rank must call it. Does nothing if nothing ran since the last time.
        """
        if not self.worker.rounds:
            return
        with self._shard.absence.silent():
            self.worker.drain(self._shard.statistics())
        logs = self._events.logs_of(self._exchange())
        self._events.repeater.replay(logs, hook=TRAINING)

    def evaluate(self, hook: str, batch: Any, arguments: tuple[Any, ...], *, count: int) -> None:
        """Sends a round forward; its results are known after :meth:`end_evaluation`."""
        self._steps.choose(hook, arguments)
        self._events.keep(self.worker.evaluate(batch, count=count))

    def predict(self, hook: str, batch: Any, arguments: tuple[Any, ...], *, count: int) -> Any:
        """Sends a round forward; the result of this rank's batch, None on other ranks."""
        self._steps.choose(hook, arguments)
        found = self.worker.evaluate(batch, count=count, replies=True)
        return found[-1][1] if found and self._reads else None

    def end_evaluation(self, hook: str) -> None:
        """After a loader's last batch: every rank gets all that was logged, and all metrics."""
        self.worker.end_evaluation()
        self._events.repeater.append(self._exchange(), hook=hook)

    def end(self, *, failed: bool) -> None:
        """Ends what is shared with other ranks; waits for none of them if it ``failed``."""
        self._metrics.attach()
        self._events.end()
        if not failed:
            self._end()

    def _exchange(self) -> list[Any]:
        """Logs of all minibatches, in order; metrics get the merged states of all replicas."""
        mine = self._events.take()
        replica = self._last_replica
        states = self._metrics.take_updated()
        own = None if replica is None else (mine, states)
        everyone: list[Any] = process_group.gather_objects(own, what="exchanging what was logged")
        self._metrics.merge([states for _, states in everyone], replica=replica)
        return merge_in_order([logs for logs, _ in everyone])


def make_pipeline(
    settings: Settings,
    *,
    placement: Placement,
    sharded: ShardedModule[Shard],
    module: pl.LightningModule,
    device: torch.device,
    rank: int,
    precision: Precision,
    optimizer: Optimizer | None,
) -> Pipeline:
    """A pipeline and its worker, for evaluation only where there is no ``optimizer``; every rank
    must call it.

    Raises:
        ConfigError: the optimizer does not suit the mode, or there is no seed to key draws by.
    """
    # First what may be refused, then what other ranks must take part in.
    plan, shard = placement.plan, sharded.part
    keyed = settings.keyed_randomness and optimizer is not None  # evaluation draws as it is
    randomness = _randomness(device) if keyed else None
    parameters = dict(shard.parameters()) if optimizer is not None else {}
    make_worker = settings.worker(plan, rank, shard, optimizer)
    updates = None
    if optimizer is not None:
        norm = sharded.global_norm() if settings.clips_globally and plan.num_stages > 1 else None
        updates = OptimizerStep(module, parameters, optimizer, precision, norm=norm)
    together = _Connections(settings, plan=plan, rank=rank, device=device)
    stage = _stage(
        settings,
        placement,
        module,
        rank=rank,
        autocast=precision.forward_context,
        randomness=randomness,
        group=together.replicas,
    )
    metrics = Metrics(module)
    metrics.detach()
    steps = ModuleSteps(
        module,
        placement.layers,
        metrics=metrics,
        absence=shard.absence,
        autocast=precision.forward_context,
        send_input=settings.send_input,
    )
    events = settings.events(module, updates=updates, precision=precision, keeps=shard.is_last)
    worker = make_worker(
        plan=plan,
        rank=rank,
        stage=stage,
        replicas=(GridRanks if together.shared else Replicas)(together.replicas, parameters),
        network=together.network,
        shared=together.shared,
        steps=steps,
        events=events,
        slowed=settings.slowed,
    )
    return Pipeline(
        worker,
        plan=plan,
        rank=rank,
        steps=steps,
        events=events,
        metrics=metrics,
        shard=shard,
        trained=parameters.keys(),
        end=together.end,
    )


def _stage(
    settings: Settings,
    placement: Placement,
    module: pl.LightningModule,
    *,
    rank: int,
    autocast: Callable[[], AbstractContextManager[Any]],
    randomness: KeyedRandomness | None,
    group: ProcessGroup | None,
) -> Stage:
    plan = placement.plan
    number = plan.stage_of(rank)
    (first, last), shape = plan.stages[number].layers, plan.stages[number].grid
    around = None
    if shape is not None:
        around = on_shards(list(placement.layers)[first : last + 1], shape, group)
    return Stage(
        module,
        placement.layers,
        first=first,
        last=last,
        autocast=autocast,
        randomness=randomness,
        recomputed=settings.recomputed(plan)[number],
        around=around,
    )


class _Connections:
    """Groups and channels between ranks: every rank must call each method."""

    def __init__(self, settings: Settings, *, plan: Plan, rank: int, device: torch.device) -> None:
        limit_s = settings.timeout_s
        stages = map(plan.ranks_of, range(plan.num_stages))
        backend = "nccl" if settings.direct else "gloo"
        self.replicas = make_stage_group(stages, backend=backend, timeout_s=limit_s)
        self.network = Network(
            plan,
            rank,
            timeout_s=limit_s,
            device=device,
            direct=settings.direct,
            queue_depth=settings.queue_depth,
        )
        is_grid = plan.stages[plan.stage_of(rank)].grid is not None
        self.shared = SharedMessages(self.replicas, device=device) if is_grid else None

    def end(self) -> None:
        self.network.close()
        destroy_group(self.replicas)


def _randomness(device: torch.device) -> KeyedRandomness:
    seed = os.environ.get("PL_GLOBAL_SEED")
    if seed is None:
        raise ConfigError(
            "keyed_randomness makes draws of the run's seed, and there is none",
            remedy="call pytorch_lightning.seed_everything before the Trainer runs",
        )
    return KeyedRandomness(seed=int(seed), device=device)
