"""All channels of a rank: what its worker sends and receives."""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor

from sparsepipe.errors import ConfigError, SparsePipeError, TransportError
from sparsepipe.runtime.failures.missing_ranks import (
    REMEDY_GONE,
    REMEDY_LATE,
    collective,
    is_cut_off,
    new_group,
    rank_name,
    sign_roll,
)
from sparsepipe.runtime.safe_pickle import UnreadableMessage
from sparsepipe.runtime.transport import cuda
from sparsepipe.runtime.transport.channel import (
    BufferPool,
    Carrier,
    ChannelFailed,
    Ended,
    Incoming,
    Line,
    Outgoing,
    TensorChanged,
    Wire,
)
from sparsepipe.runtime.transport.serialization import (
    BLOCK_BYTES,
    Kind,
    Message,
    Route,
    Traffic,
    default_depth,
    encode,
    message_name,
    missing_bytes,
    parse,
    routes,
)
from sparsepipe.schedule import Plan

_Key = tuple[Kind, int]  # a kind and the rank at the other end
_HOST = torch.device("cpu")
_LOOK_S = 0.05  # how long a fault of one channel may go unnoticed while another one closes


class Network:
    """Sends and receives a rank's messages while its worker, whose thread calls it, computes.

    - A tensor that is sent must not change until it has left. Nothing is copied; if it was written
      to in the meantime, one of the next calls raises a ConfigError.
    - Received tensors lie in pooled buffers until :meth:`release` of their minibatch. Those that
      require a gradient are leaves. A tensor that is still referred to after that (by a view, a
      saved activation, a label) stays as it is: its buffer is not used again.

    No call waits for a peer longer than ``timeout_s``; each raises a TransportError at once when
    any of this rank's peers is gone, and at the limit when one does not answer. The process can
    then only end by :func:`sparsepipe.runtime.failures.rank_reports.exit_immediately`.

    Args:
        rank: this process's rank; every rank makes its network at the same time.
        device: where received tensors go, except those that the sender had on the host.
        direct: whether CUDA tensors go from device to device with NCCL, not through pinned memory.
        queue_depth: number of messages that a channel holds before its sender waits; None:
            :func:`default_depth`.
        ranks: the process group's rank for each rank of the plan; None: the same numbers.

    Attributes:
        sent: traffic of sent messages by kind.
        called: returns the name that errors use for a message's minibatch, given its number.
        pool: receive buffers.
    """

    def __init__(
        self,
        plan: Plan,
        rank: int,
        *,
        timeout_s: float,
        device: torch.device = _HOST,
        direct: bool = False,
        queue_depth: int | None = None,
        ranks: Sequence[int] | None = None,
    ) -> None:
        if direct:
            cuda.check_direct(device)
        self._device = device
        self._direct = direct
        self._timeout_s = timeout_s
        self.called: Callable[[int], str] = message_name
        self._name: Callable[[int], str] = rank_name
        if ranks is None:
            self._name = lambda rank: f"rank {rank} (stage {plan.stage_of(rank)})"
        self._rank = rank
        self._joint = plan.num_stages == 2
        self.pool = BufferPool()
        self._pinned = BufferPool(pinned=True)
        self._fault: ChannelFailed | None = None
        self._failed = False  # the fault has been raised
        self._closed = False
        self._out: dict[_Key, Outgoing] = {}
        self._in: dict[_Key, Incoming] = {}
        self._channels: list[Outgoing | Incoming] = []
        self._groups: list[dist.ProcessGroup] = []
        self._riders: dict[tuple[int, int], Message] = {}  # by rank and minibatch
        self._arrived: dict[_Key, deque[Message]] = defaultdict(deque)
        self._held: dict[int, list[Tensor]] = defaultdict(list)
        self.sent = {kind: Traffic() for kind in Kind}
        channels = routes(plan)
        of_plan = ranks or range(plan.num_ranks)
        placed = [Route(r.kind, of_plan[r.source], of_plan[r.target]) for r in channels]
        wires = [self._wire(route) for route in placed]
        for channel, route, wire in zip(channels, placed, wires, strict=True):
            if wire is None:
                continue
            usual = default_depth(plan, channel)
            if route.source == rank:  # all groups are made: from here on it cannot fail halfway
                depth = queue_depth or usual
                outgoing = Outgoing(route, wire, depth=depth, usual=usual, report=self._report)
                self._out[route.kind, route.target] = outgoing
                self._channels.append(outgoing)
            else:
                incoming = Incoming(route, wire, report=self._report)
                self._in[route.kind, route.source] = incoming
                self._channels.append(incoming)

    def send(self, kind: Kind, to_rank: int, message: Message, *, held_back: bool = False) -> None:
        """Begins to send a message; waits only while the channel's queue is full.

        With two stages, a batch travels with the activation of the same minibatch, which must be
        sent after it. With ``held_back``, the queue holds no more messages than by default. Raises
        a ConfigError if the message cannot be sent or an earlier one was written to.
        """
        if self._joint and kind is Kind.BATCH:
            self._riders[to_rank, message.minibatch] = message
            return
        messages = [(kind, message)]
        if self._joint and kind is Kind.ACTIVATION:
            rider = self._riders.pop((to_rank, message.minibatch), None)
            messages += [] if rider is None else [(Kind.BATCH, rider)]
        channel = self._out[kind, to_rank]
        packet = encode(messages)
        made = cuda.mark(self._device) if packet.device else None
        with self._waiting(kind, to_rank, message.minibatch, sending=True):
            channel.put(packet, made=made, held_back=held_back, limit_s=self._timeout_s)
        for i, (part, _) in enumerate(messages):
            traffic = self.sent[part]
            traffic.messages += 1
            traffic.payload_bytes += packet.payload_bytes[i]
            traffic.overhead_bytes += packet.overhead_bytes if i == 0 else 0

    def receive(self, kind: Kind, from_rank: int, *, minibatch: int) -> Message:
        """Waits for the next message of a kind from a rank, which must be about ``minibatch``."""
        arrived = self._arrived[kind, from_rank]
        carrying = Kind.ACTIVATION if self._joint and kind is Kind.BATCH else kind
        with self._waiting(kind, from_rank, minibatch, sending=False):
            while not arrived:
                arrival = self._in[carrying, from_rank].queue.get(limit_s=self._timeout_s)
                for tensor in arrival.device_tensors:
                    tensor.record_stream(torch.cuda.current_stream(self._device))
                self._held[arrival.messages[0][1].minibatch] += arrival.buffers
                for part, found in arrival.messages:
                    self._arrived[part, from_rank].append(found)
                arrival.messages = ()  # the channel's thread may still hold the arrival
        message = arrived.popleft()
        assert message.minibatch == minibatch, (
            f"expected the {kind.value} of minibatch {minibatch}, got that of {message.minibatch}"
        )
        return message

    def release(self, minibatch: int) -> None:
        """Frees the buffers of a minibatch, whose tensors the worker no longer needs."""
        for buffer in self._held.pop(minibatch, ()):
            self.pool.give_back(buffer)

    def close(self) -> None:
        """Ends every channel in order, after everything sent has been received.

        All ranks close at the same time; each waits for its peers. Does nothing if this network has
        raised a failure: its threads cannot be ended.
        """
        if self._closed or self._failed:
            return
        self._closed = True
        with self._raising_faults("was closing"):
            for outgoing in self._out.values():
                outgoing.queue.end()
            for incoming in self._in.values():
                incoming.queue.discard()
            deadline_s = time.monotonic() + self._timeout_s
            for channel in self._channels:
                while channel.thread.is_alive() and self._fault is None:
                    if time.monotonic() > deadline_s:
                        peer = channel.route.other(self._rank)
                        raise self._missing(
                            peer,
                            f"{self._name(peer)} did not end its connection to "
                            f"{self._name(self._rank)} within {self._timeout_s:g} s",
                            remedy="check whether that rank is stopped, hangs or runs more steps",
                        )
                    channel.thread.join(_LOOK_S)
                if self._fault is not None:
                    raise self._fault
        for connection in self._groups:
            dist.destroy_process_group(connection)
        unread = [c.route for c in self._in.values() if c.queue.discarded]
        assert not unread, f"closed before everything was received: {unread}"
        assert not self._riders, "closed before the activations of these batches were sent"
        # No reference is left: a forked loader worker crashes where it collects a group as garbage.
        for holders in (self._out, self._in, self._channels, self._groups):
            holders.clear()

    @property
    def blocked(self) -> bool:
        """Whether a channel's thread still runs; after a failure it may wait for ever."""
        return any(channel.thread.is_alive() for channel in self._channels)

    def _wire(self, route: Route) -> Wire | None:
        """Connects a channel of this rank, or returns None; all ranks call it in the same order."""
        ranks = [route.source, route.target]
        other = route.other(self._rank)
        limit_s = self._timeout_s
        gloo = new_group(ranks, backend="gloo", timeout_s=limit_s)
        nccl = new_group(ranks, backend="nccl", timeout_s=limit_s) if self._direct else None
        if self._rank not in ranks:
            return None
        self._groups += [gloo] if nccl is None else [gloo, nccl]
        carrier: Carrier | None = None
        if nccl is not None:
            carrier = direct = cuda.Direct(self._device, nccl=nccl, other=other)
            direct.connect(sending=self._rank == route.source)
        elif self._device.type == "cuda":
            carrier = cuda.HostStaged(self._device, pool=self._pinned)
        return Wire(Line(gloo, other), pool=self.pool, carrier=carrier, device=self._device)

    def _report(self, fault: ChannelFailed) -> None:
        """Makes the worker's waits raise ``fault``; called by a channel, mostly in its thread."""
        self._fault = self._fault or fault
        for channel in self._channels:
            channel.queue.fail(self._fault)

    @contextmanager
    def _waiting(self, kind: Kind, peer: int, minibatch: int, *, sending: bool) -> Iterator[None]:
        """Context of a wait for ``peer``; raises a TransportError if the wait fails."""
        what = f"the {kind.value} of {self.called(minibatch)}"
        who, me = self._name(peer), self._name(self._rank)
        with self._raising_faults(f"was {'sending' if sending else 'waiting for'} {what}"):
            try:
                yield
            except TimeoutError:
                text = f"{who} did not send {what} to {me}"
                if sending:
                    text = f"{who} took nothing from {me}, so {what} could not be sent"
                text = f"{text} within {self._timeout_s:g} s"
                raise self._missing(peer, text, remedy=REMEDY_LATE) from None
            except Ended:
                text = f"{who} ended before it sent {what} to {me}"
                remedy = "check whether every rank runs the same number of steps"
                raise self._missing(peer, text, remedy=remedy) from None

    def _missing(self, peer: int, text: str, *, remedy: str) -> TransportError:
        sign_roll()
        error = TransportError(text, remedy=remedy)
        error.ranks = (peer,)
        return error

    @contextmanager
    def _raising_faults(self, doing: str) -> Iterator[None]:
        """Context of what the worker is ``doing``; raises the error of a channel that fails."""
        try:
            if self._fault is not None:
                raise self._fault
            yield
        except ChannelFailed as fault:
            self._failed = True
            other, what = fault.route.other(self._rank), fault.route.kind.value
            me, peer = self._name(self._rank), self._name(other)
            which = "" if fault.minibatch is None else f" of {self.called(fault.minibatch)}"
            error: SparsePipeError
            if isinstance(fault.error, TensorChanged):
                error = ConfigError(  # caused by this rank's own code, and would recur
                    f"the {what}{which} for {peer} was written to before it was sent; noticed by "
                    f"{me} while it {doing}",
                    remedy="do not change in place what was returned or passed on; clone it first",
                )
            elif isinstance(fault.error, UnreadableMessage):
                error = ConfigError(
                    f"{me} cannot read the {what} from {peer}: {fault.error}; noticed while it "
                    f"{doing}",
                    remedy="run the same code on every rank, and import the classes of what is "
                    "sent where your script begins",
                )
            elif is_cut_off():
                text = f"{me} is cut off from all others; it {doing}"
                error = TransportError(text, remedy=REMEDY_GONE)
            else:
                during = f" during the {what}{which}" if which else ""
                text = f"{peer} is gone: its connection to {me}, which {doing}, broke{during}"
                error = self._missing(other, text, remedy=REMEDY_GONE)
            raise error from fault.error


