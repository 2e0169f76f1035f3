"""Messages between stages that all ranks of a grid get: its first rank speaks to other stages."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from sparsepipe.runtime.failures.missing_ranks import collective
from sparsepipe.runtime.transport.messages import Kind, Message
from sparsepipe.runtime.transport.serialization import BLOCK_BYTES, encode, missing_bytes, parse

_WHAT = "handing a message on to all ranks of a grid"


class SharedMessages:
    """Hands messages, and the random state that follows from them, on to all ranks of a grid.

    They travel through the memory of the host.

    Args:
        group: of the grid's ranks.
        device: for tensors that are on a device at the first rank.
    """

    def __init__(self, group: dist.ProcessGroup, *, device: torch.device) -> None:
        self._group = group
        self._device = device
        self._on_host = dist.get_backend(group) == "gloo"
        self.leads = dist.get_rank(group) == 0

    def share(self, make: Callable[[], Message]) -> Message:
        """The message that the first rank makes, on every rank; a collective.

        Raises:
            ConfigError: on the first rank, the message cannot be sent.
            TransportError: a rank is gone or takes no part in time.
        """
        if not self.leads:
            return self._received()
        message = make()
        on_device = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        states = [torch.get_rng_state(), torch.cuda.get_rng_state() if on_device else None]
        random = Message(minibatch=message.minibatch, tree=states)
        packet = encode([(Kind.ACTIVATION, message), (Kind.REPLY, random)])
        parts = [*packet.blocks, *packet.host, *(each.cpu() for each in packet.device)]
        content = torch.cat(parts)
        self._broadcast(torch.tensor([content.numel()]))
        self._broadcast(content)
        return message

    def _received(self) -> Message:
        size = self._broadcast(torch.zeros(1, dtype=torch.int64))
        content = self._broadcast(torch.empty(int(size), dtype=torch.uint8))
        first, rest = content[:BLOCK_BYTES], content[BLOCK_BYTES:]
        second = missing_bytes(first) or 0
        header = parse([first, rest[:second]] if second else [first])
        start = second

        def take(where: str) -> list[Tensor]:
            nonlocal start
            found = []
            for spec in header.following(where):
                # Each tensor has memory of its own, as alignment and layers in place want it.
                found.append(rest[start : start + spec.size_bytes].clone())
                start += spec.size_bytes
            return found

        host, on_device = take("host"), [each.to(self._device) for each in take("device")]
        (_, message), (_, random) = header.assemble(host, on_device, device=self._device)
        of_host, of_device = random.tree
        torch.set_rng_state(of_host)
        if of_device is not None:
            torch.cuda.set_rng_state(of_device)
        return message

    def _broadcast(self, value: Tensor) -> Tensor:
        sent = value if self._on_host else value.to(self._device)
        with collective(_WHAT, self._group):
            dist.broadcast(sent, group=self._group, group_src=0)
        return sent.cpu()
