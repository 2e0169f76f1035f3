"""Makes plans from a strategy's options; tells which stage owns which part of a module."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import pytorch_lightning as pl
import torch
from lightning_fabric.utilities.data import has_iterable_dataset
from pytorch_lightning.utilities.seed import isolate_rng
from torch import nn
from torch.utils.data import DataLoader
from torch.utils.flop_counter import FlopCounterMode

from sparsepipe.errors import ConfigError
from sparsepipe.runtime.collectives import process_group
from sparsepipe.runtime.random_generators import Generator, is_generator, states_preserved
from sparsepipe.schedule import Plan
from sparsepipe.schedule.plan import balanced, devices_of
from sparsepipe.spatial.spatialize import check_rules
from sparsepipe.strategies import trainer_internals as internals
from sparsepipe.strategies.pipeline.dataloaders import Padded
from sparsepipe.strategies.pipeline.logging import replaced_log
from sparsepipe.strategies.pipeline.steps import generators_of, run_until_layers

Balance = Literal["parameters", "flops", "layers"]
Grids = Sequence[Sequence[int] | None]
"""Shape of the grid of each stage; None for a stage whose ranks have whole samples."""


def find_layers(module: nn.Module, name: str | None) -> str:
    """Finds the ``nn.Sequential`` that a plan cuts into stages, and returns its dotted name.

    Args:
        module: the LightningModule.
        name: dotted name given by the user; None: the Sequential called ``layers``, else the only
            one, among the module's children or, if none of these is one, among their children.
    """
    candidates: list[str] = []
    if name is None:
        kind = nn.Sequential
        found = [n for n, child in module.named_modules() if n and isinstance(child, kind)]
        of_depth = [[n for n in found if n.count(".") == depth] for depth in (0, 1)]
        candidates = next(filter(None, of_depth), [])
        named = [each for each in candidates if each.rpartition(".")[2] == "layers"]
        name = next((only[0] for only in (named, candidates) if len(only) == 1), None)
    if name is None and candidates:
        raise ConfigError(
            f"{type(module).__name__} has several nn.Sequential modules: {', '.join(candidates)}",
            remedy=f"name the one to cut into stages, such as layers={candidates[0]!r}",
        )
    layers = dict(module.named_modules()).get(name or "no layers")
    if not isinstance(layers, nn.Sequential):
        given = "" if name is None else f" that is called {name!r}"
        raise ConfigError(
            f"{type(module).__name__} has no nn.Sequential{given} to cut into stages",
            remedy="put the network into one nn.Sequential and call it once in each step; "
            "layers=... must be its dotted name, and may be left out if there is only one",
        )
    if getattr(layers.forward, "__func__", None) is not nn.Sequential.forward:
        raise ConfigError(
            f"{name} is a {type(layers).__name__} with a forward of its own, but stages run its "
            "layers one by one",
            remedy="move that code into an entry of the Sequential, or into the steps",
        )
    if layers._backward_hooks or layers._backward_pre_hooks:
        raise ConfigError(
            f"{name} has a backward hook, but no rank runs the backward pass of all its layers",
            remedy="register it on an entry of the Sequential",
        )
    assert name is not None
    return name


@dataclass(frozen=True, slots=True, kw_only=True)
class StagePlacement:
    """Assignment of a module's parameters and buffers to stages.

    ``layers`` is the Sequential of ``module`` with the dotted ``name``.
    """

    module: nn.Module
    name: str
    layers: nn.Sequential
    plan: Plan

    def stage_of(self, name: str) -> int:
        """Returns the stage that owns a parameter or buffer: the last one if it is in no layer."""
        prefix = f"{self.name}."
        if name.startswith(prefix):
            key = name.removeprefix(prefix).partition(".")[0]
            layer = list(self.layers._modules).index(key)
            for stage, entry in enumerate(self.plan.stages):
                if entry.layers[0] <= layer <= entry.layers[1]:
                    return stage
        return self.plan.num_stages - 1

    def check(self) -> None:
        """Refuses a plan that does not suit the module; must run while ranks have all layers."""
        owner: dict[int, tuple[int, str]] = {}
        named = (
            *self.module.named_parameters(remove_duplicate=False),
            *self.module.named_buffers(remove_duplicate=False),
        )
        for name, tensor in named:
            stage = self.stage_of(name)
            first, other = owner.setdefault(id(tensor), (stage, name))
            if first != stage:
                kind = "parameter" if isinstance(tensor, nn.Parameter) else "buffer"
                raise ConfigError(
                    f"{other} (stage {first}) and {name} (stage {stage}) are the same {kind}",
                    remedy="move the cut so that both are in one stage, or untie them",
                )
            outside = isinstance(tensor, nn.Parameter) and not name.startswith(f"{self.name}.")
            if outside and tensor.requires_grad and self.plan.stages[-1].grid is not None:
                raise ConfigError(
                    f"{name} is trained outside of the layers, but the devices of the last stage "
                    "form a grid, and each would compute its whole gradient, not a part",
                    remedy="make it part of an entry of the Sequential, or give the last stage one "
                    "device",
                )
        if self.plan.num_stages == 1 and self.plan.has_grids:
            raise ConfigError(
                "the devices of the only stage form a grid, so nothing is pipelined",
                remedy="choose spatial parallelism: parallel=spatial, or SpatialStrategy",
            )
        for entry in self.plan.stages:
            if entry.grid is not None:
                for layer in list(self.layers)[entry.layers[0] : entry.layers[1] + 1]:
                    check_rules(layer)


def parse_config(config: str | None, *, ranks: int, grids: Grids | None = None) -> tuple[int, ...]:
    """Returns each stage's number of replicas: (2, 1) for "2-1"; for None, 1 in every stage."""
    if config is None:
        config = "-".join("1" * (ranks if grids is None else len(grids)))
    parts = str(config).split("-")
    if not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise ConfigError(
            f"config={config!r} does not say how many replicas each stage has",
            remedy="write one number per stage, such as '2-1' for three devices in two stages",
        )
    replicas = tuple(map(int, parts))
    devices = sum(devices_of(replicas, grids))
    if devices != ranks:
        with_grids = "" if grids is None else f" with grids={grids}"
        raise ConfigError(
            f"config={config!r}{with_grids} needs devices={devices}, but the Trainer has {ranks}",
            remedy=f"set devices={devices}, or change config or grids to need devices={ranks}",
        )
    return replicas


