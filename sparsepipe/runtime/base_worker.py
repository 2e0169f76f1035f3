"""Base class of pipeline workers: messages between stages, evaluation and the halves of a step.

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
    """The step of a minibatch, cut at its call of the layers: a half for each end of the pipeline.

    ``run`` computes the layers: those of the last stage on the input that it received, or, with a
    single stage, all layers on the argument of ``run``.
    """

    def open(self, batch: Any) -> tuple[Any, Any]:
        """Returns the input of the layers, and the part of the batch that the last stage needs."""

    def close(self, rest: Any, run: Callable[[], Any]) -> tuple[Any, Any]:
        """Returns the loss or an evaluation's result, and logs; ``run`` returns the output."""

    def whole(self, batch: Any, run: Callable[[Any], Any]) -> tuple[Any, Any]:
        """Does both halves on a single stage; ``run`` maps the layers' input to their output."""


class UpdateEvents(Protocol):
    """Callbacks that every worker calls."""

    def before_backward(self, loss: Tensor) -> None:
        """Called before each backward of the last stage, of a minibatch or a microbatch."""

    def update(self, gradients: Mapping[str, Tensor | None], *, step: int) -> None:
        """Applies the gradients of a round, or a minibatch, to this stage's parameters, in place.

        ``step`` is the round of stage 0 since the last drain whose learning rate applies. It is the
        same for all replicas, though they may reach the update in different rounds.
        """


class Events(UpdateEvents, Protocol):
    """Callbacks that a worker of the asynchronous pipeline calls."""

    def done(self, minibatch: int, *, loss: Tensor, logs: Any) -> None:
        """Called when a minibatch has gone backward through this stage."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Microbatch:
    """A part of a minibatch that has gone forward and backward through a stage.

    Attributes:
        minibatch: number of the minibatch in the whole run.
        number: number of this part within the minibatch.
        samples: number of samples, at least one.
        weight: factor of ``loss`` in the minibatch's loss.
        loss: mean over the samples, a scalar.
    """

    minibatch: int
    number: int
    samples: int
    weight: float
    loss: Tensor
    logs: Any


class MinibatchEvents(UpdateEvents, Protocol):
    """Callbacks that a worker of a synchronous pipeline calls."""

    def done(self, microbatches: Sequence[Microbatch]) -> None:
        """Called when a minibatch has gone backward here, with this rank's parts by number."""


class StageMessages:
    """A rank's messages to and from stages: the plan says which rank of a stage gets a minibatch.

    Args:
        shared: passes messages from the first rank of a grid to its others; None without a grid.

    Attributes:
        leads: whether this rank is the first of its grid, or has none.
        first: number that messages and errors about them give to the schedule's minibatch 0.
        share: returns the message that its argument makes, in a grid on the first rank alone.
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
        """Numbers messages from ``first``, the same on all ranks, while none is under way.

        ``parts`` is the number of microbatches, if messages are about these; errors then name them.
        With ``held_back``, channels hold no more messages than their default depth, even if made
        for more: evaluation sends whole batches, which take more memory than their parts.
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
        """Sends to the rank of ``stage`` that handles ``minibatch``; a grid sends only once."""
        if not self.leads:
            return
        message = Message(minibatch=self.first + minibatch, meta=meta or {}, tree=tree)
        target = self._plan.rank_for(stage, minibatch)
        with moment(self.recorder, "sends"):
            self._network.send(kind, target, message, held_back=self._held_back)

    def receive(self, kind: Kind, stage: int, minibatch: int) -> Message:
        """Waits for the ``kind`` message about ``minibatch`` from the rank of ``stage`` that
        handles it; within a grid, one rank receives the message and shares it.
        """
        source, number = self._plan.rank_for(stage, minibatch), self.first + minibatch
        with moment(self.recorder, "waits"):
            return self.share(partial(self._network.receive, kind, source, minibatch=number))

    def release(self, minibatch: int) -> None:
        self._network.release(self.first + minibatch)


def moment(recorder: Recorder | None, part: Part) -> AbstractContextManager[None]:
    """Context of an activity of a rank, whose time the recorder, if any, records."""
    return nullcontext() if recorder is None else recorder.moment(part)


class StageWorker(ABC, Generic[_Events]):
    """Runs one rank's share of every minibatch; ``slowed`` makes a context for each computation.

    Attributes:
        rounds: rounds of stage 0 since the last drain, including a partial one.
        evaluated: minibatches evaluated so far; to be reset to 0 after a loader's last one.
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
        """Runs later computations in ``around(make)``, where ``make`` makes the present context."""
        self._slowed = partial(around, self._slowed)

    def record(self, recorder: Recorder) -> None:
        """Records this rank's activities and their times with ``recorder``."""
        self._recorder = self._messages.recorder = recorder
        self.watch(recorder.computing)

    @abstractmethod
    def feed(self, batch: Any, *, count: int, number: int) -> None:
        """Starts a round, in which ``count`` batches enter stage 0, and performs the actions that
        are then due here. ``batch`` is this rank's, if it reads one; ``number`` is that of the
        round's first minibatch in the whole run.
        """

    @abstractmethod
    def drain(self, buffers: Iterable[Tensor]) -> None:
        """Finishes all minibatches under way; then replicas average ``buffers``."""

    def evaluate(self, batch: Any, *, count: int, replies: bool = False) -> list[tuple[int, Any]]:
        """Sends one round of ``count`` minibatches forward.

        The last stage returns the number and logs of each minibatch of this rank. With ``replies``
        it returns number and result, and so does the rank that read the batch, which waits for it.
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
        """Returns (layers' input, None) and sends the rest ahead; a single stage: (None, batch)."""
        if self._last:
            return None, batch

        def opened() -> Message:
            with self._slowed():
                value, rest = self._steps.open(batch)
            self._messages.send(Kind.BATCH, self._plan.num_stages - 1, minibatch, rest)
            return Message(minibatch=minibatch, tree=value)

        return self._messages.share(opened).tree, None

    def _step_around(self, rest: Any) -> dict[str, Any]:
        """Keyword argument for the step around the last stage's layers; none on other stages."""
        if not self._last:
            return {}
        if self._first:
            return {"whole": partial(self._steps.whole, rest)}
        return {"close": partial(self._steps.close, rest)}

    @contextmanager
    def _noting(self, doing: str, action: Action | None = None) -> Iterator[None]:
        """Context that adds to errors what this rank was doing, and records the action, if any.

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
