"""The base of all pipeline strategies: the methods that Lightning calls."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, TypeVar

import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import ModelSummary
from pytorch_lightning.trainer.states import TrainerFn, TrainerStatus
from pytorch_lightning.utilities.types import STEP_OUTPUT
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from sparsepipe.errors import ConfigError
from sparsepipe.partition.activation_checkpointing.setting import StageSpans
from sparsepipe.schedule import Plan
from sparsepipe.spatial.spatialize import unspatialize
from sparsepipe.strategies import trainer_internals as internals
from sparsepipe.strategies.distributed import exit_if_blocked
from sparsepipe.strategies.pipeline import refusals
from sparsepipe.strategies.pipeline.grids import check_grids
from sparsepipe.strategies.pipeline.layers import Placement, Shard, check_initialised, find_layers
from sparsepipe.strategies.pipeline.loop_patches import LoopPatches, drain_follows
from sparsepipe.strategies.pipeline.pipeline import Settings, make_pipeline
from sparsepipe.strategies.pipeline.ranks import PipelinedEvaluation
from sparsepipe.strategies.pipeline.stage_plan import Balance, check_balance, costs_of, make_plan
from sparsepipe.strategies.sharding import ShardedCheckpoints, ShardedModule

_Value = TypeVar("_Value")


class EarlySummaries:
    """Lets callbacks summarise a module while it is whole, and not again when the fit starts.

    By then the layers of other stages are removed: their parameters would not be counted, and no
    example could run through them.
    """

    def __init__(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        callbacks = trainer.callbacks  # type: ignore[attr-defined]
        self._callbacks = [callback for callback in callbacks if isinstance(callback, ModelSummary)]
        with internals.actual_device(module):
            for callback in self._callbacks:
                callback.on_fit_start(trainer, module)
        for callback in self._callbacks:
            callback.on_fit_start = _nothing  # type: ignore[method-assign]

    def undo(self) -> None:
        """Lets the callbacks summarise the next fit as usual."""
        for callback in self._callbacks:
            del callback.on_fit_start


def _nothing(trainer: Any, pl_module: Any) -> None:
    return None


class WholeCheckpoints(ShardedCheckpoints, PipelinedEvaluation):
    """Saves the whole when the pipeline is empty, and nothing after a failure."""

    _sharded: ShardedModule[Shard] | None

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._is_partial = False

    def drain(self) -> None:
        """Empties the pipeline; every rank must call it."""
        if self._pipeline is not None:
            self._pipeline.drain()

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        self._check_complete()
        self.drain()
        return super().lightning_module_state_dict()

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        self._check_complete()
        self.drain()
        return super().optimizer_state(optimizer)

    def _check_complete(self) -> None:
        if self._is_partial:
            raise ConfigError(
                "the run has failed, and this rank has the values of its own stage only",
                remedy="go on from the last checkpoint; ModelCheckpoint(every_n_train_steps=...) "
                "limits what a failure costs",
            )


class StagedStrategy(WholeCheckpoints):
    """Splits one ``nn.Sequential`` of any LightningModule by layers over ranks."""

    _settings: Settings
    """Set by subclasses, after the constructor of this class."""

    def __init__(
        self,
        *,
        cuts: Sequence[int] | None,
        balance: Balance,
        layers: str | None,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        check_balance(balance)
        self._cuts, self._balance = cuts, balance
        self._layers_name = layers
        self._plan: Plan | None = None
        self._recomputed: StageSpans = ()
        self._patches: LoopPatches | None = None
        self._summaries: EarlySummaries | None = None
        self._updates = refusals.OneUpdate()

    @abstractmethod
    def _number(self, loaders: Sequence[Any], step: int) -> int:
        """Number of a step's first minibatch in the whole run, by which random draws are keyed."""

    @property
    def plan(self) -> Plan:
        """The stages and their ranks, once a Trainer runs."""
        assert self._plan is not None, "no Trainer runs"
        return self._plan

    @property
    def recomputed(self) -> StageSpans:
        """The recomputed spans of each stage's layers, once a Trainer runs."""
        return self._recomputed

    @override
    def setup(self, trainer: pl.Trainer) -> None:
        assert self.accelerator is not None
        self.accelerator.setup(trainer)
        module = self.lightning_module
        assert module is not None
        fitting = trainer.state.fn == TrainerFn.FITTING
        refusals.check_trainer(trainer, synchronises_norm=internals.synchronises_batch_norm(self))
        refusals.check_module(module, fitting=fitting)
        if fitting:
            self._settings.check_module(module)
        check_initialised(module)
        self._is_partial = False
        self.begin_reading()
        self._patches = LoopPatches(trainer, self.replicas, drain=self.drain)
        self.precision_plugin.convert_module(module)
        placement = self._place(trainer, module)
        if self._alone:
            self.model_to_device()
        if fitting:
            with refusals.one_optimizer():
                self.setup_optimizers(trainer)
            refusals.check_optimizers(self.optimizers)
            refusals.check_schedulers(self.lr_scheduler_configs)
        optimizer = self.optimizers[0] if fitting else None
        if not self._alone:
            if fitting:
                self._summaries = EarlySummaries(trainer, module)
            rank = self.global_rank
            part = Shard(placement, stage=self.plan.stage_of(rank))
            self._sharded = ShardedModule(module, part=part, rank=rank, optimizer=optimizer)
            self.model_to_device()
        self.setup_precision_plugin()
        if fitting:
            internals.move_optimizer(self.optimizers[0], self.root_device)
        if self._sharded is not None:
            self._pipeline = make_pipeline(
                self._settings,
                placement=placement,
                sharded=self._sharded,
                module=module,
                device=self.root_device,
                rank=self.global_rank,
                precision=self.precision_plugin,
                optimizer=optimizer,
            )

    @property
    def _alone(self) -> bool:
        """Whether the run is that of a plain Trainer."""
        return self.plan.num_ranks == 1 and self._settings.as_plain

    def _place(self, trainer: pl.Trainer, module: pl.LightningModule) -> Placement:
        """Makes the plan and assigns layers to stages."""
        name = find_layers(module, self._layers_name)
        layers = module.get_submodule(name)
        assert isinstance(layers, torch.nn.Sequential)
        self._plan = make_plan(
            self.replicas,
            cuts=self._cuts,
            costs=lambda: costs_of(self._balance, trainer, module, layers),
            num_layers=len(layers),
            grids=self._grids,
        )
        self._settings.check(self._plan)
        check_grids(self._plan, module, name)
        self._recomputed = self._settings.recomputed(self._plan, layers)
        placement = Placement(module=module, name=name, plan=self._plan)
        placement.check_ties()
        return placement

    @override
    def teardown(self) -> None:
        if self._patches is not None:
            self._patches.undo()
            self._patches = None
        if self._summaries is not None:
            self._summaries.undo()
            self._summaries = None
        module = self.lightning_module
        if module is not None:
            unspatialize(module)
        trainer = None if module is None else internals.attached_trainer(module)
        failed = trainer is None or trainer.state.status == TrainerStatus.INTERRUPTED
        sharded = self._sharded
        if sharded is not None:
            self._is_partial = self.world_size > 1  # until all values are gathered again
        # Where something here raises, Lightning calls ``on_exception`` and then this once more: so
        # attributes are cleared last, and everything may run twice.
        try:
            if self._pipeline is not None:
                self._pipeline.end(failed=failed)
        finally:
            if sharded is not None:
                sharded.part.unprune()
        super().teardown()
        if sharded is not None and not failed:  # else ranks may be gone, and their values too
            sharded.fill()
            self._is_partial = False
        self._pipeline = self._sharded = None
        self.end_reading()

    @override
    def on_exception(self, exception: BaseException) -> None:
        super().on_exception(exception)
        if self._pipeline is not None:
            network = self._pipeline.worker.network
            exit_if_blocked(exception, blocked=lambda: network.blocked)

    @override
    def on_train_start(self) -> None:
        self._agree()

    @override
    def on_validation_end(self) -> None:
        if self._trainer.state.fn == TrainerFn.FITTING and not self._trainer.sanity_checking:
            self._agree()

    def _agree(self) -> None:
        """After hooks of callbacks and of the module, in which a rank may request a stop."""
        assert self._patches is not None
        self._patches.stop_for_all()

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        pipeline = self._pipeline
        if pipeline is None:
            return super().training_step(*args, **kwargs)
        self._updates.check_step(self._trainer.lightning_module)
        batch, *arguments = (*args, *kwargs.values())
        loop = self._trainer.fit_loop
        loaders, step = internals.loaders_of(loop), loop.epoch_loop.batch_idx
        count = self.count_minibatches(loaders, step, batch)
        number = self._number(loaders, step)
        pipeline.train(batch, tuple(arguments), count=count, number=number)
        assert self._patches is not None
        if drain_follows(self._trainer, stops=self._patches.stops):
            pipeline.drain()
        return pipeline.loss.clone()

    @override
    def backward(
        self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any
    ) -> Tensor:
        if self._pipeline is None:
            return super().backward(closure_loss, optimizer, *args, **kwargs)
        return closure_loss  # the worker has run what the schedule had for this step

    @override
    def optimizer_step(
        self,
        optimizer: Optimizer,
        closure: Any,
        model: Any = None,
        **kwargs: Any,
    ) -> Any:
        if self._pipeline is None:
            return super().optimizer_step(optimizer, closure, model, **kwargs)
        with self._updates.updating():
            return closure()  # the worker updates

    @override
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_start(batch, batch_idx)
        self._updates.begin_batch()

    @override
    def all_gather(self, *args: Any, **kwargs: Any) -> Any:
        self._check_collective("all_gather")
        return super().all_gather(*args, **kwargs)

    @override
    def reduce(self, *args: Any, **kwargs: Any) -> Any:
        self._check_collective("reduce")
        return super().reduce(*args, **kwargs)

    @override
    def barrier(self, name: str | None = None) -> None:
        self._check_collective("barrier")
        super().barrier(name)

    @override
    def broadcast(self, obj: _Value, src: int = 0) -> _Value:
        self._check_collective("broadcast")
        return super().broadcast(obj, src)

    def _check_collective(self, name: str) -> None:
        """Refuse what would wait for ranks that do not come there."""
        if self._sharded is not None and self._sharded.part.absence.in_step:
            raise ConfigError(
                f"a step calls {name}, for which all ranks have to meet, and in a pipeline each "
                "rank runs another part of the step",
                remedy="call it in a hook, such as on_train_batch_end, which every rank runs; "
                "self.log and torchmetrics need no call of it",
            )
