"""Messages between stages, and their encoding as packets of bytes; independent of connections.

A packet is one or more messages that travel together: a header, then the tensors that are too large
for it. The header describes every tensor, so that no shapes need to be agreed on beforehand, and
holds the rest, pickled, with indices in place of tensors. Each tensor travels once: two sparse
tensors on the same sites share their coordinates at the other end too.
"""

from __future__ import annotations

import io
import math
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from sparsepipe.errors import ConfigError
from sparsepipe.runtime import safe_pickle
from sparsepipe.runtime.safe_pickle import Unsendable
from sparsepipe.schedule import Plan


class Kind(Enum):
    """The kind of a message; the value is its name in error messages."""

    ACTIVATION = "activation"
    """Downstream, to the next stage: its input."""
    GRADIENT = "gradient"
    """Upstream, to the previous stage: gradients of what it sent."""
    BATCH = "batch"
    """From stage 0 straight to the last stage: what the step needs besides the layers' output."""
    REPLY = "reply"
    """From the last stage straight to stage 0: in evaluation, the result for a batch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """A message about one minibatch or microbatch: tensors and a few values.

    Attributes:
        meta: small plain Python values (versions, losses, logged values), by name.
        tree: a pytree of tensors and plain values, in any nesting. Other objects (a dataclass, for
            example) are pickled, but their tensors are sent separately.
    """

    minibatch: int
    meta: Mapping[str, Any] = field(default_factory=dict)
    tree: Any = None


def message_name(number: int, *, parts: int | None = None) -> str:
    """Name, in errors, of minibatch ``number`` or, with ``parts`` per minibatch, a microbatch."""
    if parts is None:
        return f"minibatch {number}"
    return f"microbatch {number % parts} of minibatch {number // parts}"


@dataclass(slots=True, kw_only=True)
class Traffic:
    """Counts of the messages of one kind that were sent.

    Attributes:
        messages: number of messages; a batch that travels with an activation counts separately.
        payload_bytes: bytes of the tensors, each counted once.
        overhead_bytes: bytes of the headers with their padding, without framing by gloo and TCP.
            The header that an activation and a batch share counts for the activation.
    """

    messages: int = 0
    payload_bytes: int = 0
    overhead_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Route:
    """One channel: messages of one kind from one rank to another."""

    kind: Kind
    source: int
    target: int

    def other(self, rank: int) -> int:
        """The rank at the other end of the channel."""
        return self.target if rank == self.source else self.source


def routes(plan: Plan) -> tuple[Route, ...]:
    """All channels of a plan, in the order in which every rank must make their groups."""
    found: list[Route] = []
    for stage in range(plan.num_stages - 1):
        for upper, lower in plan.peers(stage, stage + 1):
            found.append(Route(Kind.ACTIVATION, upper, lower))
            found.append(Route(Kind.GRADIENT, lower, upper))
    if plan.num_stages > 1:
        for first, last in plan.peers(0, plan.num_stages - 1):
            found.append(Route(Kind.REPLY, last, first))
            if plan.num_stages > 2:  # else it goes the same way as the activation, in one message
                found.append(Route(Kind.BATCH, first, last))
    return tuple(found)


def default_depth(plan: Plan, route: Route) -> int:
    """Default number of messages that a channel holds before its sender waits.

    In the asynchronous schedule a stage has at most warm-up + 1 minibatches in flight, so that in
    training a send never waits for another stage. In evaluation, which has no gradients to wait
    for, the depth holds a fast stage back.
    """
    upper = min(plan.stage_of(route.source), plan.stage_of(route.target))
    return plan.warmup(upper) + 1


BLOCK_BYTES = 4096
"""Size of a header's first block, which is the whole header of nearly every message."""
INLINE_BYTES = 2048
"""Largest sum of bytes of host tensors that travel in the header, which saves their transfers."""
LENGTH_BYTES = 8
_PREFIX_BYTES = LENGTH_BYTES + 1
"""Bytes of the header's length and of its :class:`.channel.TransferMode`."""
_DTYPES = {str(each): each for each in vars(torch).values() if isinstance(each, torch.dtype)}
Messages = Sequence[tuple[Kind, Message]]


