"""Moves tensors on a CUDA device between ranks: through host memory, or with NCCL.

Both carriers run in a channel's thread on a stream of their own and wait there for the
device, which costs the worker nothing. Three rules make this correct:

- what the worker's stream computes is read only after an event that the worker recorded;
- a tensor or pinned buffer is freed only after its copy is known to have ended;
- to the allocator, a received tensor belongs to the carrier's stream, so the worker
  registers its own (``record_stream``) when it takes the tensor.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from sparsepipe.errors import ConfigError
from sparsepipe.runtime.collectives import process_group
from sparsepipe.runtime.transport.channel import BufferPool, Line, finish
from sparsepipe.runtime.transport.serialization import TensorSpec


def mark(device: torch.device) -> torch.cuda.Event:
    """Records an event on the current stream, after all that the worker's thread has launched."""
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(device))
    return event


def check_direct(device: torch.device) -> None:
    """Raises a ConfigError unless each rank has its own CUDA device, for NCCL; a collective."""
    if device.type != "cuda":
        raise ConfigError(
            f"direct=true needs CUDA devices, but this rank is on {device.type}",
            remedy="set direct=false, or train on CUDA devices",
        )
    places = process_group.gather_objects((socket.gethostname(), torch.device(device).index))
    if len(set(places)) < len(places):
        raise ConfigError(
            "direct=true needs a device for each rank, but some share one: their hosts and devices "
            f"are {places}",
            remedy="set direct=false, or give every rank a device of its own",
        )


@dataclass(eq=False)
class _OnDevice:
    """A CUDA device, and a stream on it other than the worker's."""

    device: torch.device

    def __post_init__(self) -> None:
        self._stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]

    @contextmanager
    def _beside(self, made: torch.cuda.Event | None = None) -> Iterator[None]:
        with torch.cuda.device(self.device), torch.cuda.stream(self._stream):
            if made is not None:
                self._stream.wait_event(made)
            yield
            self._stream.synchronize()


@dataclass(eq=False, kw_only=True)
class HostStaged(_OnDevice):
    """Carries tensors through pinned host memory and gloo, safe alongside other communication."""

    pool: BufferPool

    def send(self, line: Line, tensors: Sequence[Tensor], made: torch.cuda.Event) -> None:
        buffers = [self.pool.take(flat.numel()) for flat in tensors]
        works = []
        for buffer, flat in zip(buffers, tensors, strict=True):
            host = buffer[: flat.numel()]
            with self._beside(made):
                host.copy_(flat, non_blocking=True)
            works.append(line.send(host))  # while the next one is copied
        finish(works)
        for buffer in buffers:
            self.pool.give_back(buffer)

    def receive(self, line: Line, specs: Sequence[TensorSpec]) -> list[Tensor]:
        buffers = [self.pool.take(spec.size_bytes) for spec in specs]
        staged = [b[: spec.size_bytes] for b, spec in zip(buffers, specs, strict=True)]
        works = [line.receive(host) for host in staged]
        received = []
        for work, host in zip(works, staged, strict=True):
            finish([work])
            with self._beside():
                received.append(host.to(self.device, non_blocking=True))
        for buffer in buffers:
            self.pool.give_back(buffer)
        return received


@dataclass(eq=False, kw_only=True)
class Direct(_OnDevice):
    """Carries tensors from device to device with NCCL, in a group used for this direction only.

    The header has already gone through gloo when a transfer begins, so the receiver is about to
    call recv, and no kernel of NCCL waits on the device for a rank that is still computing.

    Args:
        device: a CUDA device that no other rank uses.
        nccl: NCCL group of the two ranks.
        other: number of the other rank among all ranks.
    """

    nccl: dist.ProcessGroup
    other: int

    def connect(self, *, sending: bool) -> None:
        """Makes NCCL connect; to be called in the worker's thread, in the same order on all ranks.

        Channels' threads that connected at the first transfer could wait for each other for ever.
        """
        word = torch.zeros(1, dtype=torch.uint8, device=self.device)
        with self._beside(mark(self.device)):
            if sending:
                dist.send(word, dst=self.other, group=self.nccl)
            else:
                dist.recv(word, src=self.other, group=self.nccl)

    def send(self, line: Line, tensors: Sequence[Tensor], made: torch.cuda.Event) -> None:
        with self._beside(made):
            for flat in tensors:
                dist.send(flat, dst=self.other, group=self.nccl)

    def receive(self, line: Line, specs: Sequence[TensorSpec]) -> list[Tensor]:
        with self._beside():
            received = [
                torch.empty(spec.size_bytes, dtype=torch.uint8, device=self.device)
                for spec in specs
            ]
            for flat in received:
                dist.recv(flat, src=self.other, group=self.nccl)
        return received
