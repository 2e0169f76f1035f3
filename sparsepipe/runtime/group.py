"""The process group and the few collectives the house needs outside of training steps."""

from __future__ import annotations

import os
from collections.abc import Iterable
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from sparsepipe.errors import ConfigError

_Value = TypeVar("_Value")


def started_externally() -> bool:
    """Whether a launcher outside (``torchrun``, our own agent) made this process a rank."""
    return "LOCAL_RANK" in os.environ and "RANK" in os.environ and "WORLD_SIZE" in os.environ


def rank() -> int:
    """This process's rank; 0 where there is only one."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank()
    return int(os.environ.get("RANK", "0")) if started_externally() else 0


def world_size() -> int:
    """Number of ranks; 1 where there is only this process."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_world_size()
    return int(os.environ.get("WORLD_SIZE", "1")) if started_externally() else 1


def join(backend: str, *, timeout_s: float, device: torch.device | None = None) -> None:
    """Joins the group that the launcher's environment variables describe.

    Every collective afterwards ends within ``timeout_s`` or raises.
    """
    if dist.is_initialized():
        return
    dist.init_process_group(
        backend,
        timeout=timedelta(seconds=timeout_s),
        device_id=device if device is not None and device.type == "cuda" else None,
    )


def leave() -> None:
    """Leaves the group, if there is one."""
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()


def assert_world_size(expected: int) -> None:
    """Refuses to run with another number of ranks than the configuration says.

    Raises:
        ConfigError: the sizes differ.
    """
    actual = world_size()
    if actual != expected:
        raise ConfigError(
            f"the configuration is for {expected} ranks, {actual} were started",
            remedy=f"start {expected} ranks, or set parallel.devices (and parallel.num_nodes) "
            f"to make {actual}",
        )


def broadcast_object(value: _Value) -> _Value:
    """Rank 0's ``value``, on every rank."""
    if world_size() == 1:
        return value
    box = [value]
    dist.broadcast_object_list(box, src=0)
    return box[0]


def gather_objects(value: _Value) -> list[_Value]:
    """Every rank's ``value`` in rank order, on every rank."""
    if world_size() == 1:
        return [value]
    box: list[_Value | None] = [None] * world_size()
    dist.all_gather_object(box, value)
    return [item for item in box if item is not None]


def any_rank(flag: bool, *, device: torch.device | None = None) -> bool:
    """Whether ``flag`` is set on any rank; a collective of one number."""
    if world_size() == 1 or not dist.is_initialized():
        return flag
    value = torch.tensor([int(flag)], dtype=torch.int32, device=device)
    dist.all_reduce(value, op=dist.ReduceOp.MAX)
    return bool(value.item())


def average_(tensors: Iterable[Tensor]) -> None:
    """Replaces floating-point tensors by their mean over the ranks, in place, in one message."""
    if world_size() == 1 or not dist.is_initialized():
        return
    floats = [tensor for tensor in tensors if tensor.is_floating_point()]
    if not floats:
        return
    flat = torch.cat([tensor.detach().double().reshape(-1) for tensor in floats])
    dist.all_reduce(flat)
    flat /= world_size()
    offset = 0
    for tensor in floats:
        tensor.copy_(flat[offset : offset + tensor.numel()].view_as(tensor))
        offset += tensor.numel()
