"""Builds objects from configuration nodes."""

from __future__ import annotations

from pathlib import Path

import pytorch_lightning as pl
from torch import nn

from sparsepipe.cluster import Inventory
from sparsepipe.config.division import check_division
from sparsepipe.config.run_spec import RunSpec
from sparsepipe.config.sweep_environment import inventory_seen_by_sweep
from sparsepipe.emulate.layout import on_processors
from sparsepipe.errors import ConfigError
from sparsepipe.models import Classifier


def build_inventory(spec: RunSpec) -> Inventory:
    """The hardware of a configuration: emulated hardware is on processors. Raises a ConfigError
    where the node builds something else.
    """
    target = spec.inventory_target
    inventory = inventory_seen_by_sweep(target) or target.build()
    if not isinstance(inventory, Inventory):
        raise ConfigError(
            f"hardware builds a {type(inventory).__name__}",
            remedy="name a function that returns a sparsepipe.cluster.Inventory",
        )
    emulation = spec.emulation
    if emulation is None:
        return inventory
    return on_processors(inventory, link_bytes_per_s=emulation.link_bytes_per_s)


def build_data(spec: RunSpec) -> pl.LightningDataModule:
    """The data module of a configuration. Raises a ConfigError where the node builds something
    else.
    """
    data = spec.data.build()
    if not isinstance(data, pl.LightningDataModule):
        raise ConfigError(
            f"data builds a {type(data).__name__}",
            remedy="name a pytorch_lightning.LightningDataModule",
        )
    return data


def ready_data(spec: RunSpec) -> str:
    """Prepares the data and returns their fingerprint."""
    data = build_data(spec)
    data.prepare_data()
    fingerprint = getattr(data, "fingerprint", None)
    # The settings are in the identity anyway; where the data lie is all that is left.
    return str(fingerprint() if fingerprint else spec.data.get("root"))


def build_module(
    spec: RunSpec, data: pl.LightningDataModule, *, plan: Path | None = None
) -> pl.LightningModule:
    """The LightningModule: a layer list wrapped in the classifier, or a module as it is.

    Raises:
        ConfigError: the node builds neither.
        PlanError: the plan, or ``parallel.plan``, does not fit its layers.
    """
    module = _build_module(spec, data)
    check_division(spec, module, kept=plan)
    return module


def num_classes_of(data: pl.LightningDataModule) -> int:
    """Classes of prepared data; 0 where they have none."""
    return int(getattr(data, "num_classes", len(getattr(data, "classes", ()))))


def _build_module(spec: RunSpec, data: pl.LightningDataModule) -> pl.LightningModule:
    classes = tuple(getattr(data, "classes", ()))
    num_classes = num_classes_of(data)
    model = spec.model.build_with(num_classes=num_classes, class_names=classes)
    if isinstance(model, pl.LightningModule):
        return model
    if not isinstance(model, nn.Sequential):
        raise ConfigError(
            f"model builds a {type(model).__name__}",
            remedy="name a function that returns an nn.Sequential, or a LightningModule",
        )
    optim = spec.optim
    module = Classifier(
        model,
        num_classes=num_classes,
        optimizer=optim.optimizer.build(),
        schedule=None if optim.schedule is None else optim.schedule.build(),
        label_smoothing=optim.label_smoothing,
        class_names=classes,
    )
    taken = spec.model.parameters
    given = {"num_classes": num_classes, "class_names": list(classes)}
    layers = spec.model.replace(
        **{k: v for k, v in given.items() if k in taken.types and spec.model.get(k) is None}
    )
    module.save_hyperparameters(
        {
            "layers": layers.to_dict(),
            "num_classes": num_classes,
            "optimizer": optim.optimizer.to_dict(),
            "schedule": None if optim.schedule is None else optim.schedule.to_dict(),
            "label_smoothing": optim.label_smoothing,
            "class_names": list(classes),
        },
        logger=False,  # which gets the whole configuration from the task
    )
    return module
