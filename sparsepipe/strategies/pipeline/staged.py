"""The base of all pipeline strategies: what Lightning calls of any pipeline, and no more."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import ModelSummary
from pytorch_lightning.strategies.strategy import Strategy
from pytorch_lightning.trainer.states import TrainerFn, TrainerStatus
from pytorch_lightning.utilities.types import STEP_OUTPUT
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from sparsepipe.errors import ConfigError
from sparsepipe.partition.activation_checkpointing.setting import StageSpans
from sparsepipe.schedule import Plan
from sparsepipe.strategies import trainer_internals as internals
from sparsepipe.strategies.distributed import leave_at_exit
from sparsepipe.strategies.pipeline import refusals
from sparsepipe.strategies.pipeline.layers import Placement, check_initialised, find_layers
from sparsepipe.strategies.pipeline.loop_patches import LoopPatches, drain_follows
from sparsepipe.strategies.pipeline.pipeline import Settings, make_pipeline
from sparsepipe.strategies.pipeline.ranks import PipelinedEvaluation
from sparsepipe.strategies.pipeline.sharding import SpreadModule
from sparsepipe.strategies.pipeline.stage_plan import Balance, check_balance, costs_of, make_plan


class EarlySummaries:
    """Lets callbacks summarise a module now, and not again when the fit starts.

    Then layers of other stages are gone: their parameters would not be counted, and no
    example could run through them.

    Args:
        trainer: has the callbacks.
        module: the LightningModule, whole.
    """

    def __init__(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        callbacks = trainer.callbacks  # type: ignore[attr-defined]
        self._told = [callback for callback in callbacks if isinstance(callback, ModelSummary)]
        with internals.actual_device(module):
            for callback in self._told:
                callback.on_fit_start(trainer, module)
        for callback in self._told:
            callback.on_fit_start = _nothing  # type: ignore[method-assign]

    def undo(self) -> None:
        """The next fit is summarised as any other."""
        for callback in self._told:
            del callback.on_fit_start


def _nothing(trainer: Any, pl_module: Any) -> None:
    return None


class WholeCheckpoints(PipelinedEvaluation):
    """Puts together what is spread over the ranks, and takes this rank's part of the whole."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._spread: SpreadModule | None = None
        self._torn = False

    def drain(self) -> None:
        """Empties the pipeline; every rank must call it."""
        if self._pipeline is not None:
            self._pipeline.drain()

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        self._check_not_torn()
        self.drain()
        if self._spread is None:
            return super().lightning_module_state_dict()
        return self._spread.state_dict()

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        self._check_not_torn()
        self.drain()
        if self._spread is None or not self._spread.has_optimizer:
            return super().optimizer_state(optimizer)  # of the run before, and whole
        return self._spread.optimizer_state()

    @override
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        if self._spread is None:
            super().load_model_state_dict(checkpoint, strict=strict)
        else:
            self._spread.load_state_dict(checkpoint["state_dict"], strict=strict)

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        if self._spread is None:
            super().load_optimizer_state_dict(checkpoint)
            return
        self._spread.load_optimizer_state(checkpoint["optimizer_states"][0])
        internals.move_optimizer(self.optimizers[0], self.root_device)

    def _check_not_torn(self) -> None:
        if self._torn:
            raise ConfigError(
                "the run has failed, and this rank has the values of its own stage only",
                remedy="go on from the last checkpoint; ModelCheckpoint(every_n_train_steps=...) "
                "limits what a failure costs",
            )


class StagedStrategy(WholeCheckpoints):
    """Splits one ``nn.Sequential`` of any LightningModule by layers over ranks.

    Args:
        cuts: first layer of each stage but the first; None: computed.
        balance: what stages without ``cuts`` share evenly.
        layers: name of the Sequential; None: the one there is.
        **options: of :class:`StagedRanks`.
    """

    _settings: Settings
    """To be set by who inherits, when the rest of it is made."""

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

    @abstractmethod
    def _number(self, loaders: Sequence[Any], step: int) -> int:
        """What a round is numbered in the whole run: the worker counts in its own way.

        Args:
            loaders: that are read in the step.
            step: of the epoch, from 0.
        """

    @property
    def plan(self) -> Plan:
        """The stages and their ranks, once a Trainer runs."""
        assert self._plan is not None, "no Trainer runs"
        return self._plan

    @property
    def recomputed(self) -> StageSpans:
        """Of each stage, the spans of layers that are recomputed, once a Trainer runs."""
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
        self._torn = False
        self.begin_reading()
        self._patches = LoopPatches(trainer, self)
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
            self._spread = SpreadModule(
                module, placement=placement, rank=self.global_rank, optimizer=optimizer
            )
            self.model_to_device()
        self.setup_precision_plugin()
        if fitting:
            internals.move_optimizer(self.optimizers[0], self.root_device)
        if self._spread is not None:
            self._pipeline = make_pipeline(
                self._settings,
                placement=placement,
                spread=self._spread,
                module=module,
                device=self.root_device,
                rank=self.global_rank,
                precision=self.precision_plugin,
                optimizer=optimizer,
            )

    @property
    def _alone(self) -> bool:
        """Whether nothing is to be done that a plain Trainer does not do."""
        return self.plan.num_ranks == 1 and self._settings.as_plain

    def _place(self, trainer: pl.Trainer, module: pl.LightningModule) -> Placement:
        """Makes the plan."""
        name = find_layers(module, self._layers_name)
        layers = module.get_submodule(name)
        assert isinstance(layers, torch.nn.Sequential)
        self._plan = make_plan(
            self.replicas,
            cuts=self._cuts,
            costs=lambda: costs_of(self._balance, trainer, module, layers),
            num_layers=len(layers),
        )
        self._settings.check(self._plan)
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
        trainer = None if module is None else internals.attached_trainer(module)
        failed = trainer is None or trainer.state.status == TrainerStatus.INTERRUPTED
        spread = self._spread
        if spread is not None:
            self._torn = self.world_size > 1  # until its values are together again
        # What raises is caught by Lightning, which calls ``on_exception``, and this once more:
        # so nothing is forgotten before it has come to its end, and all may run twice.
        try:
            if self._pipeline is not None:
                self._pipeline.end(failed=failed)
        finally:
            if spread is not None:
                spread.put_back()
        super().teardown()
        if spread is not None and not failed:  # else ranks may be gone, and their values too
            spread.fill()
            self._torn = False
        self._pipeline = self._spread = None
        self.end_reading()

    @override
    def on_exception(self, exception: BaseException) -> None:
        super().on_exception(exception)
        if self._pipeline is not None:
            network = self._pipeline.worker.network
            leave_at_exit(exception, blocked=lambda: network.blocked)

    @override
    def on_train_start(self) -> None:
        self._agree()

    @override
    def on_validation_end(self) -> None:
        if self._trainer.state.fn == TrainerFn.FITTING and not self._trainer.sanity_checking:
            self._agree()

    def _agree(self) -> None:
        """After the callbacks' and the module's hooks, in which a rank may wish to stop."""
        assert self._patches is not None
        self._patches.stop_for_all()

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        pipeline = self._pipeline
        if pipeline is None:
            with self.slowdown.slowed():
                return Strategy.training_step(self, *args, **kwargs)
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
            with self.slowdown.slowed():
                return Strategy.backward(self, closure_loss, optimizer, *args, **kwargs)
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
            with self.slowdown.slowed():
                return Strategy.optimizer_step(self, optimizer, closure, model, **kwargs)
        return closure()  # the worker updates
