"""One rank's pipeline while a Trainer runs: its worker, updates, and the exchange at drains."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
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
from sparsepipe.runtime.random_generators import KeyedRandomness
from sparsepipe.runtime.stage import Stage
from sparsepipe.schedule import Plan
from sparsepipe.spatial.grid import Grid
from sparsepipe.spatial.spatialize import spatialize_layers, through_shards
from sparsepipe.strategies.metrics import Metrics
from sparsepipe.strategies.pipeline.logging import LogReplay, Logs
from sparsepipe.strategies.pipeline.placeholders import StageModule
from sparsepipe.strategies.pipeline.stage_plan import StagePlacement
from sparsepipe.strategies.pipeline.steps import TRAINING, ModuleSteps
from sparsepipe.strategies.sharding import GlobalNorm

MakeWorker = Callable[..., StageWorker[Any]]
"""Makes a worker of what all of them need (:class:`StageWorker`)."""

Options = dict[str, Any]
"""The options of one parameter group: all entries but its parameters."""
_PLAIN = (int, float, str, tuple, type(None))


class StageOptimizer:
    """Runs hooks, clips gradients, and updates parameters with the options of the right step.

    Schedulers change an optimizer's options between Lightning steps. Replicas of a stage may
    apply the same update in different steps, and must all use the options of one step.

    Args:
        norm: clips by norm in place of ``precision``; None: ``precision`` clips.
    """

    def __init__(
        self,
        module: pl.LightningModule,
        parameters: Mapping[str, nn.Parameter],
        optimizer: Optimizer,
        precision: Precision,
        *,
        norm: GlobalNorm | None = None,
    ) -> None:
        self._module = module
        self._parameters = parameters
        self._optimizer = optimizer
        self._precision = precision
        self._norm = norm
        self._options: dict[int, list[Options]] = {}

    def record(self, step: int) -> None:
        """Records the options as those of a step; steps count from 0 after a drain."""
        if step == 0:
            self._options.clear()
        self._options[step] = self._present()

    def apply(self, gradients: Mapping[str, Tensor | None], *, loss: Tensor, step: int) -> None:
        """Updates the parameters with the options of ``step``, which never falls.

        Raises:
            ConfigError: the optimizer needs gradients at other weights too, or changes options.
        """
        kind = type(self._optimizer).__name__
        for name, parameter in self._parameters.items():
            parameter.grad = gradients.get(name)
        self._precision.post_backward(loss, self._module)
        calls = 0

        def state() -> list[tuple[int, int]]:
            return [(p._version, id(p.grad)) for p in self._parameters.values()]

        def closure() -> Tensor:
            nonlocal calls
            calls += 1
            if calls > 1 or state() != before:
                raise ConfigError(
                    f"{kind} evaluates the network several times or at other weights for one "
                    "update, and in a pipeline other minibatches are under way",
                    remedy="use an optimizer that takes one gradient for an update, such as SGD "
                    "or AdamW",
                )
            return loss

        now, before = self._present(), state()
        self._set(self._options[step])
        with nullcontext() if self._norm is None else self._norm.clipping(self._precision):
            self._precision.optimizer_step(self._optimizer, model=self._module, closure=closure)
        if not calls:
            raise ConfigError(
                f"{kind} does not call the closure that its step is given",
                remedy="let its step call the closure first, as torch's optimizers do",
            )
        for after, options in zip(self._present(), self._options[step], strict=True):
            changed = [
                name
                for name, value in after.items()
                if name not in options or not _equal(value, options[name])
            ]
            if changed:
                raise ConfigError(
                    f"{kind}, or a hook of its step, changes {changed[0]!r} of its groups, and in "
                    "a pipeline each update has the options of its own Lightning step",
                    remedy="use an optimizer with a state for each parameter, such as SGD or "
                    "AdamW, and change options by schedulers",
                )
        self._set(now)
        for earlier in [known for known in self._options if known < step]:
            del self._options[earlier]

    def _present(self) -> list[Options]:
        return [_copied(group) for group in self._optimizer.param_groups]

    def _set(self, options: Iterable[Options]) -> None:
        for group, values in zip(self._optimizer.param_groups, options, strict=True):
            group.update(_copied(values))


def _copied(group: Options) -> Options:
    return {
        name: value if isinstance(value, _PLAIN) else copy.deepcopy(value)
        for name, value in group.items()
        if name != "params"
    }


def _equal(first: Any, second: Any) -> bool:
    if isinstance(first, Tensor) and isinstance(second, Tensor):
        return torch.equal(first, second)
    return bool(first == second)


class StepEvents(ABC):
    """A worker's callbacks: updates, and logs, which are kept for the next drain.

    Args:
        updates: applies gradients; None where nothing is trained.
        keeps: whether this rank is of the last stage, where steps log.
    """

    def __init__(
        self,
        module: pl.LightningModule,
        *,
        updates: StageOptimizer | None,
        precision: Precision,
        keeps: bool,
    ) -> None:
        self._module = module
        self._updates = updates
        self._precision = precision
        self._keeps = keeps
        self.loss = torch.zeros((), device=module.device)
        self._kept: list[tuple[Any, Any]] = []
        self.replay = LogReplay(module)

    def begin(self, step: int) -> None:
        """A round enters; steps count from 0 after a drain."""
        assert self._updates is not None
        self._updates.record(step)

    def before_backward(self, loss: Tensor) -> None:
        self._precision.pre_backward(loss, self._module)

    def update(self, gradients: Mapping[str, Tensor | None], *, step: int) -> None:
        assert self._updates is not None
        self._updates.apply(gradients, loss=self.loss, step=step)

    @abstractmethod
    def logs_of(self, kept: Iterable[Any]) -> list[Logs]:
        """The logs of each minibatch, from the values kept of them, both in order."""

    def keep(self, found: Iterable[tuple[Any, Any]]) -> None:
        """Keeps what minibatches logged, with what orders them, on ranks of the last stage."""
        if self._keeps:
            self._kept += found

    def take(self) -> list[tuple[Any, Any]]:
        """Logs kept since the last call."""
        kept, self._kept = self._kept, []
        return kept


def make_stage(
    module: pl.LightningModule,
    placement: StagePlacement,
    *,
    rank: int,
    autocast: Callable[[], AbstractContextManager[Any]],
    randomness: KeyedRandomness | None,
    recomputed: StageSpans,
    group: ProcessGroup | None,
) -> Stage:
    """A rank's stage, in which ``recomputed`` spans of layers run again in their backward.

    The layers of a stage that is a grid work on shards of the samples that they are given;
    ``group`` are the ranks of this rank's stage.
    """
    number = placement.plan.stage_of(rank)
    (first, last), shape = placement.plan.stages[number].layers, placement.plan.stages[number].grid
    around = None
    if shape is not None:
        grid = Grid(tuple(shape), group)
        for layer in list(placement.layers)[first : last + 1]:
            spatialize_layers(layer, grid)
        around = partial(through_shards, grid)
    return Stage(
        module,
        placement.layers,
        first=first,
        last=last,
        autocast=autocast,
        randomness=randomness,
        recomputed=recomputed[number],
        around=around,
    )


class Pipeline:
    """Trains and evaluates on one rank.

    Args:
        trained: names of the parameters that learn.
        end: closes what is shared with other ranks.
    """

    def __init__(
        self,
        worker: StageWorker[Any],
        *,
        plan: Plan,
        rank: int,
        steps: ModuleSteps,
        events: StepEvents,
        metrics: Metrics,
        part: StageModule,
        trained: Collection[str],
        end: Callable[[], Any],
    ) -> None:
        self.worker = worker
        self._steps = steps
        self._events = events
        self._metrics = metrics
        self._part = part
        self._trained = trained
        stage, leads = plan.stage_of(rank), plan.leader_of(rank) == rank
        is_last = stage == plan.num_stages - 1 and leads
        self._last_replica = plan.replica_of(rank) if is_last else None
        self._reads = stage == 0 and leads
        self._end = end

    @property
    def loss(self) -> Tensor:
        """The loss of the last step, or minibatch, that came back to this rank."""
        return self._events.loss

    def train(self, batch: Any, arguments: tuple[Any, ...], *, count: int, number: int) -> None:
        """One Lightning step: a round of stage 0 enters."""
        self._steps.choose(TRAINING, arguments)
        if not self.worker.rounds:
            self._part.check_trained(self._trained)
        with self._part.silent():
            self._events.begin(self.worker.rounds)
            self.worker.feed(batch, count=count, number=number)

    def drain(self) -> None:
        """Finishes what is under way; every rank then knows all that was logged.

        Every rank must call it. Does nothing if nothing ran since the last time.
        """
        if not self.worker.rounds:
            return
        with self._part.silent():
            self.worker.drain(self._part.statistics())
        self._events.replay.replay(self._events.logs_of(self._exchange()), hook=TRAINING)

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
        self._events.replay.append(self._exchange(), hook=hook)

    def end(self, *, failed: bool) -> None:
        """Ends what is shared with other ranks; waits for none of them if it ``failed``."""
        self._metrics.attach()
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
