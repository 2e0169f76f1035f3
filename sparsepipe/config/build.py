"""Builds the inventory, the data module and the LightningModule of a configuration."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytorch_lightning as pl
from torch import nn

from sparsepipe.cluster import Inventory
from sparsepipe.config.run_spec import RunSpec
from sparsepipe.config.schema import Loss
from sparsepipe.config.sweep_environment import inventory_seen_by_sweep
from sparsepipe.data import ShapeDataModule
from sparsepipe.emulate.layout import on_processors
from sparsepipe.errors import ConfigError
from sparsepipe.models import Classifier, DomainSeparation
from sparsepipe.models.chain import check_input, input_kind
from sparsepipe.models.dsn import DomainSeparationNetwork


def build_inventory(spec: RunSpec) -> Inventory:
    """Builds the inventory that ``hardware`` describes; if emulated, all its devices are CPUs."""
    target = spec.inventory_target
    inventory = inventory_seen_by_sweep(target) or target.build()
    if not isinstance(inventory, Inventory):
        raise ConfigError(
            f"hardware builds a {type(inventory).__name__}, not a sparsepipe.cluster.Inventory",
            remedy="set hardware._target_ to a function that returns an inventory",
        )
    emulation = spec.emulation
    if emulation is None:
        return inventory
    return on_processors(inventory, link_bytes_per_s=emulation.link_bytes_per_s)


def build_data(spec: RunSpec) -> pl.LightningDataModule:
    """Builds the data module of a configuration."""
    data = spec.data.build()
    if not isinstance(data, pl.LightningDataModule):
        raise ConfigError(
            f"data builds a {type(data).__name__}, not a pytorch_lightning.LightningDataModule",
            remedy="set data._target_ to a class of data modules, or a function that returns one",
        )
    return data


def ready_data(spec: RunSpec) -> str:
    """Prepares the data and returns their fingerprint; without one, ``data.root``."""
    data = build_data(spec)
    data.prepare_data()
    fingerprint = getattr(data, "fingerprint", None)
    # The identity contains the other settings of the data.
    return str(fingerprint() if fingerprint else spec.data.get("root"))


def num_classes_of(data: pl.LightningDataModule) -> int:
    """Number of classes of the data, which must be prepared; 0 if they have no classes."""
    return int(getattr(data, "num_classes", len(getattr(data, "classes", ()))))


def build_module(spec: RunSpec, data: pl.LightningDataModule) -> pl.LightningModule:
    """Builds the LightningModule of ``model`` for prepared data; wraps a plain network in one."""
    taken, channels = spec.model.get("in_channels"), getattr(data, "in_channels", None)
    if None not in (taken, channels) and taken != channels:
        what = f"samples of these data have {channels} channel{'s' if channels != 1 else ''}"
        if isinstance(data, ShapeDataModule):
            what = "voxels of these data have 1 feature, the constant 1: meshes and clouds are read"
            what += " as coordinates, with no normals or colours"
        raise ConfigError(
            f"model.in_channels={taken}, but {what}", remedy=f"set model.in_channels={channels}"
        )
    classes, num_classes = list(getattr(data, "classes", ())), num_classes_of(data)
    if (own := spec.model.get("num_classes")) is not None and own < num_classes:
        raise ConfigError(
            f"model.num_classes={own}, but the data have {num_classes} classes",
            remedy="leave model.num_classes out, since it follows from the data; to train on "
            "fewer classes, select them with a setting of data",
        )
    given = {"num_classes": num_classes, "class_names": classes}
    if (domains := getattr(data, "domains", None)) is not None:
        given["domains"] = list(domains)
    model = spec.model.build_with(**given)
    if isinstance(model, nn.Sequential | DomainSeparationNetwork):
        check_input(getattr(data, "input_kind", None), input_kind(model))
    if spec.loss != Loss() and not isinstance(model, nn.Sequential):
        raise ConfigError(
            f"loss is set, but a {type(model).__name__} has a loss of its own",
            remedy="leave the settings of loss at their defaults, or choose a plain network",
        )
    return model if isinstance(model, pl.LightningModule) else _wrapped(model, spec, given, data)


def _wrapped(
    model: Any, spec: RunSpec, given: Mapping[str, Any], data: pl.LightningDataModule
) -> pl.LightningModule:
    """Wraps ``model``, which was built with ``given`` among its arguments, in a LightningModule."""
    settings = {"optimizer": spec.optim.optimizer, "schedule": spec.optim.schedule}
    built: dict[str, Any] = {name: t and t.build() for name, t in settings.items()}
    module: pl.LightningModule
    arguments: dict[str, Any] = {"class_names": given["class_names"]}
    if isinstance(model, DomainSeparationNetwork):
        module, network = DomainSeparation(model, **built, **arguments), "network"
    elif isinstance(model, nn.Sequential):
        arguments |= {
            "num_classes": given["num_classes"],
            "label_smoothing": spec.optim.label_smoothing,
            **_loss_settings(spec, data),
        }
        if (patch := getattr(data, "patch", None)) is not None:
            parallel = spec.parallel
            if not (parallel.strategy is None or parallel.is_data_parallel) or parallel.splits:
                raise ConfigError(
                    "data.patch cannot be combined with a pipeline or with a grid of ranks, which "
                    "would compute the windows of a volume one by one",
                    remedy="leave data.patch out, or choose parallel=single or parallel=dp",
                )
            arguments["window"] = list(patch)
        module, network = Classifier(model, **built, **arguments), "layers"
    else:
        raise ConfigError(
            f"model builds a {type(model).__name__}, not an nn.Sequential or a LightningModule",
            remedy="set model._target_ to a class or function that returns one of these",
        )
    taken = spec.model.parameters.types
    node = spec.model.replace(
        **{k: v for k, v in given.items() if k in taken and spec.model.get(k) is None}
    )
    nodes = {name: target and target.to_dict() for name, target in settings.items()}
    # logger=False, since the task logs the whole configuration.
    module.save_hyperparameters({network: node.to_dict(), **nodes, **arguments}, logger=False)
    return module


def _loss_settings(spec: RunSpec, data: pl.LightningDataModule) -> dict[str, Any]:
    """Returns the arguments of a Classifier that ``loss`` sets; none at the defaults.

    Balanced weights are inverse to the numbers of labels in the training split, so that the mean
    weight of a label is 1; a class without labels has the weight 0.
    """
    given = spec.loss.class_weights
    found = {"class_weights": given, "lovasz": spec.loss.lovasz, "dice": spec.loss.dice}
    if given == "balanced":
        if (counts_of := getattr(data, "class_counts", None)) is None:
            raise ConfigError(
                f"loss.class_weights=balanced, but {type(data).__name__} does not count its labels",
                remedy="give a list with a weight for each class",
            )
        counts_K: list[int] = counts_of().tolist()
        mean = sum(counts_K) / max(sum(count > 0 for count in counts_K), 1)
        found["class_weights"] = [mean / count if count else 0.0 for count in counts_K]
    return {name: value for name, value in found.items() if value}


def refuse_further_outputs(
    spec: RunSpec, data: pl.LightningDataModule, module: pl.LightningModule
) -> None:
    """Raises a ConfigError if a Classifier has more outputs than the data have classes."""
    own, num_classes = spec.model.get("num_classes"), num_classes_of(data)
    if isinstance(module, Classifier) and own is not None and own > num_classes:
        raise ConfigError(
            f"model.num_classes={own}, but the data have {num_classes} classes: a test needs one "
            "output for each class",
            remedy="leave model.num_classes out, since it follows from the data; test a "
            f"checkpoint of {own} classes on data with these classes",
        )
