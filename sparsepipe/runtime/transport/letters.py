"""Messages without their tensors, as bytes and back: numbers stand for tensors."""

from __future__ import annotations

import io
import pickle
from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree

from sparsepipe.runtime.transport.message import Kind, Message
from sparsepipe.runtime.transport.tensors import TensorSpec, Unsendable, describe

INLINE_BYTES = 2048
"""Tensors on the host travel inside the header up to this sum: it saves a transfer each."""


class TensorTable:
    """Tensors of a packet, each once.

    Attributes:
        specs: what the receiver must know of each.
        originals: those that were not copied, as :class:`.codec.Packet` has them.
        size_bytes: of all that have data.
        inline_bytes: of those whose bytes are in their specs.
    """

    def __init__(self) -> None:
        self.specs: list[TensorSpec] = []
        self.originals: list[tuple[Tensor, int]] = []
        self.size_bytes = 0
        self.inline_bytes = 0
        self._flat: list[Tensor] = []
        self._index: dict[int, int] = {}
        self._alive: list[Tensor] = []  # an id is good as long as its object lives

    def index(self, tensor: Tensor, *, wants_gradient: bool) -> int:
        """Number of a tensor, which is added if it is new."""
        if id(tensor) not in self._index:
            spec, flat = describe(
                tensor,
                wants_gradient=wants_gradient,
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


def write(kind: Kind, message: Message, table: TensorTable) -> bytes:
    """A message without its tensors, of which it has the numbers.

    A tree of plain containers is pickled as it is. In another one numbers stand for the leaves, so
    that of its nodes goes what they flatten to: no caches. A class that is registered as a node
    must therefore take anything as a leaf while it is flattened and put together, and be picklable.

    Raises:
        Unsendable: a tensor that is no plain one, or whose gradient would be lost.
    """
    leaves: list[Any] = []
    plain = _add_leaves_of_plain(message.tree, leaves)
    if not plain:
        leaves = pytree.tree_leaves(message.tree)
    differentiable = kind in (Kind.ACTIVATION, Kind.BATCH)
    for leaf in leaves:
        if not isinstance(leaf, Tensor):
            continue
        if kind is Kind.BATCH and leaf.grad_fn is not None and leaf not in table:
            raise Unsendable(
                "a tensor computed from parameters, to which no gradient would come back",
                remedy="compute it within the layers, or from their result",
            )
        table.index(leaf, wants_gradient=differentiable and leaf.requires_grad)
    content: tuple[Any, ...] = kind.value, message.minibatch, dict(message.meta)
    if plain:
        content = *content, message.tree, None
    else:
        numbers = iter(range(len(leaves)))
        content = *content, pytree.tree_map(lambda _: next(numbers), message.tree), leaves
    file = io.BytesIO()
    _Pickler(file, table, differentiable=differentiable).dump(content)
    return file.getvalue()


def read(letter: bytes, tensors: Sequence[Tensor]) -> tuple[Kind, Message]:
    """The message that was written, with the tensors of its packet."""
    kind, minibatch, meta, tree, leaves = _Unpickler(io.BytesIO(letter), tensors).load()
    if leaves is not None:
        tree = pytree.tree_map(leaves.__getitem__, tree)
    return Kind(kind), Message(minibatch=minibatch, meta=meta, tree=tree)


class _Pickler(pickle.Pickler):
    """Puts numbers for tensors, wherever in an object they are."""

    def __init__(self, file: io.BytesIO, table: TensorTable, *, differentiable: bool) -> None:
        super().__init__(file, protocol=5)
        self._table = table
        self._differentiable = differentiable

    def persistent_id(self, value: object) -> int | None:
        if not isinstance(value, Tensor):
            return None
        if self._differentiable and value.requires_grad and value not in self._table:
            raise Unsendable(
                "a tensor that requires a gradient inside of what is no pytree node",
                remedy="hand on tuples, lists, dicts or sparse tensors, or register the class "
                "by torch.utils._pytree.register_pytree_node",
            )
        return self._table.index(value, wants_gradient=False)


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, tensors: Sequence[Tensor]) -> None:
        super().__init__(file)
        self._tensors = tensors

    def persistent_load(self, number: int) -> Tensor:
        return self._tensors[number]


def _add_leaves_of_plain(tree: Any, leaves: list[Any]) -> bool:
    """Whether a tree's nodes are lists, tuples and dicts, and no subclasses.

    Only then all of its leaves are added, in pytree's order.
    """
    kind = type(tree)
    if kind is dict:
        return all(_add_leaves_of_plain(each, leaves) for each in tree.values())
    if kind is list or kind is tuple:
        return all(_add_leaves_of_plain(each, leaves) for each in tree)
    if not pytree.tree_is_leaf(tree):
        return False
    leaves.append(tree)
    return True
