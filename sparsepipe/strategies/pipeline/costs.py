"""What each layer costs, so that stages can share it evenly."""

from __future__ import annotations

import copy
import inspect
import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytorch_lightning as pl
from lightning_fabric.utilities.data import has_iterable_dataset
from pytorch_lightning.utilities.combined_loader import CombinedLoader
from pytorch_lightning.utilities.seed import isolate_rng
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils.data import DataLoader

from sparsepipe.errors import ConfigError
from sparsepipe.runtime import group
from sparsepipe.runtime.generators import Generator, is_generator, undrawn
from sparsepipe.strategies.pipeline.capture import run_until_layers
from sparsepipe.strategies.pipeline.generators import generators_of
from sparsepipe.strategies.pipeline.loaders import Padded
from sparsepipe.strategies.pipeline.logs import Recorder
from sparsepipe.strategies.pipeline.plan_by_hand import flop_costs, parameter_costs
from sparsepipe.strategies.pipeline.whereabouts import device_told


def costs_of(
    balance: str, trainer: pl.Trainer, module: pl.LightningModule, layers: nn.Sequential
) -> list[float]:
    """What each layer costs; every rank must call it, and all get rank 0's answer.

    Args:
        balance: ``layers``, ``parameters`` or ``flops`` (of the forward pass of one batch).
        trainer: has the loaders.
        module: the LightningModule.
        layers: its Sequential.

    Raises:
        ConfigError: on other ranks, what rank 0 raises.
    """
    if balance == "layers":
        return [1.0] * len(layers)
    if balance == "parameters":
        return parameter_costs(layers)
    loop = trainer._active_loop
    assert loop is not None
    loop.setup_data()
    costs: list[float] | None = None
    failure: Exception | None = None
    if group.rank() == 0:
        try:
            with isolate_rng():
                costs = _flops(trainer, loop, module, layers)
        except Exception as error:  # the others wait to hear of it
            error.add_note("while rank 0 measured the layers, for balance='flops'")
            failure = error
    told = None if failure is None else f"{type(failure).__name__}: {failure}"
    costs, told = group.broadcast_object((costs, told))
    if failure is not None:
        raise failure
    if told is not None:
        raise ConfigError(
            f"rank 0 could not measure the layers: {told}",
            remedy="mend what it says; cuts, or balance='parameters', measure nothing",
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
    with Recorder(module).silence(), device_told(module) as device, precision.forward_context():
        # As Lightning's loops hand a batch to a step.
        batch = precision.convert_input(_first_batch(loop._combined_loader))
        batch = module._on_before_batch_transfer(batch, dataloader_idx=0)
        batch = module._apply_batch_transfer_handler(batch, device=device, dataloader_idx=0)
        with _buffers_kept(module), undrawn(generators_of(module, layers).values()):
            opened = run_until_layers(layers, lambda: step(batch, *numbers))
            return flop_costs(layers, opened.value)


@contextmanager
def _buffers_kept(module: nn.Module) -> Iterator[None]:
    """Takes back what a step does to buffers, before its layers."""
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


def _first_batch(combined: CombinedLoader) -> Any:
    """One batch, without a touch to the iterators that are there already."""
    batches = [_read(loader) for loader in combined.flattened]
    if combined._mode == "sequential":
        return batches[0]
    return pytree.tree_unflatten(batches, combined._spec)


def _read(loader: Any) -> Any:
    if isinstance(loader, Padded):
        loader = loader.loader
    with undrawn(_generators(loader, set())):
        if getattr(type(loader), "__iter__", None) is not DataLoader.__iter__:
            return next(iter(loader))
        # As torch's would, but for workers, which may have begun already.
        return loader.collate_fn(_samples(loader))


def _samples(loader: DataLoader[Any]) -> Any:
    """Of one batch; or one sample, where the loader does not make batches."""
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
    """Of a loader, its data set and samplers, and of samplers within these."""
    seen.add(id(place))
    for name, value in getattr(place, "__dict__", {}).items():
        if id(value) in seen:
            continue
        if is_generator(value):
            seen.add(id(value))
            yield value
        elif name in ("dataset", "sampler", "batch_sampler", "_sampler", "collate_fn"):
            yield from _generators(value, seen)
