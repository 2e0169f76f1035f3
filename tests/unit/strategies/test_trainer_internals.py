"""A contract with Lightning: each private name that SparsePipe relies on is still there.

A failure names what a new Lightning has renamed or removed; ``trainer_internals.py`` and, for
torchmetrics, ``metrics.py`` are the files to adapt.
"""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import ModelCheckpoint, Timer
from pytorch_lightning.loops.loop import _Loop
from pytorch_lightning.strategies import DDPStrategy
from pytorch_lightning.trainer.connectors.logger_connector.result import _Metadata, _ResultMetric
from pytorch_lightning.utilities.combined_loader import CombinedLoader
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric

from sparsepipe.strategies import metrics, trainer_internals


@functools.cache
def trainer() -> pl.Trainer:
    return pl.Trainer(
        accelerator="cpu", devices=1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip


def logged() -> _ResultMetric:
    return _ResultMetric(_Metadata("training_step", "loss"), is_tensor=True)


def combined() -> CombinedLoader:
    return CombinedLoader([DataLoader([1])], "sequential")


# Where a private name is expected: a module's, or an object's of the given kind.
MODULES = {
    "_DeviceDtypeModuleMixin": "lightning_fabric.utilities.device_dtype_mixin",
    "_distributed_is_initialized": "lightning_fabric.utilities.distributed",
    "_optimizer_to_device": "lightning_fabric.utilities.optimizer",
    "_Loop": "pytorch_lightning.loops.loop",
    "_LRCallback": "pytorch_lightning.tuner.lr_finder",
    "_get_distributed_sampler": "pytorch_lightning.trainer.connectors.data_connector",
    "_Metadata": "pytorch_lightning.trainer.connectors.logger_connector.result",
    "_ResultMetric": "pytorch_lightning.trainer.connectors.logger_connector.result",
    "_Sync": "pytorch_lightning.trainer.connectors.logger_connector.result",
    "_pytree": "torch.utils",
}
EPOCHS = lambda: trainer().fit_loop.epoch_loop  # noqa: E731
OWNERS: dict[Any, str] = {
    pl.LightningModule: "_trainer _compiler_ctx _device _current_fx_name "
    "_on_before_batch_transfer _apply_batch_transfer_handler",
    trainer: "_results _logger_connector _active_loop _signal_connector _accelerator_connector "
    "_data_connector _val_check_time_interval",
    lambda: trainer()._logger_connector: "_current_fx _first_loop_iter on_batch_end "
    "update_train_step_metrics",
    lambda: trainer()._signal_connector: "_sigterm_notifier_fn received_sigterm",
    lambda: trainer()._accelerator_connector: "use_distributed_sampler",
    lambda: trainer()._data_connector: "_requires_distributed_sampler _resolve_sampler",
    lambda: trainer().fit_loop: "_data_fetcher _combined_loader _load_combined_loader_states "
    "epoch_progress",
    EPOCHS: "_batches_that_stepped _broadcast_sigterm_tensor _num_ready_batches_reached "
    "_should_check_val_fx batch_progress on_run_start",
    combined: "_mode _spec",
    ModelCheckpoint: "_every_n_train_steps _train_time_interval",
    lambda: Timer("00:00:01:00"): "_interval",
    DDPStrategy: "_layer_sync _get_process_group_backend _process_group_backend "
    "_configure_launcher",  # overridden in distributed.py
    # torchmetrics, of which Lightning's logged values are a kind.
    logged: "_computed _update_count _forward_cache cumulated_batch_size has_reset",
    lambda: logged().meta: "_sync",
    MeanMetric: "_defaults _reductions _to_sync",
}
"""Names of objects; some are public but not documented, and may go as well."""
OBJECTS = {name: owner for owner, names in OWNERS.items() for name in names.split()}


@pytest.mark.parametrize("name", MODULES)
def test_a_module_has(name) -> None:
    assert hasattr(importlib.import_module(MODULES[name]), name), f"{MODULES[name]}.{name} is gone"


@pytest.mark.parametrize("name", OBJECTS)
def test_an_object_has(name) -> None:
    owner = OBJECTS[name]()
    assert hasattr(owner, name), f"{type(owner).__name__}.{name} is gone"


def test_the_wandb_logger_has_what_its_subclass_reads(tmp_path) -> None:
    pytest.importorskip("wandb")
    logger = pl.loggers.WandbLogger(save_dir=tmp_path, offline=True)
    for name in ("_experiment", "_id", "_offline", "_wandb_init"):
        assert hasattr(logger, name), f"WandbLogger.{name} is gone"


def test_calls_take_what_they_are_given() -> None:
    from pytorch_lightning.trainer.connectors.data_connector import _get_distributed_sampler

    loops = trainer().fit_loop.epoch_loop
    takes = {
        _get_distributed_sampler: ["dataloader", "shuffle", "overfit_batches", "mode"],
        trainer()._data_connector._resolve_sampler: ["dataloader", "shuffle", "mode"],
        loops._should_check_val_fx: ["data_fetcher"],
        loops._broadcast_sigterm_tensor: [],
        trainer()._signal_connector._sigterm_notifier_fn: ["signum", "_"],
        pl.LightningModule()._on_before_batch_transfer: ["batch", "dataloader_idx"],
        pl.LightningModule()._apply_batch_transfer_handler: ["batch", "device", "dataloader_idx"],
    }
    for function, names in takes.items():
        found = [n for n in inspect.signature(function).parameters if n != "kwargs"]
        assert found == names, f"{function.__qualname__} takes {found}"


def test_restarting_can_be_cleared() -> None:
    run = pl.Trainer(logger=False, accelerator="cpu")
    _Loop.restarting.fset(run.fit_loop, True)
    trainer_internals.clear_restarting(run)
    assert not run.fit_loop.restarting


def test_the_lists_are_complete() -> None:
    known = {*MODULES, *OBJECTS}
    for file in (trainer_internals, metrics):
        used = private_names(Path(file.__file__))
        assert used <= known, f"list {sorted(used - known)}"


def private_names(path: Path) -> set[str]:
    """Private names of others in a file: imported, read as attributes, or named in strings."""
    tree = ast.parse(path.read_text())
    own = {n.name for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.ClassDef)}
    own |= {n.id for n in ast.walk(tree)
            if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}  # fmt: skip
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) != "self":
            found.add(node.attr)
        elif isinstance(node, ast.ImportFrom):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.Constant) and str(node.value).isidentifier():
            found.add(str(node.value))
    return {n for n in found - own if n.startswith("_") and not n.startswith("__")}


def test_the_device_is_that_of_the_parameters() -> None:
    module = pl.LightningModule()
    module.layers = torch.nn.Linear(2, 2)
    module._device = torch.device("meta")
    with trainer_internals.actual_device(module) as device:
        assert device == module.device == torch.device("cpu")
    assert module.device == torch.device("meta")
