"""What a rank of the asynchronous pipeline does: its actions, in the schedule's order.

Knows nothing of Lightning: a :class:`Steps` says what happens before the layers of the
first stage and around those of the last.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from torch import Tensor

from sparsepipe.runtime.mail import Mail
from sparsepipe.runtime.protocols import Events, Segment, Steps
from sparsepipe.runtime.replicas import Replicas
from sparsepipe.runtime.stage import Flight, Stage
from sparsepipe.runtime.transport import Kind, Network
from sparsepipe.runtime.weights import Mode, Weights
from sparsepipe.schedule import (
    Action,
    Plan,
    RankOrder,
    Tally,
    included_at,
    until_return,
)

_PEAKS: dict[Mode, Callable[[Tally], int]] = {
    Mode.STASH: lambda tally: tally.stashed,
    Mode.VERTICAL_SYNC: lambda tally: tally.vertical,
    Mode.SPECTRAIN: lambda tally: tally.predicted,
    Mode.NONE: lambda tally: 1,
}
"""Most sets of weights that a rank has in use at a time, by the schedule."""


class Worker:
    """Runs one rank's share of every minibatch.

    Args:
        plan: the stages and their ranks.
        rank: this one's number.
        stage: its layers.
        weights: of its stage; None for evaluation only.
        replicas: its stage's.
        network: to the other stages.
        steps: both ends of a minibatch's way.
        events: told what happens.
        slowed: makes the context of whatever is computed here (:class:`Throttle`).

    Attributes:
        weights: as given, for its records.
        network: as given, for its traffic.
        segments: what ran, if somebody sets this to a list.
    """

    def __init__(
        self,
        *,
        plan: Plan,
        rank: int,
        stage: Stage,
        weights: Weights | None,
        replicas: Replicas,
        network: Network,
        steps: Steps,
        events: Events,
        slowed: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self._plan = plan
        self._rank = rank
        self._number = plan.stage_of(rank)
        self._replica = plan.replica_of(rank)
        self._first = self._number == 0
        self._last = self._number == plan.num_stages - 1
        self._stage = stage
        self.weights = weights
        self._replicas = replicas
        self.network = network
        self._mail = Mail(plan, network)
        self._steps = steps
        self._events = events
        self._slowed = slowed
        self._order = RankOrder(plan, rank)
        self._tally = Tally(plan, rank)
        predicts = weights is not None and weights.predict_backward
        self._beyond = until_return(plan, self._number) if predicts else 0
        self._batches: dict[int, Any] = {}
        self._flights: dict[int, Flight] = {}
        self._begin = 0  # number in the whole run of the first minibatch since the last drain
        self._gradients: dict[str, Tensor | None] | None = None
        self._evaluated = 0
        self.segments: list[Segment] | None = None

    @property
    def minibatches(self) -> int:
        """Minibatches since the last drain, over all replicas."""
        return self._order.minibatches

    def feed(self, batch: Any, *, count: int, number: int) -> None:
        """Lets one round of stage 0 enter, and does what the schedule has for this rank.

        Args:
            batch: this rank's, where it reads one of the round.
            count: minibatches of the round.
            number: of its first minibatch in the whole run.
        """
        come = self._order.minibatches
        if come == 0:
            self._begin = self._mail.first = self._replicas.first = number
        assert number == self._begin + come, "minibatches follow one another until a drain"
        if self._first and self._replica < count:
            self._batches[come + self._replica] = batch
        self._run(self._order.feed(count))

    def drain(self, buffers: Iterable[Tensor]) -> None:
        """Finishes all that is under way; replicas then agree on ``buffers``."""
        weights = self.weights
        assert weights is not None
        minibatches = self._order.minibatches
        weights.keep_from(None)
        self._tally.drain()
        self._run(self._order.drain())
        self._replicas.average_statistics_(buffers)
        assert not self._flights
        self._end_segment(weights, minibatches)
        weights.restart()
        self._tally = Tally(self._plan, self._rank)

    def _end_segment(self, weights: Weights, minibatches: int) -> None:
        """Compares what ran with the schedule, and records it if somebody wants to know."""
        foretold = _PEAKS[weights.mode](self._tally)
        assert weights.segment_peak == foretold, (
            f"{weights.segment_peak} sets of weights, the schedule has {foretold}"
        )
        if self.segments is not None:
            self.segments.append(
                Segment(
                    minibatches=minibatches,
                    version_of_forward=dict(weights.version_of_forward),
                    version_of_backward=dict(weights.version_of_backward),
                    peak_versions=weights.segment_peak,
                )
            )

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
        assert not self._order.minibatches, "evaluation begins when the pipeline is empty"
        self._mail.first = 0
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

    def _run(self, actions: Iterator[Action]) -> None:
        do = {"F": self._forward, "B": self._backward, "U": self._update}
        for action in actions:
            self._tally.see(action)
            with self._naming(self._description(action)):
                do[action.kind](action.number)

    def _description(self, action: Action) -> str:
        """What an action is, with the minibatch's number in the whole run."""
        if action.kind != "U":
            doing = {"F": "forward", "B": "backward"}[action.kind]
            return f"{doing} of minibatch {self._begin + action.number}"
        first = self._begin + self._order.first_of(action.number)
        if self._plan.replicas(self._number) == 1:
            return f"update of minibatch {first}"
        return f"update of the round that begins with minibatch {first}"

    def _forward(self, minibatch: int) -> None:
        weights = self.weights
        assert weights is not None
        included = weights.version * self._plan.replicas(0)
        if self._first:
            value, rest = self._open(minibatch, self._batches.pop(minibatch))
        else:
            message = self._mail.receive(Kind.ACTIVATION, self._number - 1, minibatch)
            value, included = message.tree, message.meta["included"]
            rest = self._rest(minibatch)
        assert included == included_at(self._plan, minibatch), included
        with self._slowed():
            leaves = weights.begin(
                minibatch,
                version=self._order.updates,
                ahead=self._order.ahead(minibatch) + self._beyond,
                included=included,
            )
            weights.keep_from(included_at(self._plan, self._order.following(minibatch)))
            flight = self._stage.forward(
                value,
                minibatch=self._begin + minibatch,
                leaves=leaves,
                close=(lambda run: self._steps.close(rest, run)) if self._last else None,
            )
        self._flights[minibatch] = flight
        if not self._last:
            meta = {"included": included}
            self._mail.send(Kind.ACTIVATION, self._number + 1, minibatch, flight.output, meta=meta)
            flight.output = None

    def _backward(self, minibatch: int) -> None:
        weights = self.weights
        assert weights is not None
        leaves = weights.again(minibatch, ahead=self._order.ahead(minibatch) + self._beyond)
        flight = self._flights.pop(minibatch)
        if self._last:
            loss, logs = flight.loss, flight.extra
            assert loss is not None
            with self._slowed():
                self._events.before_backward(loss)
                upstream = flight.backward(None, leaves=leaves)
        else:
            message = self._mail.receive(Kind.GRADIENT, self._number + 1, minibatch)
            logs, gradients = message.meta["logs"], message.tree["gradients"]
            loss = message.tree["loss"].clone()
            with self._slowed():
                upstream = flight.backward(gradients, leaves=leaves)
            del message, gradients
        if not self._first:
            tree = {"gradients": upstream, "loss": loss}
            self._mail.send(Kind.GRADIENT, self._number - 1, minibatch, tree, meta={"logs": logs})
        self._gradients = weights.finish(minibatch)
        del flight, leaves, upstream
        self._mail.release(minibatch)
        self._events.done(minibatch, loss=loss, logs=logs)

    def _update(self, number: int) -> None:
        weights = self.weights
        assert weights is not None
        gradients, self._gradients = self._gradients, None
        averaged = self._replicas.average(gradients or {}, minibatches=int(gradients is not None))
        with self._slowed(), weights.updating():
            self._events.update(averaged, step=self._order.step_of(number))

    def _evaluate_one(self, minibatch: int, batch: Any, *, answered: bool) -> list[tuple[int, Any]]:
        if self._first:
            value, rest = self._open(minibatch, batch)
        else:
            value = self._mail.receive(Kind.ACTIVATION, self._number - 1, minibatch).tree
            rest = self._rest(minibatch)
        found: list[tuple[int, Any]] = []
        if self._last:
            with self._slowed():
                result, logs = self._stage.evaluate(
                    value, close=lambda run: self._steps.close_evaluation(rest, run)
                )
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
        """The input of a minibatch; the rest is sent ahead where it does not stay here."""
        with self._slowed():
            value, rest = self._steps.open(batch)
        if not self._last:
            self._mail.send(Kind.BATCH, self._plan.num_stages - 1, minibatch, rest)
        return value, rest

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