class TensorSpec(NamedTuple):
    """A tensor's layout, which the receiver needs before its bytes.

    Attributes:
        stride: in elements; a dense tensor keeps its layout (such as channels last), since the
            order of sums in kernels depends on it.
        requires_grad: whether the received tensor requires a gradient.
        where: memory for the received tensor: "host" or "device", or "meta", without data.
        data: its bytes if they are in the header; None: they follow.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    requires_grad: bool
    where: str
    data: bytes | None = None

    @property
    def size_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True, kw_only=True)
class Packet:
    """Messages ready to be sent.

    Attributes:
        blocks: the header: uint8 [BLOCK_BYTES], and a second block if that is too short.
        host: tensors on the host that follow, as uint8 [number of bytes].
        device: tensors on a CUDA device that follow those, likewise.
        originals: tensors that were not copied, without their graph, with their version counters
            when they were encoded.
        payload_bytes: bytes of each message's tensors; shared ones count for the first message.
        overhead_bytes: bytes of the header, without the tensors in it.
    """

    minibatch: int
    blocks: tuple[Tensor, ...]
    host: tuple[Tensor, ...]
    device: tuple[Tensor, ...]
    originals: tuple[tuple[Tensor, int], ...]
    payload_bytes: tuple[int, ...]
    overhead_bytes: int

    def changed(self) -> bool:
        """Whether one of the tensors was written to since it was encoded."""
        return any(tensor._version != version for tensor, version in self.originals)


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """A received header: specs of the packet's tensors, and its messages, pickled."""

    specs: tuple[TensorSpec, ...]
    pickled: tuple[bytes, ...]

    def following(self, where: str) -> list[TensorSpec]:
        """Specs of the tensors for "host" or "device" that follow the header, in their order."""
        return [spec for spec in self.specs if spec.data is None and spec.where == where]

    def assemble(
        self, host: Sequence[Tensor], on_device: Sequence[Tensor], *, device: torch.device
    ) -> Messages:
        """Returns the messages. ``host`` and ``on_device``: uint8 memory of the tensors that
        follow, which is not copied; ``device``: for empty device tensors, which do not follow.
        """
        followed = {"host": iter(host), "device": iter(on_device)}
        tensors = []
        for spec in self.specs:
            if spec.where == "meta":
                tensor = torch.empty_strided(
                    spec.shape, spec.stride, dtype=spec.dtype, device="meta"
                )
            else:
                if spec.data is None:
                    storage = next(followed[spec.where])
                else:  # one more byte, since torch makes no tensor of an empty buffer
                    storage = torch.frombuffer(bytearray(spec.data + b"\0"), dtype=torch.uint8)
                    storage = storage.to(device) if spec.where == "device" else storage
                tensor = torch.empty(0, dtype=spec.dtype, device=storage.device)
                tensor.set_(storage.untyped_storage(), 0, spec.shape, spec.stride)
            tensors.append(tensor.requires_grad_(spec.requires_grad))
        messages = []
        for data in self.pickled:
            kind, minibatch, meta, tree = safe_pickle.read(data, tensors)
            messages.append((Kind(kind), Message(minibatch=minibatch, meta=meta, tree=tree)))
        return messages


def differentiable(tree: Any) -> list[Tensor]:
    """Distinct tensors of a tree that require a gradient, in the tree's order.

    The order is the same at the sending and the receiving end: gradients go back as a list in this
    order, None for a missing one. Integers, such as coordinates, never require one.
    """
    leaves = [x for x in pytree.tree_leaves(tree) if isinstance(x, Tensor) and x.requires_grad]
    return list({id(leaf): leaf for leaf in leaves}.values())


def encode(messages: Messages) -> Packet:
    """Encodes messages as a packet, in the caller's thread and on its CUDA stream.

    Copies only small tensors and those that are not dense. Tensors of activations and batches that
    require a gradient also do so at the other end; those of gradients and replies do not. Raises a
    ConfigError for a value that cannot be sent, or whose gradient would be lost.
    """
    table = _TensorTable()
    pickled, payload_bytes = [], []
    for kind, message in messages:
        before = table.size_bytes
        try:
            pickled.append(_pickled(kind, message, table))
        except Unsendable as error:
            what, remedy = error.what, error.remedy
        except (pickle.PicklingError, TypeError, AttributeError, RecursionError) as error:
            what = f"a value that cannot be pickled ({error})"
            remedy = "pass tensors and plain values, or classes defined at a module's top level"
        else:
            payload_bytes.append(table.size_bytes - before)
            continue
        raise ConfigError(
            f"the {kind.value} of minibatch {message.minibatch} holds {what}", remedy=remedy
        )
    # As plain tuples, which are pickled without calls into Python.
    specs = tuple((str(dtype), *rest) for dtype, *rest in table.specs)
    header = pickle.dumps((specs, tuple(pickled)), protocol=5)
    whole = bytearray(len(header).to_bytes(LENGTH_BYTES, "little") + b"\0" + header)
    whole.extend(bytes(max(0, BLOCK_BYTES - len(whole))))
    flat = torch.frombuffer(whole, dtype=torch.uint8)
    blocks = (flat,) if len(whole) == BLOCK_BYTES else (flat[:BLOCK_BYTES], flat[BLOCK_BYTES:])
    following = [
        (spec.where, flat)
        for spec, flat in zip(table.specs, table.flat, strict=True)
        if spec.data is None
    ]
    return Packet(
        minibatch=messages[0][1].minibatch,
        blocks=blocks,
        host=tuple(flat for where, flat in following if where == "host"),
        device=tuple(flat for where, flat in following if where == "device"),
        originals=tuple(table.originals),
        payload_bytes=tuple(payload_bytes),
        overhead_bytes=sum(block.numel() for block in blocks) - table.inline_bytes,
    )


