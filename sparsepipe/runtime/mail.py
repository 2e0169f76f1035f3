"""Sends and receives by stage: the plan says which of its ranks a minibatch belongs to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from sparsepipe.runtime.transport import Kind, Message, Network, name_of_message
from sparsepipe.schedule import Plan


class Mail:
    """A rank's messages.

    Args:
        plan: the stages and their ranks.
        network: of this rank.

    Attributes:
        first: number, in messages and in errors about them, of what the schedule calls 0.
    """

    def __init__(self, plan: Plan, network: Network) -> None:
        self._plan = plan
        self._network = network
        self.first = 0
        self._held_back = False

    def begin(self, first: int, *, parts: int | None = None, held_back: bool = False) -> None:
        """Messages are numbered from here on; all ranks must say the same.

        While nothing is under way.

        Args:
            first: the attribute.
            parts: of a minibatch, where messages are of its parts; errors then name these.
            held_back: channels hold no more messages than stages run ahead, though they may have
                been made for more; for whole batches, which take more memory than their parts.
        """
        self.first = first
        self._held_back = held_back
        self._network.called = partial(name_of_message, parts=parts)

    def send(
        self,
        kind: Kind,
        stage: int,
        minibatch: int,
        tree: Any,
        *,
        meta: Mapping[str, Any] | None = None,
    ) -> None:
        """Sends to the rank of ``stage`` that handles ``minibatch``."""
        message = Message(minibatch=self.first + minibatch, meta=meta or {}, tree=tree)
        target = self._plan.rank_for(stage, minibatch)
        self._network.send(kind, target, message, held_back=self._held_back)

    def receive(self, kind: Kind, stage: int, minibatch: int) -> Message:
        """What the rank of ``stage`` that handles ``minibatch`` has sent."""
        source = self._plan.rank_for(stage, minibatch)
        return self._network.receive(kind, source, minibatch=self.first + minibatch)

    def release(self, minibatch: int) -> None:
        """Nothing that came for a minibatch is needed any more."""
        self._network.release(self.first + minibatch)


def in_order(parts: Sequence[Sequence[tuple[Any, Any]]]) -> list[Any]:
    """What several ranks have of minibatches, by what orders these, in that order."""
    return [item for _, item in sorted((pair for part in parts for pair in part), key=_first)]


def _first(pair: tuple[Any, Any]) -> Any:
    return pair[0]
