"""A module that is spread over ranks, put together on one of them or on all."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from sparsepipe.runtime import group
from sparsepipe.runtime.meeting import meeting, new_group


def collect(value: Any) -> list[Any]:
    """Every rank's ``value`` in rank order, on rank 0; nothing on the others."""
    if group.world_size() == 1:
        return [value]
    found: list[Any] | None = [None] * group.world_size() if group.rank() == 0 else None
    with meeting("putting the stages' states together", group.hosts()):
        dist.gather_object(value, found, dst=0, group=group.hosts())
    return found or []


@torch.no_grad()
def spread_(tensors: Iterable[Tensor], *, source: int) -> None:
    """Overwrites tensors by those of a rank; all ranks give as many, of the same shapes."""
    if group.world_size() == 1:
        return
    with meeting("spreading the module's tensors", group.hosts()):
        for tensor in tensors:
            if not tensor.numel():
                continue
            host = tensor.detach().cpu().contiguous()
            dist.broadcast(host, src=source, group=group.hosts())
            if group.rank() != source:
                tensor.copy_(host)


def stage_group(stages: Iterable[Iterable[int]], *, backend: str, timeout_s: float) -> Any:
    """A group for each stage of several ranks; every rank must call it.

    Args:
        stages: ranks of each stage.
        backend: of the groups.
        timeout_s: limit of each group's making, and of each of its collectives.

    Returns:
        This rank's; None where its stage has no replicas.

    Raises:
        TransportError: a rank did not come within ``timeout_s``.
    """
    mine = None
    for ranks in map(list, stages):
        if len(ranks) > 1:
            made = new_group(ranks, backend=backend, timeout_s=timeout_s)
            mine = made if group.rank() in ranks else mine
    return mine


def dissolve(made: Any) -> None:
    """Ends a group of :func:`stage_group`."""
    if made is not None and dist.is_initialized():
        dist.destroy_process_group(made)