def missing_bytes(block: Tensor) -> int | None:
    """Size of the header's second block, given the first; 0: no second; None: the sender ended."""
    length = int.from_bytes(block.numpy()[:LENGTH_BYTES].tobytes(), "little")
    return None if length == 0 else max(0, length - (BLOCK_BYTES - _PREFIX_BYTES))


def parse(blocks: Sequence[Tensor]) -> Header:
    whole = b"".join(block.numpy().data for block in blocks)
    specs, pickled = safe_pickle.read(memoryview(whole)[_PREFIX_BYTES:])
    found = tuple(TensorSpec(_DTYPES[dtype], *rest) for dtype, *rest in specs)
    return Header(specs=found, pickled=pickled)


@dataclass(slots=True)
class _TensorTable:
    """Distinct tensors of a packet, with the sums of all their bytes and of those in the header."""

    specs: list[TensorSpec] = field(default_factory=list)
    flat: list[Tensor] = field(default_factory=list)
    originals: list[tuple[Tensor, int]] = field(default_factory=list)
    size_bytes: int = 0
    inline_bytes: int = 0
    index: dict[int, int] = field(default_factory=dict)
    _alive: list[Tensor] = field(default_factory=list)  # an id is valid as long as its object lives

    def number(self, tensor: Tensor, *, requires_grad: bool) -> int:
        """Returns a tensor's index; adds a new one, whose bytes are not copied if it is dense."""
        if id(tensor) in self.index:
            return self.index[id(tensor)]
        known = type(tensor) in (Tensor, torch.nn.Parameter)
        if not known or tensor.layout != torch.strided or tensor.is_quantized:
            raise Unsendable(
                f"a {type(tensor).__name__} of layout {tensor.layout} and dtype {tensor.dtype}",
                remedy="pass plain dense tensors, not quantized ones: "
                ".as_subclass(torch.Tensor), .to_dense() or .dequantize()",
            )
        plain = tensor.detach().resolve_conj().resolve_neg()
        if not plain.is_contiguous():  # most are, and a closer look takes time
            order = sorted(range(plain.dim()), key=plain.stride, reverse=True)
            if not plain.permute(order).is_contiguous():
                plain = plain.contiguous()
        where = {"cpu": "host", "meta": "meta"}.get(plain.device.type, "device")
        if plain.is_meta:
            flat = torch.empty(0, dtype=torch.uint8)
        else:
            flat = torch.empty(0, dtype=torch.uint8, device=plain.device)
            start, size = plain.storage_offset() * plain.element_size(), plain.nbytes
            flat.set_(plain.untyped_storage(), start, (size,), (1,))
        room = INLINE_BYTES - self.inline_bytes
        inline = flat.numel() == 0 or (where == "host" and flat.numel() <= room)
        data = flat.cpu().numpy().tobytes() if inline else None
        shape, stride = tuple(plain.shape), plain.stride()
        self.index[id(tensor)] = len(self.specs)
        self._alive.append(tensor)
        self.specs.append(TensorSpec(plain.dtype, shape, stride, requires_grad, where, data))
        self.flat.append(flat)
        self.size_bytes += flat.numel()
        self.inline_bytes += len(data or b"")
        # What was copied may change, and inference tensors have no version counter.
        if data is None and flat.data_ptr() == tensor.data_ptr() and not tensor.is_inference():
            # A detached tensor shares the counter.
            self.originals.append((tensor.detach(), tensor._version))
        return self.index[id(tensor)]


def _pickled(kind: Kind, message: Message, table: _TensorTable) -> bytes:
    """A message, pickled with indices in place of its tensors, which are added to ``table``."""
    differentiable = kind in (Kind.ACTIVATION, Kind.BATCH)
    for leaf in _leaves(message.tree):
        if isinstance(leaf, Tensor):
            if kind is Kind.BATCH and leaf.grad_fn is not None and id(leaf) not in table.index:
                raise Unsendable(
                    "a tensor computed from parameters, to which no gradient would come back",
                    remedy="compute it within the layers, or from their result",
                )
            table.number(leaf, requires_grad=differentiable and leaf.requires_grad)

    def number(tensor: Tensor) -> int:
        if differentiable and tensor.requires_grad and id(tensor) not in table.index:
            raise Unsendable(
                "a tensor that requires a gradient inside an object that is not a pytree node",
                remedy="pass tuples, lists, dicts or sparse tensors, or register the class "
                "with torch.utils._pytree.register_pytree_node",
            )
        return table.number(tensor, requires_grad=False)

    file = io.BytesIO()
    content = kind.value, message.minibatch, dict(message.meta), message.tree
    pickler = safe_pickle.Pickler(file, protocol=5)
    pickler.number = number
    pickler.dump(content)
    return file.getvalue()


def _leaves(tree: Any) -> list[Any]:
    """Does what ``pytree.tree_leaves`` does, but faster for lists, tuples and dicts."""
    kind = type(tree)
    if kind is dict or kind is list or kind is tuple:
        nodes = tree.values() if kind is dict else tree
        return [leaf for node in nodes for leaf in _leaves(node)]
    return [tree] if kind is Tensor else pytree.tree_leaves(tree)
