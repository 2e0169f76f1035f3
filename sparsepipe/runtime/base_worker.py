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

from sparsepipe.errors import ConfigError
from sparsepipe.runtime.collectives.replicas import Replicas
from sparsepipe.runtime.recording import Part, Recorder
from sparsepipe.runtime.stage import StageLayers
from sparsepipe.runtime.transport import Kind, Message, Network, SharedMessages, message_name
from sparsepipe.schedule import Action, Plan

_Events = TypeVar("_Events")


class Steps(Protocol):
    """The step of a minibatch, cut where it calls the layers: a half for each end of the pipeline.

    ``run`` computes the layers: those of the last stage on the input that it received, or, with a
    single stage, all layers on the argument of ``run``.

    Attributes:
        weight: weight of the last loss in that of its minibatch; None: its number of samples.
    """

    weight: float | None

    def open(self, batch: Any) -> tuple[Any, Any]:
        """Runs the first half; returns the layers' input, and ``rest`` for :meth:`close`."""

    def close(self, rest: Any, run: Callable[[], Any]) -> tuple[Any, Any]:
        """Runs the second half; returns the loss or an evaluation's result, and what was logged."""

    def whole(self, batch: Any, run: Callable[[Any], Any]) -> tuple[Any, Any]:
        """Runs both halves on a single stage; returns the same as :meth:`close`."""


class UpdateEvents(Protocol):
    """Callbacks that every worker calls."""

    def before_backward(self, loss: Tensor) -> None:
        """Called in the last stage before each backward, of a minibatch or a microbatch."""

    def update(self, gradients: Mapping[str, Tensor | None], *, step: int) -> None:
        """Updates this stage's parameters in place, given their gradients by name.

        ``step``: the round of stage 0, from 0 at the last drain, whose learning rate applies; the
        same for all replicas, though they may reach the update in different rounds.
        """


class Events(UpdateEvents, Protocol):
    """Callbacks that a worker of the asynchronous pipeline calls."""

    def done(self, minibatch: int, *, loss: Tensor, logs: Any) -> None:
        """Called after a minibatch's backward here; ``minibatch`` counts from the last drain."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Microbatch:
    """A part of a minibatch that has gone forward and backward through a stage.

    Attributes:
        minibatch: number of the minibatch in the whole run.
        number: number of this part within the minibatch.
        samples: number of samples, at least one.
        weight: ``loss`` counts by its share of the weights of all parts; 0: it may be NaN.
        loss: mean over the samples, or what has this weight, a scalar.
        logs: what its step logged.
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
        """Called after a minibatch's last backward, with this rank's microbatches by number."""


class StageMessages:
    """Sends and receives messages about minibatches; the plan gives the rank in the other stage.

    Args:
        shared: passes messages from the first rank of a grid to its others; None without a grid.

    Attributes:
        leads: whether this rank is the first of its grid, or in no grid.
        first: number that messages and errors about them give to the schedule's minibatch 0.
        share: returns the message that its argument makes; in a grid, only the first rank makes it.
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
        """Numbers messages from ``first``; called alike on all ranks, when no message is under way.

        ``parts``: microbatches per minibatch, if messages are about these; errors then name them.
        With ``held_back``, channels hold no more messages than their default depth, even if made
        for more: evaluation sends minibatches, which take more memory than microbatches.
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
        """Sends a message to the rank of ``stage`` that handles ``minibatch``; in a grid, once."""
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


@contextmanager
def untouched_gradients(parameters: Mapping[str, Tensor]) -> Iterator[None]:
    """Context of users' code, at whose end a ConfigError is raised if it has changed a gradient."""
    before = [(p.grad, None if p.grad is None else p.grad._version) for p in parameters.values()]
    yield
    for (name, parameter), (grad, version) in zip(parameters.items(), before, strict=True):
        if parameter.grad is not grad or (grad is not None and grad._version != version):
            raise ConfigError(
                f"a step, or a hook within it, changes the gradient of {name} itself: it uses the "
                "parameter through a list, an attribute or a closure, or calls backward or "
                "zero_grad",
                remedy="take parameters from the module in each step (self.layers[4].weight), "
                "leave penalties to weight_decay, and change gradients in on_before_optimizer_step",
            )


def moment(recorder: Recorder | None, part: Part) -> AbstractContextManager[None]:
    """Context of an activity of a rank; ``recorder``, if any, records its time as ``part``."""
    return nullcontext() if recorder is None else recorder.moment(part)


class StageWorker(ABC, Generic[_Events]):
    """Runs one rank of a pipeline; ``slowed`` makes a context for each of its computations.

    Attributes:
        rounds: number of rounds since the last drain, including a partial one. In a round, each
            rank (or grid) of stage 0 reads one minibatch.
        evaluated: number of minibatches evaluated so far; to be reset to 0 after a loader's last.
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
        """Starts a round, in which ``count`` minibatches enter stage 0, and performs the actions
        that are then due here. ``batch``: the one that this rank reads, if any; ``number``: that of
        the round's first minibatch, in the whole run.
        """

    @abstractmethod
    def drain(self, buffers: Iterable[Tensor]) -> None:
        """Finishes all minibatches under way; then replicas average ``buffers``."""

    def evaluate(self, batch: Any, *, count: int, replies: bool = False) -> list[tuple[int, Any]]:
        """Sends a round of ``count`` minibatches forward; ``batch``: the one that this rank reads.

        Returns (number, logs) of those that this rank handles in the last stage, numbered from 0 in
        each loader. With ``replies``, (number, result), also on the rank that read it, which waits.
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
        """Returns (layers' input, None) after sending the rest; on a single stage (None, batch)."""
        if self._last:
            return None, batch

        def opened() -> Message:
            with self._slowed():
                value, rest = self._steps.open(batch)
            self._messages.send(Kind.BATCH, self._plan.num_stages - 1, minibatch, rest)
            return Message(minibatch=minibatch, tree=value)

        return self._messages.share(opened).tree, None

    def _step_around(self, rest: Any) -> dict[str, Any]:
        """Argument ``whole`` or ``close`` for the last stage's layers; none on other stages."""
        if not self._last:
            return {}
        if self._first:
            return {"whole": partial(self._steps.whole, rest)}
        return {"close": partial(self._steps.close, rest)}

    @contextmanager
    def _noting(self, doing: str, action: Action | None = None) -> Iterator[None]:
        """Context that adds ``doing`` to errors and records ``action``, numbered in the run."""
        recorded: AbstractContextManager[None] = nullcontext()
        if self._recorder is not None and action is not None:
            recorded = self._recorder.action(action)
        try:
            with recorded:
                yield
        except Exception as error:
            error.add_note(f"rank {self._rank}, stage {self._number}: {doing}")
            raise
