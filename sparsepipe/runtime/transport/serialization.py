"""Messages as packets of bytes and back, independent of connections.

A packet is one or more messages that travel together: a header, then the tensors that are too large
for it. The header describes every tensor, so that no shapes need be agreed on before, and holds the
rest, pickled, with numbers in place of tensors. Each tensor travels once: two sparse tensors on the
same sites share their coordinates at the other end too.
"""

from __future__ import annotations

import io
import math
import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from sparsepipe.errors import ConfigError
from sparsepipe.runtime import safe_pickle
from sparsepipe.runtime.safe_pickle import Unsendable
from sparsepipe.runtime.transport.messages import Kind, Message

BLOCK_BYTES = 4096
"""Size of a header's first block, which is all of it in nearly every message."""
INLINE_BYTES = 2048
"""Tensors on the host travel inside the header up to this sum: it saves a transfer each."""
LENGTH_BYTES = 8
_PREFIX_BYTES = LENGTH_BYTES + 1
"""The length, and how tensors come (:class:`.channel.TransferMode`)."""
_DTYPES = {str(each): each for each in vars(torch).values() if isinstance(each, torch.dtype)}
Messages = Sequence[tuple[Kind, Message]]


class TensorSpec(NamedTuple):
    """A tensor's layout, which the receiver needs before its bytes.

    Attributes:
        stride: in elements; a dense tensor keeps its layout (such as channels last), since the
            order of sums in kernels depends on it.
        requires_grad: as where it came from.
        where: "host" or "device", the memory it is to lie in; "meta" has no data.
        data: its bytes if they are in the header, else None: they follow.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    requires_grad: bool
    where: str
    data: bytes | None = None

    @property
    def size_bytes(self) -> int:
        """Bytes of the elements."""
        return math.prod(self.shape) * self.dtype.itemsize


def describe(
    tensor: Tensor, *, requires_grad: bool, inline_bytes: int
) -> tuple[TensorSpec, Tensor]:
    """A tensor as its spec and its bytes (uint8 [size_bytes]; no copy of dense tensors).

    A tensor on the host of at most ``inline_bytes`` has its bytes in the spec.

    Raises:
        Unsendable: not a plain strided tensor.
    """
    known = type(tensor) in (Tensor, torch.nn.Parameter)
    if not known or tensor.layout != torch.strided or tensor.is_quantized:
        raise Unsendable(
            f"a {type(tensor).__name__} of layout {tensor.layout}",
            remedy="hand on plain dense tensors: .as_subclass(torch.Tensor) or .to_dense()",
        )
    plain = tensor.detach().resolve_conj().resolve_neg()
    if not plain.is_contiguous():  # most are, and to look closer takes a while
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
    inline = flat.numel() == 0 or (where == "host" and flat.numel() <= inline_bytes)
    spec = TensorSpec(
        dtype=plain.dtype,
        shape=tuple(plain.shape),
        stride=plain.stride(),
        requires_grad=requires_grad,
        where=where,
        data=flat.cpu().numpy().tobytes() if inline else None,
    )
    return spec, flat


@dataclass(frozen=True, slots=True, kw_only=True)
class Packet:
    """Messages ready to be sent.

    Attributes:
        blocks: the header: uint8 [BLOCK_BYTES], and a second block if that is too short.
        host: tensors that follow, uint8 [their bytes].
        device: tensors that follow those, in a CUDA device's memory.
        originals: what the caller gave and was not copied (without its graph, which need not
            outlive the caller's use of it), with its version counter then.
        payload_bytes: of the tensors of each message; what two share counts for the first.
        overhead_bytes: the header's, without the tensors in it.
    """

    minibatch: int
    blocks: tuple[Tensor, ...]
    host: tuple[Tensor, ...]
    device: tuple[Tensor, ...]
    originals: tuple[tuple[Tensor, int], ...]
    payload_bytes: tuple[int, ...]
    overhead_bytes: int

    def changed(self) -> bool:
        """Whether one of the tensors was written to since it was handed over."""
        return any(tensor._version != version for tensor, version in self.originals)


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """A header as received: what follows, and how the messages are put together."""

    specs: tuple[TensorSpec, ...]
    pickled: tuple[bytes, ...]

    def following(self, where: str) -> list[TensorSpec]:
        """Tensors for "host" or "device" that come after the header, in their order."""
        return [spec for spec in self.specs if spec.data is None and spec.where == where]

    def assemble(
        self, host: Sequence[Tensor], on_device: Sequence[Tensor], *, device: torch.device
    ) -> Messages:
        """The messages; their tensors are made of the uint8 memory that is given for each tensor
        that follows, on host and device, without a copy.
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
    """Tensors of a tree that require a gradient, each once, in the tree's order.

    The list is the same, tensor for tensor, on the sending and on the receiving side: gradients go
    back as a list in this order, None for a missing one. Integers never require a gradient, so
    coordinates are not sent back.
    """
    leaves = [x for x in pytree.tree_leaves(tree) if isinstance(x, Tensor) and x.requires_grad]
    return list({id(leaf): leaf for leaf in leaves}.values())


def encode(messages: Messages) -> Packet:
    """Messages as a packet; runs in the caller's thread and on its CUDA stream.

    Tensors that are not dense are copied here, the others not at all. What requires a gradient in
    an activation or a batch does so at the other end; gradients and replies are plain values.

    Raises:
        ConfigError: a value that cannot be pickled, a tensor of an unusual kind, or one whose
            gradient would be dropped: inside an object that is not a pytree node, or in a batch, to
            which no gradients come back.
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
            what = f"what cannot be pickled ({error})"
            remedy = "hand on tensors and plain values, or classes defined at a module's top level"
        else:
            payload_bytes.append(table.size_bytes - before)
            continue
        raise ConfigError(
            f"the {kind.value} of minibatch {message.minibatch} holds {what}", remedy=remedy
        )
    # As plain tuples, which pickle without a call into Python, as classes do not.
    specs = tuple((str(dtype), *rest) for dtype, *rest in table.specs)
    header = pickle.dumps((specs, tuple(pickled)), protocol=5)
    whole = bytearray(len(header).to_bytes(LENGTH_BYTES, "little") + b"\0" + header)
    whole.extend(bytes(max(0, BLOCK_BYTES - len(whole))))
    flat = torch.frombuffer(whole, dtype=torch.uint8)
    blocks = (flat,) if len(whole) == BLOCK_BYTES else (flat[:BLOCK_BYTES], flat[BLOCK_BYTES:])
    return Packet(
        minibatch=messages[0][1].minibatch,
        blocks=blocks,
        host=table.following("host"),
        device=table.following("device"),
        originals=tuple(table.originals),
        payload_bytes=tuple(payload_bytes),
        overhead_bytes=sum(block.numel() for block in blocks) - table.inline_bytes,
    )


def end_block() -> Tensor:
    """A header that marks the end: no more packets follow."""
    return torch.zeros(BLOCK_BYTES, dtype=torch.uint8)


def missing_bytes(block: Tensor) -> int | None:
    """Length of the header's second block, 0 without one; None at the end."""
    length = int.from_bytes(block.numpy()[:LENGTH_BYTES].tobytes(), "little")
    return None if length == 0 else max(0, length - (BLOCK_BYTES - _PREFIX_BYTES))


def parse(blocks: Sequence[Tensor]) -> Header:
    whole = b"".join(block.numpy().data for block in blocks)
    specs, pickled = safe_pickle.read(memoryview(whole)[_PREFIX_BYTES:])
    found = tuple(TensorSpec(_DTYPES[dtype], *rest) for dtype, *rest in specs)
    return Header(specs=found, pickled=pickled)


class _TensorTable:
    """Tensors of a packet, each once, with sums of their bytes: all, and those in the header."""

    def __init__(self) -> None:
        self.specs: list[TensorSpec] = []
        self.originals: list[tuple[Tensor, int]] = []
        self.size_bytes = 0
        self.inline_bytes = 0
        self._flat: list[Tensor] = []
        self._index: dict[int, int] = {}
        self._alive: list[Tensor] = []  # an id is good as long as its object lives

    def index(self, tensor: Tensor, *, requires_grad: bool) -> int:
        """Number of a tensor, which is added if it is new."""
        if id(tensor) not in self._index:
            spec, flat = describe(
                tensor,
                requires_grad=requires_grad,
                inline_bytes=INLINE_BYTES - self.inline_bytes,
            )
            self._index[id(tensor)] = len(self.specs)
            self._alive.append(tensor)
            self.specs.append(spec)
            self._flat.append(flat)
            self.size_bytes += 0 if spec.where == "meta" else spec.size_bytes
            self.inline_bytes += len(spec.data or b"")
            # What was copied may change, and inference tensors have no version counter.
            copied = spec.data is not None or flat.data_ptr() != tensor.data_ptr()
            if not copied and not tensor.is_inference():
                # A detached tensor shares the counter.
                self.originals.append((tensor.detach(), tensor._version))
        return self._index[id(tensor)]

    def __contains__(self, tensor: Tensor) -> bool:
        return id(tensor) in self._index

    def following(self, where: str) -> tuple[Tensor, ...]:
        """Bytes of the tensors that follow the header."""
        pairs = zip(self.specs, self._flat, strict=True)
        return tuple(f for spec, f in pairs if spec.data is None and spec.where == where)


def _pickled(kind: Kind, message: Message, table: _TensorTable) -> bytes:
    """A message with numbers in place of its tensors."""
    differentiable = kind in (Kind.ACTIVATION, Kind.BATCH)
    for leaf in _leaves(message.tree):
        if isinstance(leaf, Tensor):
            if kind is Kind.BATCH and leaf.grad_fn is not None and leaf not in table:
                raise Unsendable(
                    "a tensor computed from parameters, to which no gradient would come back",
                    remedy="compute it within the layers, or from their result",
                )
            table.index(leaf, requires_grad=differentiable and leaf.requires_grad)

    def number(tensor: Tensor) -> int:
        if differentiable and tensor.requires_grad and tensor not in table:
            raise Unsendable(
                "a tensor that requires a gradient inside an object that is not a pytree node",
                remedy="hand on tuples, lists, dicts or sparse tensors, or register the class "
                "by torch.utils._pytree.register_pytree_node",
            )
        return table.index(tensor, requires_grad=False)

    file = io.BytesIO()
    content = kind.value, message.minibatch, dict(message.meta), message.tree
    safe_pickle.Pickler(file, number).dump(content)
    return file.getvalue()


def _leaves(tree: Any) -> list[Any]:
    """As ``pytree.tree_leaves``, which takes longer for lists, tuples and dicts."""
    kind = type(tree)
    if kind is dict or kind is list or kind is tuple:
        nodes = tree.values() if kind is dict else tree
        return [leaf for node in nodes for leaf in _leaves(node)]
    return [tree] if kind is Tensor else pytree.tree_leaves(tree)