class SharedMessages:
    """Passes messages, and torch's random state after making them, to all ranks of a grid.

    Only the grid's first rank communicates with other stages. Messages travel through host memory;
    tensors that were on a device go to ``device``.
    """

    def __init__(self, group: dist.ProcessGroup, *, device: torch.device) -> None:
        self._group = group
        self._device = device
        self._on_host = dist.get_backend(group) == "gloo"
        self.leads = dist.get_rank(group) == 0

    def share(self, make: Callable[[], Message]) -> Message:
        """Returns on every rank the message that the first one makes; a collective."""
        if self.leads:
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
        size = self._broadcast(torch.zeros(1, dtype=torch.int64))
        content = self._broadcast(torch.empty(int(size), dtype=torch.uint8))
        first, rest = content[:BLOCK_BYTES], content[BLOCK_BYTES:]
        second = missing_bytes(first) or 0
        header = parse([first, rest[:second]] if second else [first])
        host, device = header.following("host"), header.following("device")
        sizes = [spec.size_bytes for spec in (*host, *device)]
        # Each tensor gets memory of its own, for alignment and for layers that work in place.
        found = [part.clone() for part in rest[second:].split_with_sizes(sizes)]
        of_device = [each.to(self._device) for each in found[len(host) :]]
        parsed = header.assemble(found[: len(host)], of_device, device=self._device)
        (_, message), (_, random) = parsed
        host_state, device_state = random.tree
        torch.set_rng_state(host_state)
        if device_state is not None:
            torch.cuda.set_rng_state(device_state)
        return message

    def _broadcast(self, value: Tensor) -> Tensor:
        sent = value if self._on_host else value.to(self._device)
        with collective("passing a message to all ranks of a grid", self._group):
            dist.broadcast(sent, group=self._group, group_src=0)
        return sent.cpu()
