"""One rank's pipeline while a Trainer runs: its worker, updates, and the exchange at drains."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from itertools import groupby
from operator import itemgetter
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.plugins.precision import Precision
from torch import Tensor, nn
from torch.optim import Optimizer

from sparsepipe.errors import ConfigError
from sparsepipe.partition.activation_checkpointing.setting import StageSpans
from sparsepipe.runtime.base_worker import StageWorker
from sparsepipe.runtime.collectives import process_group
from sparsepipe.runtime.collectives.halo import ProcessGroup
from sparsepipe.runtime.random_generators import KeyedRandomness
from sparsepipe.runtime.stage import StageLayers
from sparsepipe.runtime.weights.modes import checksums
from sparsepipe.schedule import Plan
from sparsepipe.spatial.grid import Grid
from sparsepipe.spatial.spatialize import spatialize_layers, through_shards
from sparsepipe.strategies.gradients import PartGradients, check_module_hooks
from sparsepipe.strategies.metrics import Metrics, State
from sparsepipe.strategies.pipeline.logging import LogReplay, Logs, merge_logs
from sparsepipe.strategies.pipeline.placeholders import StageModule, check_hooks
from sparsepipe.strategies.pipeline.provenance import UpdateWatch
from sparsepipe.strategies.pipeline.stage_plan import StagePlacement
from sparsepipe.strategies.pipeline.steps import TRAINING, ModuleSteps
from sparsepipe.strategies.sharding import GlobalNorm, ShardedOptimizer, clipping_by_norm

MakeWorker = Callable[..., StageWorker[Any]]
"""Makes a worker from the keyword arguments that all workers take (:class:`StageWorker`)."""

Options = dict[str, Any]
"""The options of one parameter group, such as ``lr``: all its entries but ``params``."""


class StageOptimizer:
    """Updates a stage's parameters with Lightning's hooks, clipping and the options of one step.

    Schedulers change an optimizer's options between Lightning steps. Replicas of a stage may
    apply the same update in different steps, but must all use the options of the same step.
    ``watch`` follows what users' hooks and optimizer do; None where they have none.
    """

    def __init__(
        self,
        module: pl.LightningModule,
        *,
        parameters: Mapping[str, nn.Parameter],
        optimizer: Optimizer,
        precision: Precision,
        norm: GlobalNorm | None,
        watch: UpdateWatch | None,
    ) -> None:
        self._module, self._parameters = module, parameters
        self._optimizer, self._precision, self._norm = optimizer, precision, norm
        self._watch = watch
        self._options: dict[int, list[Options]] = {}

    def record(self, step: int) -> None:
        """Records the current options as those of ``step``; steps count from 0 after a drain."""
        if step == 0:
            self._options.clear()
        self._options[step] = self._present()

    def apply(self, gradients: Mapping[str, Tensor | None], *, loss: Tensor, step: int) -> None:
        """Updates the parameters with the options of ``step``; forgets those of earlier steps."""
        kind, calls = type(self._optimizer).__name__, 0

        def weights() -> tuple[list[int], list[Any]]:
            every = list(self._parameters.values())
            sums = checksums(every).tolist() if every and self._watch else []
            return [parameter._version for parameter in every], sums

        def closure() -> Tensor:
            nonlocal calls
            calls += 1
            with torch._C.DisableTorchFunction():
                if calls > 1 or weights() != before:
                    raise evaluates
                for name, parameter in self._parameters.items():
                    parameter.grad = gradients.get(name)
            self._precision.post_backward(loss, self._module)
            return loss

        evaluates = ConfigError(
            f"{kind} evaluates the network several times or at other weights for one update, but "
            "a pipeline computes one gradient, before the update begins",
            remedy="use an optimizer that needs one gradient per update, such as SGD or AdamW",
        )
        now, before = self._present(), weights()
        for group, chosen in zip(self._optimizer.param_groups, self._options[step], strict=True):
            group.update(copy.deepcopy(chosen))
        watch = nullcontext() if self._watch is None else self._watch
        with watch, clipping_by_norm(self._precision, self._clip):
            self._precision.optimizer_step(self._optimizer, model=self._module, closure=closure)
        if not calls:
            raise evaluates
        for after, options in zip(self._present(), self._options[step], strict=True):
            for name, value in after.items():
                if name not in options or not bool(value == options[name]):
                    raise ConfigError(
                        f"{kind}, or a hook of its step, changes the option {name!r} in an update, "
                        "but a pipeline uses the options that schedulers set for each step",
                        remedy="use an optimizer with a state for each parameter, such as SGD or "
                        "AdamW, and change options with schedulers",
                    )
        for group, present in zip(self._optimizer.param_groups, now, strict=True):
            group.update(present)
        self._options = {known: o for known, o in self._options.items() if known >= step}

    def _clip(self, precision: Precision, optimizer: Optimizer, clip_val: float) -> None:
        """Clips by the norm of the stage, or of all if ``norm`` does, as Lightning's part."""
        with torch._C.DisableTorchFunction():
            if self._norm is not None:
                self._norm.clip(precision, optimizer, clip_val)
            else:
                type(precision).clip_grad_by_norm(precision, optimizer, clip_val)

    def _present(self) -> list[Options]:
        return [
            copy.deepcopy({name: value for name, value in group.items() if name != "params"})
            for group in self._optimizer.param_groups
        ]


