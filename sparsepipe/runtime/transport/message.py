"""What stages say to each other."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any


class Kind(Enum):
    """What a message is about; its value is how an error message calls it."""

    ACTIVATION = "activation"
    """Downstream, to the next stage: its input."""
    GRADIENT = "gradient"
    """Upstream, to the previous stage: gradients of what it sent."""
    BATCH = "batch"
    """From stage 0 straight to the last stage: the batch without the input."""
    REPLY = "reply"
    """From the last stage straight to stage 0: what was asked about a batch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One minibatch's tensors with a few values beside them.

    Attributes:
        minibatch: its number.
        meta: small plain Python values (versions, losses, logged values); they travel in
            the header.
        tree: a pytree of tensors and plain values: tuples, lists, dicts, ``SparseTensor``
            and every other registered node, in any nesting. What is no pytree node (a
            dataclass, say) travels as it is pickled, its tensors beside it.
    """

    minibatch: int
    meta: Mapping[str, Any] = field(default_factory=dict)
    tree: Any = None


def name_of_message(number: int, *, parts: int | None = None) -> str:
    """What errors call the minibatch of a message, by its number.

    Args:
        number: of the message.
        parts: of a minibatch, where each has messages of its own.
    """
    if parts is None:
        return f"minibatch {number}"
    return f"microbatch {number % parts} of minibatch {number // parts}"


@dataclass(slots=True, kw_only=True)
class Traffic:
    """What crossed the wire in messages of one kind.

    Attributes:
        messages: how many; a batch's rest that travels with an activation counts as one.
        payload_bytes: of the tensors, each once.
        overhead_bytes: of the headers: structure, dtypes, shapes and ``meta``, and what pads
            the first block to its fixed size. Framing by gloo and TCP is not counted. The
            header of a shared message counts for the activation.
    """

    messages: int = 0
    payload_bytes: int = 0
    overhead_bytes: int = 0
