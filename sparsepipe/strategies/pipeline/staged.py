"""Base class of all pipeline strategies: the methods that Lightning calls."""

from __future__ import annotations

import os
from abc import abstractmethod
from collections.abc import Sequence
from functools import partialmethod
from typing import Any, get_args

import pytorch_lightning as pl
from lightning_fabric.plugins.environments.cluster_environment import ClusterEnvironment
from pytorch_lightning.callbacks import LambdaCallback, ModelSummary
from pytorch_lightning.loops.optimization.closure import AbstractClosure
from pytorch_lightning.trainer.states import TrainerFn
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from sparsepipe.errors import ConfigError
from sparsepipe.partition.activation_checkpointing.setting import StageSpans
from sparsepipe.runtime.collectives import process_group
from sparsepipe.runtime.collectives.process_group import make_stage_group
from sparsepipe.runtime.collectives.replicas import Replicas
from sparsepipe.runtime.failures.missing_ranks import set_rank_names
from sparsepipe.runtime.random_generators import KeyedRandomness
from sparsepipe.runtime.transport import Network, SharedMessages
from sparsepipe.schedule import Plan
from sparsepipe.schedule.plan import devices_of
from sparsepipe.spatial.spatialize import unspatialize
from sparsepipe.strategies import trainer_internals as internals
from sparsepipe.strategies.distributed import RankedStrategy, RankEnvironment, exit_if_blocked
from sparsepipe.strategies.pipeline import refusals
from sparsepipe.strategies.pipeline.dataloaders import adapt_loader, count_minibatches
from sparsepipe.strategies.pipeline.loop_patches import LoopPatches
from sparsepipe.strategies.pipeline.pipeline import (
    MakeWorker,
    Pipeline,
    make_stage,
)
from sparsepipe.strategies.pipeline.placeholders import StageModule, check_hooks
from sparsepipe.strategies.pipeline.stage_plan import (
    Balance,
    Grids,
    StagePlacement,
    costs_of,
    find_layers,
    make_plan,
    parse_config,
)
from sparsepipe.strategies.sharding import ShardedCheckpoints, ShardedModule


def _outside_steps(name: str) -> Any:
    """Makes a method that calls the base class's ``name``, but raises a ConfigError in a step.
    It is a plain function, since Lightning compares such methods among options of ``self.log``.
    """

    def call(self: StagedStrategy, *args: Any, **kwargs: Any) -> Any:
        if self._sharded is not None and self._sharded.part.in_step:
            raise ConfigError(
                f"a step calls {name}, which all ranks must call together, but the ranks of a "
                "pipeline run different parts of a step",
                remedy="call it in a hook, such as on_train_batch_end, which every rank runs; "
                "self.log and torchmetrics do not need it",
            )
        return getattr(super(StagedStrategy, self), name)(*args, **kwargs)

    return call


