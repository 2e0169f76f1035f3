"""Builds objects from configuration nodes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
from hydra.errors import InstantiationException
from hydra.utils import instantiate
from torch import nn

from sparsepipe.cluster import Inventory
from sparsepipe.config.division import check_division
from sparsepipe.config.emulation import emulation_of, without_emulation
from sparsepipe.config.job_hardware import told_of
from sparsepipe.config.signature import parameters_of
from sparsepipe.emulate.cluster import on_processors
from sparsepipe.errors import ConfigError, SparsePipeError
from sparsepipe.models import Classifier


def build(node: Mapping[str, Any], **given: Any) -> Any:
    """Builds what a node with ``_target_`` describes, with further keyword arguments.

    Raises:
        SparsePipeError: what the target itself raised for the user.
        ConfigError: the target cannot be called like that.
    """
    try:
        return instantiate(dict(node), _convert_="all", **given)
    except InstantiationException as error:
        cause: BaseException | None = error
        while cause is not None:
            if isinstance(cause, SparsePipeError):
                raise cause from None
            cause = cause.__cause__
        raise ConfigError(
            f"{node.get('_target_')} cannot be built: {error.__cause__ or error}",
            remedy="correct its arguments; `sparsepipe --cfg job` prints them",
        ) from error


def build_with(node: Mapping[str, Any], **offered: Any) -> Any:
    """As :func:`build`, passing on only those arguments that the target takes."""
    target = parameters_of(node["_target_"])
    given = {k: v for k, v in offered.items() if target.open or k in target.types}
    return build(node, **{k: v for k, v in given.items() if k not in node})


def build_inventory(config: Mapping[str, Any]) -> Inventory:
    """The hardware of a configuration; on processors where it is emulated.

    Raises:
        ConfigError: the node builds something else.
    """
    node = without_emulation(config["hardware"])
    inventory = told_of(node) or build(node)
    if not isinstance(inventory, Inventory):
        raise ConfigError(
            f"hardware builds a {type(inventory).__name__}",
            remedy="name a function that returns a sparsepipe.cluster.Inventory",
        )
    emulation = emulation_of(config)
    if emulation is None:
        return inventory
    return on_processors(inventory, link_bytes_per_s=emulation.link_bytes_per_s)


def build_data(config: Mapping[str, Any]) -> pl.LightningDataModule:
    """The data module of a configuration.

    Raises:
        ConfigError: the node builds something else.
    """
    data = build(config["data"])
    if not isinstance(data, pl.LightningDataModule):
        raise ConfigError(
            f"data builds a {type(data).__name__}",
            remedy="name a pytorch_lightning.LightningDataModule",
        )
    return data


def ready_data(config: Mapping[str, Any]) -> str:
    """Makes the data ready; what they hold."""
    data = build_data(config)
    data.prepare_data()
    fingerprint = getattr(data, "fingerprint", None)
    # The settings are in the identity anyway; where the data lie is all that is left.
    return str(fingerprint() if fingerprint else config["data"].get("root"))


def build_module(
    config: Mapping[str, Any], data: pl.LightningDataModule, *, plan: Path | None = None
) -> pl.LightningModule:
    """The LightningModule: a layer list wrapped in the classifier, or a module as it is.

    Args:
        config: resolved and checked.
        data: prepared, since it knows the classes.
        plan: the plan file of the run, if it has one.

    Raises:
        ConfigError: the node builds neither.
        PlanError: the plan, or ``parallel.plan``, does not fit its layers.
    """
    module = _build_module(config, data)
    check_division(config, module, kept=plan)
    return module


def num_classes_of(data: pl.LightningDataModule) -> int:
    """Classes of prepared data; 0 where they have none."""
    return int(getattr(data, "num_classes", len(getattr(data, "classes", ()))))


def _build_module(config: Mapping[str, Any], data: pl.LightningDataModule) -> pl.LightningModule:
    classes = tuple(getattr(data, "classes", ()))
    num_classes = num_classes_of(data)
    model = build_with(config["model"], num_classes=num_classes, class_names=classes)
    if isinstance(model, pl.LightningModule):
        return model
    if not isinstance(model, nn.Sequential):
        raise ConfigError(
            f"model builds a {type(model).__name__}",
            remedy="name a function that returns an nn.Sequential, or a LightningModule",
        )
    optim = config["optim"]
    return Classifier(
        model,
        num_classes=num_classes,
        optimizer=build(optim["optimizer"]),
        schedule=None if optim["schedule"] is None else build(optim["schedule"]),
        label_smoothing=optim["label_smoothing"],
        class_names=classes,
    )
