"""What a rank of any pipeline does: both ends of a batch's way, and evaluation.

Knows nothing of Lightning: a :class:`Steps` says what happens before the layers of the
first stage and around those of the last.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, Generic, TypeVar

from torch import Tensor

from sparsepipe.runtime.mail import Mail
from sparsepipe.runtime.protocols import Steps
from sparsepipe.runtime.replicas import Replicas
from sparsepipe.runtime.stage import Flight, Leaves, Stage
from sparsepipe.runtime.transport import Kind, Network
from sparsepipe.schedule import Plan

_Told = TypeVar("_Told")


class StageWorker(ABC, Generic[_Told]):
    """Runs one rank's share of every minibatch.

    Args:
        plan: the stages and their ranks.
        rank: this one's number.
        stage: its layers.
        replicas: its stage's.
        network: to the other stages.
        steps: both ends of a minibatch's way.
        events: told what happens.
        slowed: makes the context of whatever is computed here (:class:`Throttle`).

    Attributes:
        network: as given, for its traffic.
    """

    def __init__(
        self,
        *,
        plan: Plan,
        rank: int,
        stage: Stage,
        replicas: Replicas,
        network: Network,
        steps: Steps,
        events: _Told,
        slowed: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self._plan = plan
        self._rank = rank
        self._number = plan.stage_of(rank)
        self._replica = plan.replica_of(rank)
        self._first = self._number == 0
        self._last = self._number == plan.num_stages - 1
        self._stage = stage
        self._replicas = replicas
        self.network = network
        self._mail = Mail(plan, network)
        self._steps = steps
        self._events = events
        self._slowed = slowed
        self._evaluated = 0

    def watch(self, around: Callable[[Callable[[], AbstractContextManager[None]]], Any]) -> None:
        """Puts a context around whatever is computed here from now on.

        Args:
            around: makes it, given what makes the one that there was.
        """
        self._slowed = partial(around, self._slowed)

    @property
    @abstractmethod
    def rounds(self) -> int:
        """Rounds of stage 0 since the last drain."""

    @abstractmethod
    def feed(self, batch: Any, *, count: int, number: int) -> None:
        """Lets one round of stage 0 enter, and does what the schedule has for this rank.

        Args:
            batch: this rank's, where it reads one of the round.
            count: minibatches of the round.
            number: of the round in the whole run, as the schedule counts.
        """

    @abstractmethod
    def drain(self, buffers: Iterable[Tensor]) -> None:
        """Finishes all that is under way; replicas then agree on ``buffers``."""

    def evaluate(self, batch: Any, *, count: int, answered: bool = False) -> list[tuple[int, Any]]:
        """Sends one round forward.

        Args:
            batch: this rank's, where it reads one of the round.
            count: minibatches of the round.
            answered: the rank that read a batch waits for its result.

        Returns:
            For minibatches of this rank: in the last stage number and logs; where answers
            come, number and result.
        """
        assert not self.rounds, "evaluation begins when the pipeline is empty"
        self._mail.begin(0, held_back=True)
        come, self._evaluated = self._evaluated, self._evaluated + count
        found = []
        for minibatch in range(come, come + count):
            if self._plan.rank_for(self._number, minibatch) == self._rank:
                with self._naming(f"forward of batch {minibatch} of the evaluation"):
                    found += self._evaluate_one(minibatch, batch, answered=answered)
                    self._mail.release(minibatch)
        return found

    def end_evaluation(self) -> None:
        """The next round begins with minibatch 0."""
        self._evaluated = 0

    def _evaluate_one(self, minibatch: int, batch: Any, *, answered: bool) -> list[tuple[int, Any]]:
        if self._first:
            value, rest = self._open(minibatch, batch)
        else:
            value = self._mail.receive(Kind.ACTIVATION, self._number - 1, minibatch).tree
            rest = self._rest(minibatch)
        found: list[tuple[int, Any]] = []
        if self._last:
            with self._slowed():
                result, logs = self._result(value, rest)
            if answered and not self._first:
                self._mail.send(Kind.REPLY, 0, minibatch, result)
            found.append((minibatch, result if answered else logs))
        else:
            with self._slowed():
                output = self._stage.evaluate(value)
            self._mail.send(Kind.ACTIVATION, self._number + 1, minibatch, output)
            if answered and self._first:
                reply = self._mail.receive(Kind.REPLY, self._plan.num_stages - 1, minibatch)
                found.append((minibatch, reply.tree))
        return found

    def _open(self, minibatch: int, batch: Any) -> tuple[Any, Any]:
        """The input of a minibatch; the rest is sent ahead.

        Where both ends are here the step is not cut in two: all of the batch is its rest, and the
        step finds its input on its way.
        """
        if self._last:
            return None, batch
        with self._slowed():
            value, rest = self._steps.open(batch)
        self._mail.send(Kind.BATCH, self._plan.num_stages - 1, minibatch, rest)
        return value, rest

    def _flight(self, value: Any, rest: Any, *, minibatch: int, leaves: Leaves = None) -> Flight:
        """Takes a minibatch, by its number in the whole run, forward through this stage."""
        if not self._last:
            return self._stage.forward(value, minibatch=minibatch, leaves=leaves)
        if self._first:
            whole = partial(self._steps.whole, rest)
            return self._stage.forward_whole(whole, minibatch=minibatch, leaves=leaves)
        close = partial(self._steps.close, rest)
        return self._stage.forward(value, minibatch=minibatch, leaves=leaves, close=close)

    def _result(self, value: Any, rest: Any) -> Any:
        """Result and logs, in the last stage, of a step that does not train."""
        if self._first:
            return self._stage.evaluate_whole(partial(self._steps.whole_evaluation, rest))
        return self._stage.evaluate(value, close=partial(self._steps.close_evaluation, rest))

    def _rest(self, minibatch: int) -> Any:
        return self._mail.receive(Kind.BATCH, 0, minibatch).tree if self._last else None

    @contextmanager
    def _naming(self, doing: str) -> Iterator[None]:
        """Says with an error where it happened."""
        try:
            yield
        except Exception as error:
            error.add_note(f"rank {self._rank}, stage {self._number}: {doing}")
            raise