class StagedStrategy(ShardedCheckpoints, RankedStrategy):
    """Splits the layers of one ``nn.Sequential`` of any LightningModule over ranks.

    Batches of an evaluation stream through the stages; logged values are available after a loader's
    last batch. Predictions do not stream: a rank of stage 0 has the result of each batch before it
    reads the next one. A checkpoint holds the states of all stages; it is written when the
    pipeline is empty, and never after a failure.

    Attributes:
        pipeline_class: class of a rank's pipeline.
        is_synchronous: whether the replicas of stage 0 share one minibatch in each step, and the
            gradients of all stages are ready at the same time, to be clipped by one norm.
        queue_depth: number of training messages that a channel holds; None: the channel's default.
        is_plain: whether a single rank does exactly what a plain Trainer does.
        plan: the stages and their ranks, once a Trainer runs.
        recomputed: the recomputed spans of each stage's layers, once a Trainer runs.
        pipeline: this rank's pipeline; None if a single rank trains as a plain Trainer.
    """

    pipeline_class: type[Pipeline]
    is_synchronous = False
    queue_depth: int | None = None
    plan: Plan
    _sharded: ShardedModule[StageModule] | None

    def __init__(
        self,
        *,
        config: str | None,
        cuts: Sequence[int] | None,
        grids: Grids | None,
        balance: Balance,
        layers: str | None,
        send_input: bool,
        keyed_randomness: bool,
        timeout_s: float,
        process_group_backend: str | None,
        direct: bool,
        slowdown: float,
        cluster_environment: ClusterEnvironment | None,
    ) -> None:
        super().__init__(
            slowdown=slowdown,
            cluster_environment=cluster_environment or RankEnvironment(),
            process_group_backend=process_group_backend or "gloo",
            timeout_s=timeout_s,
        )
        if balance not in get_args(Balance):
            raise ValueError(f"balance={balance!r} is not one of {', '.join(get_args(Balance))}")
        self._config, self._cuts, self._grids, self._balance = config, cuts, grids, balance
        self._layers_name = layers
        self._send_input, self._keyed, self._direct = send_input, keyed_randomness, direct
        self.is_plain = not keyed_randomness
        self.pipeline: Pipeline | None = None
        self.recomputed: StageSpans = ()
        self._patches: LoopPatches | None = None
        self._summaries: list[ModelSummary] = []
        self._is_partial = False
        self._evaluated = [0, 0]  # indices of the evaluation's loader and batch
        self._updating = False
        self._updated = -1, -1  # epoch and batch of the last update

    @abstractmethod
    def make_worker(
        self, part: StageModule, *, rank: int, optimizer: Optimizer | None
    ) -> MakeWorker:
        """Checks settings before ranks connect, and returns a function that makes the worker.

        ``optimizer`` updates the rank's parameters; None: the rank only evaluates.
        """

    def spans_of(
        self, plan: Plan, layers: nn.Sequential, *, trained: nn.Module | None = None
    ) -> StageSpans:
        """Returns each stage's recomputed spans; checks batch norms of ``trained``, if given."""
        return ((),) * plan.num_stages

    @property
    def replicas(self) -> tuple[int, ...]:
        """Number of replicas of each stage."""
        return parse_config(self._config, ranks=self.world_size, grids=self._grids)

    @property
    def reader(self) -> int | None:
        """This rank's index among the ranks that read batches; None if it reads none."""
        return self.global_rank if self.global_rank < self.replicas[0] else None

    @property
    def runs_foreign_code(self) -> bool:
        """Returns whether the module or a callback is neither SparsePipe's nor Lightning's."""
        callbacks = self._trainer.callbacks  # type: ignore[attr-defined]
        makers = {type(each).__module__.partition(".")[0] for each in callbacks}
        makers.add(type(self.lightning_module).__module__.partition(".")[0])
        lambdas = any(isinstance(each, LambdaCallback) for each in callbacks)
        return lambdas or not makers <= {"sparsepipe", "pytorch_lightning"}

    @property
    def _trainer(self) -> pl.Trainer:
        assert self.lightning_module is not None
        return self.lightning_module.trainer

    # Setting up and ending.

    @override
    def setup_distributed(self) -> None:
        # Unlike DDP, this does not set the seed again: random draws continue as on one device.
        self.set_world_ranks()
        if self.world_size > 1:  # a single rank has no group to join
            self.join()
        if process_group.world_size() != self.world_size:
            raise ConfigError(
                f"the Trainer has a total of {self.world_size} devices, but the process group of "
                f"this script has {process_group.world_size()} ranks",
                remedy="give all Trainers of a script the same number of devices",
            )
        sizes = devices_of(self.replicas, self._grids)
        stages = [stage for stage, size in enumerate(sizes) for _ in range(size)]
        set_rank_names(lambda rank: f"rank {rank} (stage {stages[rank]})")

    @override
    def setup(self, trainer: pl.Trainer) -> None:
        assert self.accelerator is not None
        self.accelerator.setup(trainer)
        module = self.lightning_module
        assert module is not None
        fitting = trainer.state.fn == TrainerFn.FITTING
        refusals.check_trainer(trainer, synchronises_norm=internals.synchronises_batch_norm(self))
        refusals.check_module(module, fitting=fitting)
        self._is_partial, self._updated = False, (-1, -1)
        self._patches = LoopPatches(trainer, self.replicas, drain=self.drain)
        self.precision_plugin.convert_module(module)
        placement = self._place(trainer, module, fitting=fitting)
        alone = self.plan.num_ranks == 1 and self.is_plain
        if alone:
            self.model_to_device()
        elif fitting:
            check_hooks(dict(module.named_parameters()))
        if fitting:
            self.setup_optimizers(trainer)
            refusals.check_optimization(self.optimizers, self.lr_scheduler_configs)
        if not alone:
            if fitting:
                # Summaries are made while the module is whole: when the fit starts, the layers of
                # other stages are removed, and no example could run through them.
                callbacks = trainer.callbacks  # type: ignore[attr-defined]
                self._summaries = [each for each in callbacks if isinstance(each, ModelSummary)]
                with internals.actual_device(module):
                    for callback in self._summaries:
                        callback.on_fit_start(trainer, module)
                        callback.on_fit_start = lambda *_: None  # type: ignore[method-assign]
            rank = self.global_rank
            optimizer = self.optimizers[0] if fitting else None
            part = StageModule(placement, stage=self.plan.stage_of(rank))
            self._sharded = ShardedModule(module, part=part, rank=rank, optimizer=optimizer)
            self.model_to_device()
        self.setup_precision_plugin()
        if fitting:
            internals.move_optimizer(self.optimizers[0], self.root_device)
        if self._sharded is not None:
            self.pipeline = self._make_pipeline(placement, module, self._sharded, fitting=fitting)

    def _place(
        self, trainer: pl.Trainer, module: pl.LightningModule, *, fitting: bool
    ) -> StagePlacement:
        name = find_layers(module, self._layers_name)
        layers = module.get_submodule(name)
        assert isinstance(layers, nn.Sequential)
        self.plan = make_plan(
            self.replicas,
            cuts=self._cuts,
            costs=lambda: costs_of(self._balance, trainer, module, layers),
            num_layers=len(layers),
            grids=self._grids,
        )
        self.recomputed = self.spans_of(self.plan, layers, trained=module if fitting else None)
        placement = StagePlacement(module=module, name=name, layers=layers, plan=self.plan)
        placement.check()
        return placement

    def _make_pipeline(
        self,
        placement: StagePlacement,
        module: pl.LightningModule,
        sharded: ShardedModule[StageModule],
        *,
        fitting: bool,
    ) -> Pipeline:
        """Makes this rank's pipeline and worker; every rank must call it."""
        # First what may be refused, then what needs other ranks.
        plan, rank, part = self.plan, self.global_rank, sharded.part
        precision = self.precision_plugin
        optimizer = self.optimizers[0] if fitting else None
        randomness = None
        if self._keyed and fitting:  # not in an evaluation
            if (seed := os.environ.get("PL_GLOBAL_SEED")) is None:
                raise ConfigError(
                    "keyed_randomness derives random draws from the run's seed, but none is set",
                    remedy="call pytorch_lightning.seed_everything before the Trainer runs",
                )
            randomness = KeyedRandomness(seed=int(seed), device=self.root_device)
        make_worker = self.make_worker(part, rank=rank, optimizer=optimizer)
        clips = optimizer is not None and self.is_synchronous and plan.num_stages > 1
        pipeline = self.pipeline_class(
            module,
            placement.layers,
            plan=plan,
            rank=rank,
            part=part,
            optimizer=sharded.optimizer,
            norm=sharded.norm if clips else None,
            precision=precision,
            send_input=self._send_input,
            watched=self.runs_foreign_code,
        )
        self._connect(pipeline, placement, make_worker, randomness)
        return pipeline

    def _connect(
        self,
        pipeline: Pipeline,
        placement: StagePlacement,
        make_worker: MakeWorker,
        randomness: KeyedRandomness | None,
    ) -> None:
        plan, rank, device = self.plan, self.global_rank, self.root_device
        assert self.lightning_module is not None
        pipeline.group = make_stage_group(
            map(plan.ranks_of, range(plan.num_stages)),
            backend="nccl" if self._direct else "gloo",
            timeout_s=self._timeout_s,
        )
        network = Network(
            plan,
            rank,
            timeout_s=self._timeout_s,
            device=device,
            direct=self._direct,
            queue_depth=self.queue_depth,
        )
        is_grid = plan.stages[plan.stage_of(rank)].grid is not None
        shared = SharedMessages(pipeline.group, device=device) if is_grid else None
        stage = make_stage(
            self.lightning_module,
            placement,
            rank=rank,
            autocast=self.precision_plugin.forward_context,
            randomness=randomness,
            recomputed=self.recomputed,
            group=pipeline.group,
        )
        if is_grid:
            self._on_teardown.enter_context(pipeline.gradients.watched())
        pipeline.worker = make_worker(
            plan=plan,
            rank=rank,
            stage=stage,
            replicas=Replicas(pipeline.group, pipeline.parameters, grid=is_grid),
            network=network,
            shared=shared,
            steps=pipeline.steps,
            events=pipeline,
            slowed=self.slowdown.slowed,
        )

    @override
    def teardown(self) -> None:
        if self._patches is not None:
            self._patches.undo()
            self._patches = None
        for callback in self._summaries:
            vars(callback).pop("on_fit_start", None)
        module = self.lightning_module
        if module is not None:
            unspatialize(module)
        failed, sharded = internals.run_failed(module), self._sharded
        if sharded is not None:
            self._is_partial = self.world_size > 1  # until all values are gathered again
        # If something here raises, Lightning calls ``on_exception`` and then this again, so
        # attributes are cleared last, and everything may run twice.
        try:
            if self.pipeline is not None:
                self.pipeline.end(failed=failed)
        finally:
            if sharded is not None:
                sharded.part.unprune()
        super().teardown()
        if sharded is not None and not failed:  # else ranks may be gone, and their values too
            sharded.fill()
            self._is_partial = False
        self.pipeline = self._sharded = None

    @override
    def on_exception(self, exception: BaseException) -> None:
        super().on_exception(exception)
        if self.pipeline is not None:
            network = self.pipeline.worker.network
            exit_if_blocked(exception, blocked=lambda: network.blocked)

    # Reading.

    @property
    @override
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        return {"num_replicas": self.replicas[0], "rank": self.reader or 0}

    @override
    def process_dataloader(self, dataloader: object) -> object:
        return adapt_loader(dataloader, reader=self.reader) if self.world_size > 1 else dataloader

    def count_minibatches(self, loaders: Sequence[Any], batch_idx: int, batch: Any) -> int:
        """Returns how many ranks read a batch in step ``batch_idx``; ``batch`` is this rank's."""
        if self.world_size == 1:
            return 1
        return count_minibatches(loaders, batch_idx, batch, reader=self.reader)

    # Training.

    @override
    def on_train_start(self) -> None:
        # After hooks of callbacks and of the module, in which a rank may request a stop.
        assert self._patches is not None
        self._patches.stop_for_all()

    @override
    def on_validation_end(self) -> None:
        if self._trainer.state.fn == TrainerFn.FITTING and not self._trainer.sanity_checking:
            assert self._patches is not None
            self._patches.stop_for_all()

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        pipeline, loop = self.pipeline, self._trainer.fit_loop
        if pipeline is None:
            return super().training_step(*args, **kwargs)
        loaders, step = internals.loaders_of(loop), loop.epoch_loop.batch_idx
        updated, self._updated = self._updated, (self._trainer.current_epoch, step)
        if not self._updating or updated == self._updated:
            problem = "makes two updates with one batch"
            if not self._updating:
                problem = (
                    "calls optimizer_closure without optimizer.step, but in a pipeline each stage "
                    "updates when a minibatch comes back to it"
                )
            raise ConfigError(
                f"{type(self.lightning_module).__name__}.optimizer_step {problem}",
                remedy="call optimizer.step(closure=optimizer_closure) once for every batch; to "
                "update less often, use a larger batch",
            )
        batch, *arguments = (*args, *kwargs.values())
        count = self.count_minibatches(loaders, step, batch)
        # Random draws are keyed by the number of a step's first minibatch in the whole run. In
        # Lightning's count of steps a partial last round counts as a whole one.
        last, minibatches = int(self._trainer.num_training_batches) - 1, (1, 1)
        if not self.is_synchronous:
            minibatches = self.replicas[0], self.count_minibatches(loaders, last, None)
        of_epoch = last * minibatches[0] + minibatches[1]
        number = self._trainer.current_epoch * of_epoch + step * minibatches[0]
        pipeline.train(batch, tuple(arguments), count=count, number=number)
        assert self._patches is not None
        if self._patches.drain_follows():
            pipeline.drain()
        return pipeline.loss.clone()

    @override
    def backward(
        self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any
    ) -> Any:
        if self.pipeline is None:
            return super().backward(closure_loss, optimizer, *args, **kwargs)
        return closure_loss  # the worker has run this step's actions

    @override
    def optimizer_step(
        self, optimizer: Optimizer, closure: Any, model: Any = None, **kwargs: Any
    ) -> Any:
        if self.pipeline is None:
            return super().optimizer_step(optimizer, closure, model, **kwargs)
        if not isinstance(closure, AbstractClosure):
            raise ConfigError(
                f"{type(self.lightning_module).__name__}.optimizer_step calls optimizer_closure in "
                "a function of its own, but when it returns there, stages have updated already",
                remedy="give it to optimizer.step as it is; change gradients in "
                "on_before_optimizer_step",
            )
        self._updating = True
        try:
            return closure()  # the worker updates
        finally:
            self._updating = False

    # Evaluation.

    @override
    def on_validation_start(self) -> None:
        self._evaluated = [0, 0]

    on_test_start = on_predict_start = on_validation_start

    def _evaluate(self, hook: str, /, *args: Any, **kwargs: Any) -> Any:
        """Runs the evaluation step ``hook`` on a batch; returns a ``predict_step``'s prediction."""
        pipeline, predicts = self.pipeline, hook == "predict_step"
        if pipeline is None:
            return getattr(super(), hook)(*args, **kwargs)
        loop = internals.active_loop(self._trainer)
        loaders, in_turn = internals.loaders_of(loop), internals.reading_mode(loop) == "sequential"
        number, batch_idx = self._evaluated
        if in_turn:
            while loop.max_batches[number] == 0:
                number += 1
            loaders = [loaders[number]]
        batch, *arguments = (*args, *kwargs.values())
        count = self.count_minibatches(loaders, batch_idx, batch)
        result = pipeline.evaluate(hook, batch, tuple(arguments), count=count, predicts=predicts)
        is_last = internals.has_read_all(loop)
        self._evaluated = [number, batch_idx + 1]
        if in_turn and batch_idx + 1 >= loop.max_batches[number]:
            self._evaluated, is_last = [number + 1, 0], True
        if is_last and predicts:
            pipeline.worker.evaluated = 0
        elif is_last:
            pipeline.end_evaluation(hook)
        return result

    validation_step: Any = partialmethod(_evaluate, "validation_step")
    test_step: Any = partialmethod(_evaluate, "test_step")
    predict_step: Any = partialmethod(_evaluate, "predict_step")

    # Checkpoints.

    def drain(self) -> None:
        """Finishes the minibatches in flight, before a checkpoint; every rank must call it."""
        if self._is_partial:
            raise ConfigError(
                "a checkpoint cannot be saved after the run has failed: this rank has only the "
                "values of its own stage",
                remedy="resume from the last checkpoint; ModelCheckpoint(every_n_train_steps=...) "
                "limits what a failure costs",
            )
        if self.pipeline is not None:
            self.pipeline.drain()

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        self.drain()
        return super().lightning_module_state_dict()

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        self.drain()
        return super().optimizer_state(optimizer)

    # Ranks run different parts of a step, and would never meet within it.
    all_gather, reduce = _outside_steps("all_gather"), _outside_steps("reduce")
    barrier, broadcast = _outside_steps("barrier"), _outside_steps("broadcast")
