"""Messages as packets of bytes and back. Knows tensors and pickle, nothing of wires.

A packet is one or more messages that travel together: a header, then the tensors that
are too large for it. The header describes every tensor, so that nothing about shapes need
be agreed on before, and holds what is no tensor, pickled. Each tensor travels once: two
sparse tensors on the same sites share their coordinates at the other end too.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from sparsepipe.errors import ConfigError
from sparsepipe.runtime.transport.alike import How
from sparsepipe.runtime.transport.letters import TensorTable, read, write
from sparsepipe.runtime.transport.message import Kind, Message
from sparsepipe.runtime.transport.tensors import TensorSpec, Unsendable, materialise

BLOCK_BYTES = 4096
"""Size of a header's first block, which is all of it in nearly every message."""

_LENGTH_BYTES = 8
_PREFIX_BYTES = _LENGTH_BYTES + 1
"""The length, and :class:`How` tensors come."""
Letters = Sequence[tuple[Kind, Message]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Packet:
    """Messages ready to be sent.

    Attributes:
        minibatch: which it belongs to: all its messages are of one.
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
        """Whether somebody wrote to one of the tensors since they were handed over."""
        return any(tensor._version != version for tensor, version in self.originals)


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """A header as received: what follows, and how the messages are put together."""

    specs: tuple[TensorSpec, ...]
    letters: tuple[bytes, ...]

    def following(self, where: str) -> list[TensorSpec]:
        """Tensors for "host" or "device" that come after the header, in their order."""
        return [spec for spec in self.specs if spec.data is None and spec.where == where]

    def assemble(
        self, host: Sequence[Tensor], on_device: Sequence[Tensor], *, device: torch.device
    ) -> Letters:
        """The messages.

        Args:
            host: for each that follows for the host, uint8 memory that holds its bytes.
            on_device: the same for the device.
            device: which that is.
        """
        followed = {"host": iter(host), "device": iter(on_device)}
        tensors = []
        for spec in self.specs:
            storage = next(followed[spec.where]) if spec.data is None else None
            tensors.append(materialise(spec, storage, device=device))
        return [read(letter, tensors) for letter in self.letters]


def differentiable(tree: Any) -> list[Tensor]:
    """Tensors of a tree that require a gradient, each once, in the tree's order.

    The list is the same, tensor for tensor, on the sending and on the receiving side:
    gradients go back as a list in this order, None where there is none. Integers never
    require a gradient, so coordinates are not sent back.
    """
    leaves = pytree.tree_leaves(tree)
    wanting = [x for x in leaves if isinstance(x, Tensor) and x.requires_grad]
    return list({id(leaf): leaf for leaf in wanting}.values())


def encode(mail: Letters) -> Packet:
    """Messages as a packet; runs in the caller's thread and on its CUDA stream.

    Tensors that are not dense are copied here, the others not at all. What requires a
    gradient in an activation or a batch does so at the other end; gradients and replies
    are plain values.

    Raises:
        ConfigError: a value that cannot be pickled, a tensor that is no plain one, or
            one whose gradient would be lost: inside of something that is no pytree node, or
            in a batch, to which no gradients come back.
    """
    table = TensorTable()
    letters, payload_bytes = [], []
    for kind, message in mail:
        before = table.size_bytes
        try:
            letters.append(write(kind, message, table))
        except Unsendable as error:
            raise _refusal(kind, message, error.what, error.remedy) from None
        except (pickle.PicklingError, TypeError, AttributeError, RecursionError) as error:
            remedy = (
                "hand on tensors and plain values, or classes defined at a module's top level, of "
                "which those registered as pytree nodes take anything as a leaf"
            )
            raise _refusal(kind, message, f"what cannot be pickled ({error})", remedy) from None
        payload_bytes.append(table.size_bytes - before)
    # As plain tuples, which pickle without a call into Python, as classes do not.
    blocks = _blocks(pickle.dumps((tuple(map(tuple, table.specs)), tuple(letters)), protocol=5))
    return Packet(
        minibatch=mail[0][1].minibatch,
        blocks=blocks,
        host=table.following("host"),
        device=table.following("device"),
        originals=tuple(table.originals),
        payload_bytes=tuple(payload_bytes),
        overhead_bytes=sum(block.numel() for block in blocks) - table.inline_bytes,
    )


def end_block() -> Tensor:
    """A header that says: no more packets will come."""
    return torch.zeros(BLOCK_BYTES, dtype=torch.uint8)


def missing_bytes(block: Tensor) -> int | None:
    """Length of the header's second block, 0 where there is none; None at the end."""
    length = int.from_bytes(block.numpy()[:_LENGTH_BYTES].tobytes(), "little")
    return None if length == 0 else max(0, length - (BLOCK_BYTES - _PREFIX_BYTES))


def say_how(block: Tensor, how: How) -> None:
    """Writes into a header's first block how tensors come."""
    block.numpy()[_LENGTH_BYTES] = how.awaited + 2 * how.again


def how_it_comes(block: Tensor) -> How:
    """What :func:`say_how` has written."""
    word = int(block.numpy()[_LENGTH_BYTES])
    return How(awaited=bool(word & 1), again=bool(word & 2))


def parse(blocks: Sequence[Tensor]) -> Header:
    """The header whose blocks these are."""
    whole = b"".join(block.numpy().data for block in blocks)
    specs, letters = pickle.loads(memoryview(whole)[_PREFIX_BYTES:])
    return Header(specs=tuple(map(TensorSpec._make, specs)), letters=letters)


def _blocks(header: bytes) -> tuple[Tensor, ...]:
    """A header with what goes before it, cut after the first block, which is padded."""
    whole = bytearray(len(header).to_bytes(_LENGTH_BYTES, "little") + b"\0" + header)
    whole.extend(bytes(max(0, BLOCK_BYTES - len(whole))))
    flat = torch.frombuffer(whole, dtype=torch.uint8)
    return (flat,) if len(whole) == BLOCK_BYTES else (flat[:BLOCK_BYTES], flat[BLOCK_BYTES:])


def _refusal(kind: Kind, message: Message, what: str, remedy: str) -> ConfigError:
    return ConfigError(
        f"the {kind.value} of minibatch {message.minibatch} holds {what}", remedy=remedy
    )