def make_plan(
    replicas: Sequence[int],
    *,
    cuts: Sequence[int] | None,
    costs: Callable[[], list[float]],
    num_layers: int,
    grids: Grids | None = None,
) -> Plan:
    """Makes a plan. ``cuts``: indices of the first layers of all stages but the first; None: stages
    share evenly the layers' ``costs``, which are computed only then.
    """
    config = "-".join(map(str, replicas))
    if cuts is None:
        if len(replicas) > num_layers:
            raise ConfigError(
                f"config={config!r} has {len(replicas)} stages, more than the number of layers, "
                f"{num_layers}",
                remedy="use at most as many stages as there are layers",
            )
        cuts = balanced(costs(), replicas) if len(replicas) > 1 else []
    return Plan.of(config=config, cuts=list(cuts), num_layers=num_layers, grids=grids)


def flop_costs(layers: nn.Sequential, value: Any) -> list[float]:
    """Returns the floating-point operations of each layer's forward pass on ``value``, in eval
    mode. Counts only what torch's FlopCounterMode does: matrix products, convolutions, attention.
    """
    costs = []
    training = [(module, module.training) for module in layers.modules()]
    layers.eval()  # running statistics stay, and nothing is drawn at random
    try:
        for layer in layers:
            with torch.no_grad(), FlopCounterMode(display=False) as counter:
                value = layer(value)
            costs.append(float(counter.get_total_flops()))
    finally:
        for module, mode in training:
            module.training = mode
    return costs


def costs_of(
    balance: str, trainer: pl.Trainer, module: pl.LightningModule, layers: nn.Sequential
) -> list[float]:
    """Returns each layer's cost by ``balance``, or by parameters if flops are all 0; collective."""
    if balance == "layers":
        return [1.0] * len(layers)
    parameters = [float(sum(p.numel() for p in layer.parameters())) for layer in layers]
    if balance == "parameters":
        return parameters
    loop = internals.active_loop(trainer)
    assert loop is not None
    loop.setup_data()
    costs = None
    if process_group.rank() == 0:
        with isolate_rng():
            costs = _flops(trainer, loop, module, layers)
    costs = process_group.broadcast_object(costs, what="measuring the layers, on rank 0")
    assert costs is not None
    return costs if any(costs) else parameters


def _flops(
    trainer: pl.Trainer, loop: Any, module: pl.LightningModule, layers: nn.Sequential
) -> list[float]:
    """Counts the layers' floating-point operations on a batch that the step has prepared for them.
    Restores the random generators and buffers that the step changes.
    """
    hook = {"fit": "training_step", "predict": "predict_step", "test": "test_step"}.get(
        str(trainer.state.fn and trainer.state.fn.value), "validation_step"
    )
    step = getattr(module, hook)
    numbers = [0] * (len(inspect.signature(step).parameters) - 1)
    buffers = [
        (child, name, buffer, buffer.clone())
        for child in module.modules()
        for name, buffer in child._buffers.items()
        if buffer is not None
    ]
    with (
        replaced_log(module),
        internals.actual_device(module) as device,
        trainer.precision_plugin.forward_context(),
    ):
        read = []
        for each in internals.loaders_of(loop):
            loader: Any = each.loader if isinstance(each, Padded) else each
            with states_preserved(_generators(loader, set())):
                if type(loader).__iter__ is not DataLoader.__iter__ or has_iterable_dataset(loader):
                    read.append(next(iter(loader)))
                    continue
                # Without the loader's iterator, whose workers may have begun already.
                data, batches = loader.dataset, loader.batch_sampler
                indices = next(iter(loader.sampler if batches is None else batches))
                samples = data[indices] if batches is None else [data[i] for i in indices]
                read.append(loader.collate_fn(samples))
        batch = internals.combined_batch(trainer, loop, read, device=device)
        try:
            with states_preserved(generators_of(module, layers).values()):
                opened = run_until_layers(layers, lambda: step(batch, *numbers))
                return flop_costs(layers, opened.value)
        finally:
            for child, name, buffer, value in buffers:
                child._buffers[name] = buffer.copy_(value)


def _generators(place: Any, seen: set[int]) -> Iterator[Generator]:
    """Yields the random generators of a loader, its data set, its samplers and what these wrap."""
    seen.add(id(place))
    for name, value in getattr(place, "__dict__", {}).items():
        if id(value) in seen:
            continue
        if is_generator(value):
            seen.add(id(value))
            yield value
        elif name in ("dataset", "sampler", "batch_sampler", "_sampler", "collate_fn"):
            yield from _generators(value, seen)
