"""Training steps of one sample: in one process, on shards, and with DDP."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from spatial_workloads import CLASSES, Sample
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from sparsepipe.runtime.collectives import process_group
from sparsepipe.spatial import Grid, spatialize

TIMEOUT_S = 600.0
MODES = {"one process": 1, "shards": 2, "ddp": 2}
"""Rows, and how many ranks each has."""


def step_of(model: nn.Module, x: Tensor, label: Tensor, *, sums: bool) -> Callable[[], None]:
    """A step of training.

    Args:
        model: trained.
        x: its input.
        label: of its samples.
        sums: whether gradients are added up over all ranks.
    """
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9)

    def step() -> None:
        optimizer.zero_grad()
        F.cross_entropy(model(x), label).backward()  # type: ignore[no-untyped-call]
        if sums:
            gradients = [each.grad for each in model.parameters() if each.grad is not None]
            joined = torch.cat([each.flatten() for each in gradients])
            dist.all_reduce(joined)
            start = 0
            for gradient in gradients:
                gradient.copy_(joined[start : start + gradient.numel()].view_as(gradient))
                start += gradient.numel()
        optimizer.step()

    return step


def shard_step(sample: Sample) -> Callable[[], None]:
    """A step of this rank, which has joined the others."""
    grid = Grid(sample.grid)
    x, label = sample.input(0), torch.arange(sample.batch_size) % CLASSES
    model = spatialize(sample.layers(), grid)
    return step_of(model, grid.shard(x).clone(), label, sums=True)


def sample_seconds(rank: int, sample: Sample, mode: str, steps: int) -> float:
    """Of a sample, mean over some steps; one of :data:`MODES`."""
    label = torch.arange(sample.batch_size) % CLASSES
    if mode == "one process":
        step = step_of(sample.layers(), sample.input(0), label, sums=False)
        return _timed(step, steps) / sample.batch_size
    warnings.filterwarnings("ignore", message="Grad strides do not match")
    process_group.join("gloo", timeout_s=TIMEOUT_S)
    if mode == "ddp":
        model = DistributedDataParallel(sample.layers())
        step = step_of(model, sample.input(rank), label, sums=False)
    else:
        step = shard_step(sample)
    taken_s = _timed(partial(_together, step), steps)
    process_group.leave()
    return taken_s / sample.batch_size / (MODES[mode] if mode == "ddp" else 1)


@torch.no_grad()
def layer_seconds(rank: int, sample: Sample) -> list[float]:
    """Processor time of each layer's forward pass, to cut a pipeline by."""
    value, layers, seconds = sample.input(0), sample.layers(), list[float]()
    layers(value)  # warms up
    for layer in layers:
        began_s = time.process_time()
        value = layer(value)
        seconds.append(time.process_time() - began_s)
    return seconds


def _together(step: Callable[[], None]) -> None:
    step()
    dist.barrier()


def _timed(step: Callable[[], None], steps: int) -> float:
    step()  # warms up
    began_s = time.perf_counter()
    for _ in range(steps):
        step()
    return (time.perf_counter() - began_s) / steps
