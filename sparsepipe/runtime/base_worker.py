"""The base of all pipelines' workers: messages between stages, evaluation, and a step's two halves.

Independent of Lightning: :class:`Steps` runs the code of a step before the layers of the first
stage and around those of the last.
"""

from __future__ import annotations

import operator
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, Protocol, TypeVar

from torch import Tensor

from sparsepipe.runtime.collectives.replicas import Replicas
from sparsepipe.runtime.recording import Part, Recorder
from sparsepipe.runtime.stage import StageLayers
from sparsepipe.runtime.transport import Kind, Message, Network, SharedMessages, message_name
from sparsepipe.schedule import Action, Plan

_Events = TypeVar("_Events")


class Steps(Protocol):
    """The step of a minibatch, cut at the layers for both ends of the pipeline.

    ``run`` computes the layers: of several stages the last ones, on what it has received; of a
    single stage all, on the input that it is called with. Evaluation does not train.
    """

    def open(self, batch: Any) -> tuple[Any, Any]:
        """The input of the layers, and what the last stage needs of the batch."""

    def close(self, rest: Any, run: Callable[[], Any]) -> tuple[Any, Any]:
        """Loss, or result of an evaluation, and logs; ``run`` returns the layers' output."""

    def whole(self, batch: Any, run: Callable[[Any], Any]) -> tuple[Any, Any]:
        """The same where both ends are here; ``run`` takes the layers' input."""


class UpdateEvents(Protocol):
    """Callbacks of every worker."""

    def before_backward(self, loss: Tensor) -> None:
        """The last stage is about to run a backward, in synchronous pipelines a microbatch's."""

    def update(self, gradients: Mapping[str, Tensor | None], *, step: int) -> None:
        """Applies the gradients of a round, or a minibatch, to this stage's parameters, in place.

        ``step`` is the round of stage 0 since the last drain whose learning rate counts. It is the
        same for all replicas, which may have come to the update in different ones.
        """


class Events(UpdateEvents, Protocol):
    """Callbacks of a worker of the asynchronous pipeline."""

    def done(self, minibatch: int, *, loss: Tensor, logs: Any) -> None:
        """A minibatch has gone backward through this stage."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Microbatch:
    """A part of a minibatch that has gone forward and backward through a stage.

    Attributes:
        samples: at least one.
        weight: share of its loss in the minibatch's.
        loss: the mean over its samples.
    """

    minibatch: int
    number: int
    samples: int
    weight: float
    loss: Tensor
    logs: Any


class MinibatchEvents(UpdateEvents, Protocol):
    """Callbacks of a worker of a synchronous pipeline."""

    def done(self, microbatches: Sequence[Microbatch]) -> None:
        """A minibatch has gone backward through this stage: this rank's parts, by their numbers."""


class StageMessages:
    """Messages of a rank by stage: the plan says which of its ranks a minibatch belongs to.

    Args:
        shared: hands on the messages of the first rank of this rank's grid; None without a grid.

    Attributes:
        first: number, in messages and in errors about them, of the schedule's minibatch 0.
        share: the message that its argument makes on this rank, or on the first of its grid alone.
    """

    def __init__(self, plan: Plan, network: Network, shared: SharedMessages | None) -> None:
        self._plan = plan
        self._network = network
        self.leads = shared is None or shared.leads
        self.share: Callable[[Callable[[], Message]], Message] = (
            operator.call if shared is None else shared.share
        )
        self.first = 0
        self.recorder: Recorder | None = None
        self._held_back = False

    def begin(self, first: int, *, parts: int | None = None, held_back: bool = False) -> None:
        """Numbers messages from ``first`` on, alike on all ranks, while nothing is under way.

        Errors name the ``parts`` of a minibatch where messages are of its parts. With
        ``held_back`` channels hold no more messages than stages run ahead, though they may have
        been made for more: for whole batches, which take more memory than their parts.
        """
        self.first = first
        self._held_back = held_back
        self._network.called = partial(message_name, parts=parts)

    def send(
        self,
        kind: Kind,
        stage: int,
        minibatch: int,
        tree: Any,
        *,
        meta: Mapping[str, Any] | None = None,
    ) -> None:
        """Sends to the rank of ``stage`` that handles ``minibatch``; only one of a grid does."""
        if not self.leads:
            return
        message = Message(minibatch=self.first + minibatch, meta=meta or {}, tree=tree)
        target = self._plan.rank_for(stage, minibatch)
        with moment(self.recorder, "sends"):
            self._network.send(kind, target, message, held_back=self._held_back)

    def receive(self, kind: Kind, stage: int, minibatch: int) -> Message:
        """The message of the rank of ``stage`` that handles ``minibatch``."""
        source, number = self._plan.rank_for(stage, minibatch), self.first + minibatch
        with moment(self.recorder, "waits"):
            return self.share(partial(self._network.receive, kind, source, minibatch=number))

    def release(self, minibatch: int) -> None:
        self._network.release(self.first + minibatch)


