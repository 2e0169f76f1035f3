"""A plan from a strategy's options: replicas for each stage, and cuts or what to share evenly."""

from __future__ import annotations

import copy
import inspect
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal, get_args

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
from sparsepipe.strategies import trainer_internals as internals
from sparsepipe.strategies.pipeline.dataloaders import Padded
from sparsepipe.strategies.pipeline.logging import Recorder
from sparsepipe.strategies.pipeline.step_split import generators_of, run_until_layers

Balance = Literal["parameters", "flops", "layers"]


Grids = Sequence[Sequence[int] | None]
"""The grid of each stage; None for those whose ranks have whole samples."""


def parse_config(config: str | None, *, ranks: int, grids: Grids | None = None) -> tuple[int, ...]:
    """Replicas of each stage: "2-1" is (2, 1); None is one rank, or one grid, a stage.

    Raises:
        ConfigError: it is no such text, or not for this number of ranks.
    """
    if config is None:
        config = "-".join("1" * (ranks if grids is None else len(grids)))
    parts = str(config).split("-")
    if not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise ConfigError(
            f"config={config!r} does not say how many replicas each stage has",
            remedy="write one number a stage, such as '2-1' for three devices in two stages",
        )
    replicas = tuple(map(int, parts))
    devices = sum(devices_of(replicas, grids))
    if devices != ranks:
        with_grids = "" if grids is None else f" with grids={grids}"
        raise ConfigError(
            f"config={config!r}{with_grids} is for {devices} devices, the Trainer has {ranks}",
            remedy=f"set devices={devices}, or a config whose numbers add up to {ranks}",
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
    """A plan, from its cuts (the first layer of each stage but the first) or by sharing evenly the
    ``costs`` of layers, which are computed only then.

    Raises:
        ConfigError: the plan does not fit the layers.
    """
    config = "-".join(map(str, replicas))
    if cuts is None:
        if len(replicas) > num_layers:
            raise ConfigError(
                f"config={config!r} has {len(replicas)} stages for {num_layers} layers",
                remedy="use at most as many stages as there are layers",
            )
        cuts = balanced(costs(), replicas) if len(replicas) > 1 else []
    return Plan.of(config=config, cuts=list(cuts), num_layers=num_layers, grids=grids)


def check_balance(balance: str) -> None:
    """Refuse an unknown way to balance stages."""
    if balance not in get_args(Balance):
        raise ConfigError(
            f"balance={balance!r} is unknown", remedy=f"use one of {', '.join(get_args(Balance))}"
        )


def parameter_costs(layers: nn.Sequential) -> list[float]:
    return [float(sum(p.numel() for p in layer.parameters())) for layer in layers]


def flop_costs(layers: nn.Sequential, value: Any) -> list[float]:
    """Floating-point operations of matrix products in each layer's forward pass."""
    costs = []
    training = [(module, module.training) for module in layers.modules()]
    layers.eval()  # running statistics stay, and nothing is drawn at random
    try:
        with torch.no_grad():
            for layer in layers:
                with FlopCounterMode(display=False) as counter:
                    value = layer(value)
                costs.append(float(counter.get_total_flops()))
    finally:
        for module, mode in training:
            module.training = mode
    return costs


def costs_of(
    balance: str, trainer: pl.Trainer, module: pl.LightningModule, layers: nn.Sequential
) -> list[float]:
    """The cost of each layer, computed on rank 0; a collective.

    Raises:
        ConfigError: on other ranks, what rank 0 raises.
    """
    if balance == "layers":
        return [1.0] * len(layers)
    if balance == "parameters":
        return parameter_costs(layers)
    loop = internals.active_loop(trainer)
    assert loop is not None
    loop.setup_data()
    costs: list[float] | None = None
    failure: Exception | None = None
    if process_group.rank() == 0:
        try:
            with isolate_rng():
                costs = _flops(trainer, loop, module, layers)
        except Exception as error:  # the others wait for the result
            error.add_note("while rank 0 measured the layers, for balance='flops'")
            failure = error
    message = None if failure is None else f"{type(failure).__name__}: {failure}"
    costs, message = process_group.broadcast_object((costs, message))
    if failure is not None:
        raise failure
    if message is not None:
        raise ConfigError(
            f"rank 0 could not measure the layers: {message}",
            remedy="correct that; cuts, or balance='parameters', measure nothing",
        )
    assert costs is not None
    return costs if any(costs) else parameter_costs(layers)


def _flops(
    trainer: pl.Trainer, loop: Any, module: pl.LightningModule, layers: nn.Sequential
) -> list[float]:
    hook = {"fit": "training_step", "predict": "predict_step", "test": "test_step"}.get(
        str(trainer.state.fn and trainer.state.fn.value), "validation_step"
    )
    step = getattr(module, hook)
    numbers = [0] * (len(inspect.signature(step).parameters) - 1)
    precision = trainer.precision_plugin
    with (
        Recorder(module).silence(),
        internals.actual_device(module) as device,
        precision.forward_context(),
    ):
        # As Lightning's loops hand a batch to a step.
        read = [_read(loader) for loader in internals.loaders_of(loop)]
        batch = precision.convert_input(internals.combined_batch(loop, read))
        batch = internals.transfer_batch(module, batch, device=device)
        with _buffers_kept(module), states_preserved(generators_of(module, layers).values()):
            opened = run_until_layers(layers, lambda: step(batch, *numbers))
            return flop_costs(layers, opened.value)


@contextmanager
def _buffers_kept(module: nn.Module) -> Iterator[None]:
    """Restores buffers that a step changes before it calls its layers."""
    kept = [
        (child, name, buffer, buffer.clone())
        for child in module.modules()
        for name, buffer in child._buffers.items()
        if buffer is not None
    ]
    try:
        yield
    finally:
        for child, name, buffer, value in kept:
            child._buffers[name] = buffer.copy_(value)


def _read(loader: Any) -> Any:
    """One batch; iterators that exist already stay as they are."""
    if isinstance(loader, Padded):
        loader = loader.loader
    with states_preserved(_generators(loader, set())):
        if getattr(type(loader), "__iter__", None) is not DataLoader.__iter__:
            return next(iter(loader))
        # As torch's would, but for workers, which may have begun already.
        return loader.collate_fn(_samples(loader))


def _samples(loader: DataLoader[Any]) -> Any:
    """The samples of one batch; or one sample, where the loader does not make batches."""
    data: Any = loader.dataset
    if not has_iterable_dataset(loader):
        if loader.batch_sampler is None:
            return data[next(iter(loader.sampler))]
        return [data[i] for i in next(iter(loader.batch_sampler))]
    # What is an iterator itself would not begin anew.
    samples = iter(copy.deepcopy(data) if isinstance(data, Iterator) else data)
    if loader.batch_sampler is None:
        return next(samples)
    return list(itertools.islice(samples, loader.batch_size))


def _generators(place: Any, seen: set[int]) -> Iterator[Generator]:
    """Generators of a loader, its data set and samplers, and of samplers within these."""
    seen.add(id(place))
    for name, value in getattr(place, "__dict__", {}).items():
        if id(value) in seen:
            continue
        if is_generator(value):
            seen.add(id(value))
            yield value
        elif name in ("dataset", "sampler", "batch_sampler", "_sampler", "collate_fn"):
            yield from _generators(value, seen)
