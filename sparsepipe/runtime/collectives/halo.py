"""Messages between ranks that share a sample: pieces of shards go to the ranks that need them.

Every rank calls the same exchanges in the same order; who sends what is decided elsewhere
(:mod:`sparsepipe.spatial.intervals`), so that both sides know every message in advance.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup as ProcessGroup  # noqa: PLC0414 - a type for other rooms

from sparsepipe.errors import ConfigError
from sparsepipe.runtime.failures.missing_ranks import collective


@dataclass(slots=True)
class Pending:
    """Messages or a sum under way, whose results :meth:`wait` returns.

    ``what``: their purpose, for errors; ``device``: where results go; ``sent``: tensors that must
    not change before :meth:`wait` has returned.
    """

    group: ProcessGroup | None
    what: str
    device: torch.device
    sent: list[Tensor]
    received: list[Tensor]
    works: list[dist.Work]

    def wait(self) -> list[Tensor]:
        """Waits for the received tensors, or the sum in a list; a TransportError on failure."""
        if self.works:
            with collective(self.what, self.group):
                for work in self.works:
                    work.wait()
            self.works.clear()
            self.sent.clear()
        self.received = [each.to(self.device, non_blocking=True) for each in self.received]
        return self.received


def start_messages(
    sends: Sequence[tuple[int, Tensor]],
    receives: Sequence[tuple[int, tuple[int, ...]]],
    *,
    like: Tensor,
    group: ProcessGroup | None,
    what: str,
) -> Pending:
    """Begins to send tensors to ranks of ``group`` and to receive some from them.

    Messages between two ranks arrive in the order in which they are given here. Empty tensors are
    not sent, since both sides know their shapes.

    Args:
        sends: ranks in the group, with the tensors for them.
        receives: ranks in the group, with the shapes of their tensors.
        like: a tensor with the dtype and the device of all messages.
        group: process group; None: all ranks.
        what: purpose of the messages, for errors.
    """
    staged = like.is_cuda and dist.get_backend(group) == "gloo"  # which sends from host memory only
    place: dict[str, Any] = {"device": "cpu", "pin_memory": True} if staged else {}
    sent = [
        torch.empty_like(tensor, memory_format=torch.contiguous_format, **place).copy_(tensor)
        if staged
        else tensor.contiguous()
        for _, tensor in sends
    ]
    received = [like.new_empty(shape, **place) for _, shape in receives]
    operations = [
        dist.P2POp(dist.isend, tensor, group=group, group_peer=peer)
        for (peer, _), tensor in zip(sends, sent, strict=True)
        if tensor.numel()
    ] + [
        dist.P2POp(dist.irecv, tensor, group=group, group_peer=peer)
        for (peer, _), tensor in zip(receives, received, strict=True)
        if tensor.numel()
    ]
    works: list[dist.Work] = []
    if operations:
        with collective(what, group):
            works = dist.batch_isend_irecv(operations)
    return Pending(group, what, like.device, sent, received, works)


def rank_and_size(group: ProcessGroup | None) -> tuple[int, int]:
    """This process's rank in ``group`` (None: the group of all ranks), and the group's size.

    Raises a ConfigError if there is no process group, or if this process is not in it.
    """
    if not dist.is_available() or not dist.is_initialized():
        raise ConfigError(
            "cannot cut a sample over ranks: no process group exists",
            remedy="call torch.distributed.init_process_group first",
        )
    if dist.get_rank(group) < 0:
        raise ConfigError(
            f"rank {dist.get_rank()} is not in the process group that shares the sample",
            remedy="give each rank the group that it belongs to",
        )
    return dist.get_rank(group), dist.get_world_size(group)


def add_up(value: Tensor, group: ProcessGroup | None, *, what: str) -> Tensor:
    """The sum of ``value`` over a group's ranks, in a new tensor; ``what``: purpose, for errors."""
    result = value.detach().clone(memory_format=torch.contiguous_format)
    with collective(what, group):
        dist.all_reduce(result, group=group)
    return result


def start_adding_up(value: Tensor, group: ProcessGroup | None, *, what: str) -> Pending:
    """Starts what :func:`add_up` does; :meth:`Pending.wait` returns the sum, in a list."""
    result = value.detach().clone(memory_format=torch.contiguous_format)
    with collective(what, group):
        work = dist.all_reduce(result, group=group, async_op=True)
    return Pending(group, what, result.device, [], [result], [work])


class _AddedUp(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, group: ProcessGroup | None, what: str) -> Tensor:
        ctx.group, ctx.what = group, what
        return add_up(value, group, what=f"adding up {what}")

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return add_up(gradient, ctx.group, what=f"adding up gradients of {ctx.what}"), None, None


def added_up(value: Tensor, group: ProcessGroup | None, *, what: str) -> Tensor:
    """Differentiable :func:`add_up`, whose backward adds up the ranks' gradients."""
    result: Tensor = _AddedUp.apply(value, group, what)  # type: ignore[no-untyped-call]
    return result


def gather_rows(value: Tensor, group: ProcessGroup | None, *, what: str) -> Tensor:
    """Stacks each rank's ``value``, of one shape, along a new first dimension in rank order."""
    own = value.detach().contiguous()
    theirs = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    with collective(what, group):
        dist.all_gather(theirs, own, group=group)
    return torch.stack(theirs)


def gather_numbers(
    numbers: Sequence[int], group: ProcessGroup | None, *, device: torch.device, what: str
) -> list[tuple[int, ...]]:
    """The ``numbers`` of each rank of a group, in rank order; all ranks give equally many."""
    place = torch.device("cpu") if dist.get_backend(group) == "gloo" else device
    own = torch.tensor(numbers, dtype=torch.int64, device=place)
    return [tuple(each.tolist()) for each in gather_rows(own, group, what=what)]