def moment(recorder: Recorder | None, part: Part) -> AbstractContextManager[None]:
    """Context of a part of a rank's time, which a recorder, if any, notes."""
    return nullcontext() if recorder is None else recorder.moment(part)


class StageWorker(ABC, Generic[_Events]):
    """Runs one rank's share of every minibatch, in the contexts that ``slowed`` makes.

    Attributes:
        rounds: rounds of stage 0 since the last drain; a partial one counts as one.
        evaluated: minibatches that have been evaluated, to be set to 0 after a loader's last one.
    """

    def __init__(
        self,
        *,
        plan: Plan,
        rank: int,
        stage: StageLayers,
        replicas: Replicas,
        network: Network,
        shared: SharedMessages | None = None,
        steps: Steps,
        events: _Events,
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
        self._messages = StageMessages(plan, network, shared)
        self._steps = steps
        self._events = events
        self._slowed = slowed
        self._recorder: Recorder | None = None
        self.rounds = 0
        self.evaluated = 0

    def watch(self, around: Callable[[Callable[[], AbstractContextManager[None]]], Any]) -> None:
        """Puts a context around what is computed here; ``around`` makes it from the present one."""
        self._slowed = partial(around, self._slowed)

    def record(self, recorder: Recorder) -> None:
        """Lets a recorder note when this rank does what."""
        self._recorder = self._messages.recorder = recorder
        self.watch(recorder.computing)

    @abstractmethod
    def feed(self, batch: Any, *, count: int, number: int) -> None:
        """Lets round ``number`` of the whole run, of ``count`` minibatches, enter stage 0, and does
        what the schedule has for this rank, with its ``batch`` if it reads one of the round.
        """

    @abstractmethod
    def drain(self, buffers: Iterable[Tensor]) -> None:
        """Finishes all that is under way; replicas then agree on ``buffers``."""

    def evaluate(self, batch: Any, *, count: int, replies: bool = False) -> list[tuple[int, Any]]:
        """Sends one round of ``count`` minibatches forward.

        Returns for minibatches of this rank, in the last stage, number and logs; with ``replies``
        number and result, which the rank that read the batch waits for and returns as well.
        """
        assert not self.rounds, "evaluation begins when the pipeline is empty"
        self._messages.begin(0, held_back=True)
        first, self.evaluated = self.evaluated, self.evaluated + count
        found = []
        for minibatch in range(first, first + count):
            if self._plan.rank_for(self._number, minibatch) == self._plan.leader_of(self._rank):
                with self._noting(f"forward of batch {minibatch} of the evaluation"):
                    found += self._evaluate_one(minibatch, batch, replies=replies)
                    self._messages.release(minibatch)
        return found

    def _evaluate_one(self, minibatch: int, batch: Any, *, replies: bool) -> list[tuple[int, Any]]:
        if self._first:
            value, rest = self._open_minibatch(minibatch, batch)
        else:
            value = self._messages.receive(Kind.ACTIVATION, self._number - 1, minibatch).tree
            rest = self._messages.receive(Kind.BATCH, 0, minibatch).tree if self._last else None
        found: list[tuple[int, Any]] = []
        if self._last:
            with self._slowed():
                result, logs = self._stage.evaluate(value, **self._step_around(rest))
            if replies and not self._first:
                self._messages.send(Kind.REPLY, 0, minibatch, result)
            found.append((minibatch, result if replies else logs))
        else:
            with self._slowed():
                output = self._stage.evaluate(value)
            self._messages.send(Kind.ACTIVATION, self._number + 1, minibatch, output)
            if replies and self._first:
                reply = self._messages.receive(Kind.REPLY, self._plan.num_stages - 1, minibatch)
                found.append((minibatch, reply.tree))
        return found

    def _open_minibatch(self, minibatch: int, batch: Any) -> tuple[Any, Any]:
        """The input of a minibatch, whose rest is sent ahead; with both ends here all is rest."""
        if self._last:
            return None, batch

        def opened() -> Message:
            with self._slowed():
                value, rest = self._steps.open(batch)
            self._messages.send(Kind.BATCH, self._plan.num_stages - 1, minibatch, rest)
            return Message(minibatch=minibatch, tree=value)

        return self._messages.share(opened).tree, None

    def _step_around(self, rest: Any) -> dict[str, Any]:
        """The argument that runs the step around the last stage's layers; empty on other stages."""
        if not self._last:
            return {}
        if self._first:
            return {"whole": partial(self._steps.whole, rest)}
        return {"close": partial(self._steps.close, rest)}

    @contextmanager
    def _noting(self, doing: str, action: Action | None = None) -> Iterator[None]:
        """Context whose errors say what this rank was doing; a recorder notes the action, if any.

        The action has the minibatch's number in the whole run.
        """
        recorded: AbstractContextManager[None] = nullcontext()
        if self._recorder is not None and action is not None:
            recorded = self._recorder.action(action)
        try:
            with recorded:
                yield
        except Exception as error:
            error.add_note(f"rank {self._rank}, stage {self._number}: {doing}")
            raise