def make_stage(
    module: pl.LightningModule,
    placement: StagePlacement,
    *,
    rank: int,
    autocast: Callable[[], AbstractContextManager[Any]],
    randomness: KeyedRandomness | None,
    recomputed: StageSpans,
    group: ProcessGroup | None,
) -> StageLayers:
    """Makes a rank's stage. Its layers work on shards of samples if its devices form a grid.

    ``recomputed``: for each stage, the spans of layers that run again in the backward pass;
    ``group``: process group of this rank's stage.
    """
    number = placement.plan.stage_of(rank)
    (first, last), shape = placement.plan.stages[number].layers, placement.plan.stages[number].grid
    around = None
    if shape is not None:
        grid = Grid(tuple(shape), group)
        for layer in list(placement.layers)[first : last + 1]:
            spatialize_layers(layer, grid)
        around = partial(through_shards, grid)
    return StageLayers(
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
    """Trains and evaluates on one rank, whose worker calls this object for updates and logs.

    Without an ``optimizer`` nothing is trained; ``norm``, if given, clips by norm in place of
    ``precision``. ``watched``: whether code of users may take part in updates.

    Attributes:
        cut: whether steps run on microbatches.
        parameters: this rank's trained parameters, by name.
        worker: runs this rank's share of every minibatch.
        group: process group of this rank's stage.
        loss: the loss of the last step, or minibatch, that came back to this rank.
        gradients: refuses what would see parts of gradients, where the stage is a grid.
    """

    cut = False
    worker: StageWorker[Any]
    group: Any

    def __init__(
        self,
        module: pl.LightningModule,
        layers: nn.Sequential,
        *,
        plan: Plan,
        rank: int,
        part: StageModule,
        optimizer: ShardedOptimizer | None,
        norm: GlobalNorm | None,
        precision: Precision,
        send_input: bool,
        watched: bool,
    ) -> None:
        self._module, self._part, self._precision = module, part, precision
        self._optimizer = optimizer
        self.parameters = {} if optimizer is None else dict(part.parameters())
        self._updates: StageOptimizer | None = None
        if optimizer is not None:
            watch = None
            if watched or type(optimizer.optimizer).__module__.partition(".")[0] != "torch":
                watch = UpdateWatch(
                    module, self.parameters, layer_of=part.layer_of, notice=part.notice
                )
            self._updates = StageOptimizer(
                module,
                parameters=self.parameters,
                optimizer=optimizer.optimizer,
                precision=precision,
                norm=norm,
                watch=watch,
            )
        self._metrics = Metrics(module)
        self._metrics.synchronise(False)
        self.own_metrics: dict[str, State] = {}  # before the last merge, of several replicas
        self.steps = ModuleSteps(
            module,
            layers,
            metrics=self._metrics,
            in_step=self._in_step,
            autocast=precision.forward_context,
            send_input=send_input,
            cut=self.cut,
        )
        self._replay = LogReplay(module)
        self._kept: list[tuple[Any, Any]] = []  # as :meth:`note` gets them
        self.loss = torch.zeros((), device=module.device)
        self._is_grid = plan.stages[plan.stage_of(rank)].grid is not None
        self.gradients = PartGradients(module, module.parameters, None, within=lambda: part.in_step)
        leads = plan.leader_of(rank) == rank
        self._last_replica = plan.replica_of(rank) if part.is_last and leads else None
        self._reads = plan.stage_of(rank) == 0 and leads

    # What the worker calls.

    def before_backward(self, loss: Tensor) -> None:
        with self._in_step():
            self._precision.pre_backward(loss, self._module)

    @contextmanager
    def _in_step(self) -> Iterator[None]:
        """Context of users' code that runs on some stages only: it finds tensors of all stages."""
        whole = nullcontext() if self._optimizer is None else self._optimizer.whole_groups()
        with self._part.step(), whole:
            yield

    def update(self, gradients: Mapping[str, Tensor | None], *, step: int) -> None:
        assert self._updates is not None
        self._updates.apply(gradients, loss=self.loss, step=step)

    def note(self, kept: Iterable[tuple[Any, Any]], logs: Logs) -> None:
        """Logs ``logs`` of a training step; ranks of the last stage keep ``kept`` until a drain.

        ``kept`` has, for each microbatch (or minibatch, if these are not cut), a pair: a key to
        sort by, and (index of the minibatch, number of samples, logs).
        """
        if self._part.is_last:
            self._kept += kept
        self._replay.append([logs], hook=TRAINING)

    # What the strategy calls.

    def train(self, batch: Any, arguments: tuple[Any, ...], *, count: int, number: int) -> None:
        """Runs a step, in which ``count`` minibatches enter; ``number`` is the index of the first
        in the run. ``arguments``: those of ``training_step`` after the batch.
        """
        self.steps.hook, self.steps.arguments = TRAINING, arguments
        self._replay.begin(TRAINING)
        assert self._updates is not None
        with self._part.silent():
            assert self._optimizer is not None
            self._optimizer.check(self._module)
            if not self.worker.rounds:  # refuse what would be updated wrongly from here on
                parameters = dict(self._part.parameters())
                if late := [name for name in parameters if name not in self.parameters]:
                    raise ConfigError(
                        f"{late[0]} was frozen when the run began, but now requires a gradient",
                        remedy="let it require a gradient from the beginning, with lr=0 in a "
                        "parameter group until it is to learn; or train in two runs",
                    )
                check_hooks(parameters)
                if self._is_grid:
                    check_module_hooks(self._module)
            self._updates.record(self.worker.rounds)
            self.worker.feed(batch, count=count, number=number)

    def drain(self) -> None:
        """Finishes the minibatches in flight; every rank then has all logged values.
        Every rank must call it. Does nothing if no training step has run since the last drain.
        """
        if not self.worker.rounds:
            return
        with self._part.silent():
            buffers = self._module.named_buffers()  # such as running statistics
            self.worker.drain([each for name, each in buffers if self._part.holds(name)])
        minibatches = groupby(self._exchange(), key=itemgetter(0))
        logs = [merge_logs([(n, logs) for _, n, logs in parts]) for _, parts in minibatches]
        self._replay.replay(logs, hook=TRAINING)

    def restore_metrics(self, states: Mapping[str, State], own: Mapping[str, State]) -> None:
        """Sets the module's metrics, by name, to their ``states`` after an earlier run's drain, or
        where there are any, to this replica's ``own`` before it, so that sums keep their order.
        """
        self._metrics.merge([states], replica=self._last_replica)
        self._metrics.restore(own)

    def evaluate(
        self, hook: str, batch: Any, arguments: tuple[Any, ...], *, count: int, predicts: bool
    ) -> Any:
        """Sends the ``count`` minibatches of a step forward. If the step ``predicts``, returns the
        prediction for the batch that this rank has read, if any; else None. Logged values are
        available after :meth:`end_evaluation`.
        """
        self.steps.hook, self.steps.arguments = hook, arguments
        found = self.worker.evaluate(batch, count=count, replies=predicts)
        if predicts:
            return found[-1][1] if found and self._reads else None
        self._kept += found
        return None

    def end_evaluation(self, hook: str) -> None:
        """Gives every rank all logged values and metrics, after a loader's last batch."""
        self.worker.evaluated = 0
        self._replay.append(self._exchange(), hook=hook)
        self.own_metrics = {}

    def end(self, *, failed: bool) -> None:
        """Closes connections to other ranks, or leaves them open if the run has ``failed``."""
        self._metrics.synchronise(True)
        if not failed:
            self.worker.network.close()
            process_group.destroy_group(self.group)

    def _exchange(self) -> list[Any]:
        """Merges the last stage's metrics; returns what its replicas kept, sorted by their keys."""
        mine, self._kept = self._kept, []
        replica, states = self._last_replica, self._metrics.take_updated()
        own = None if replica is None else (mine, states)
        everyone: list[Any] = process_group.gather_objects(own, what="exchanging what was logged")
        parts = [each for _, each in everyone]
        shared = [name for name in states if all(name in each for each in parts)]
        self.own_metrics = {name: states[name] for name in shared if parts[1:]}
        self._metrics.merge(parts, replica=replica)
        pairs = sorted((pair for logs, _ in everyone for pair in logs), key=itemgetter(0))
        return [logged for _, logged in pairs]
