"""The worker of the asynchronous pipeline: performs a rank's actions in the schedule's order."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from sparsepipe.runtime.base_worker import Events, StageWorker, moment, untouched_gradients
from sparsepipe.runtime.stage import Flight
from sparsepipe.runtime.transport import Kind
from sparsepipe.runtime.weights import Mode, Weights
from sparsepipe.schedule import (
    Action,
    RankOrder,
    Tally,
    included_at,
    until_return,
)

_DOING = {"F": "forward", "B": "backward", "U": "update"}
_PEAKS: dict[Mode, Callable[[Tally], int]] = {
    Mode.STASH: lambda tally: tally.stashed,
    Mode.VERTICAL_SYNC: lambda tally: tally.vertical,
    Mode.SPECTRAIN: lambda tally: tally.predicted,
    Mode.NONE: lambda tally: 1,
}
"""By mode: the largest number of weight sets in use at a time on the rank whose tally is given."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """Record of what a rank ran between two drains.

    Attributes:
        minibatches: number of minibatches that entered the pipeline, on all ranks of stage 0.
        version_of_forward: weight version of each forward here, by minibatch number in the segment.
        version_of_backward: the same for each backward.
        peak_versions: largest number of weight sets in use at a time, with the parameters' own.
    """

    minibatches: int
    version_of_forward: Mapping[int, int]
    version_of_backward: Mapping[int, int]
    peak_versions: int


class AsynchronousWorker(StageWorker[Events]):
    """Runs one rank of an asynchronous pipeline.

    Args:
        weights: the weights of the rank's stage; None: the worker only evaluates.

    Attributes:
        segments: a record for each drain since it was set to a list; None, the default: no records.
    """

    def __init__(self, *, weights: Weights | None, **common: Any) -> None:
        super().__init__(**common)
        plan, rank = self._plan, self._rank
        self.weights = weights
        self._order = RankOrder(plan, rank)
        self._tally = Tally(plan, rank)
        predicts = weights is not None and weights.predict_backward
        self._beyond = until_return(plan, self._number) if predicts else 0
        self._batches: dict[int, Any] = {}
        self._flights: dict[int, Flight] = {}
        self._begin = 0  # number in the whole run of the first minibatch since the last drain
        self._gradients: dict[str, Tensor | None] | None = None
        self.segments: list[Segment] | None = None

    def feed(self, batch: Any, *, count: int, number: int) -> None:
        come = self._order.minibatches
        if come == 0:
            self._begin = self._replicas.first = number
            self._messages.begin(number)
        assert number == self._begin + come, "minibatches follow one another until a drain"
        if self._recorder is not None:
            self._recorder.begin(number)
        if self._first and self._replica < count:
            self._batches[come + self._replica] = batch
        self._run(self._order.feed(count))
        self.rounds += 1

    def drain(self, buffers: Iterable[Tensor]) -> None:
        weights = self.weights
        assert weights is not None
        minibatches = self._order.minibatches
        weights.check_values()
        weights.keep_from(None)
        self._tally.drain()
        self._run(self._order.drain())
        self.rounds = 0
        self._replicas.average_statistics_(buffers)
        assert not self._flights
        used, expected = weights.memory.segment_peak, _PEAKS[weights.mode](self._tally)
        assert used == expected, f"{used} sets of weights, the schedule has {expected}"
        if self.segments is not None:
            self.segments.append(
                Segment(
                    minibatches=minibatches,
                    version_of_forward=dict(weights.version_of_forward),
                    version_of_backward=dict(weights.version_of_backward),
                    peak_versions=used,
                )
            )
        weights.restart()
        self._tally = Tally(self._plan, self._rank)

    def _run(self, actions: Iterator[Action]) -> None:
        assert self.weights is not None
        own = self.weights.memory.parameters
        do = {"F": self._forward, "B": self._backward, "U": self._update}
        for action in actions:
            self._tally.see(action)
            number, of = action.number, "minibatch"
            if action.kind == "U":  # the update of a round, which its first minibatch identifies
                number = self._order.first_of(number)
                several = self._plan.replicas(self._number) > 1
                of = "the round that begins with minibatch" if several else of
            in_run = replace(action, number=self._begin + number)
            doing = f"{_DOING[action.kind]} of {of} {in_run.number}"
            # Layers use leaves: only users' code computes gradients of the parameters themselves.
            kept = nullcontext() if action.kind == "U" else untouched_gradients(own)
            with self._noting(doing, in_run), kept:
                do[action.kind](action.number)
        self.weights.note_values()

    def _forward(self, minibatch: int) -> None:
        weights = self.weights
        assert weights is not None
        included = weights.version * self._plan.replicas(0)
        if self._first:
            value, rest = self._open_minibatch(minibatch, self._batches.pop(minibatch))
        else:
            message = self._messages.receive(Kind.ACTIVATION, self._number - 1, minibatch)
            value, included = message.tree, message.meta["included"]
            rest = self._messages.receive(Kind.BATCH, 0, minibatch).tree if self._last else None
        assert included == included_at(self._plan, minibatch), included
        with self._slowed():
            leaves = weights.begin(
                minibatch,
                version=self._order.updates,
                ahead=self._order.ahead(minibatch) + self._beyond,
                included=included,
            )
            weights.keep_from(included_at(self._plan, self._order.following(minibatch)))
            in_run, around = self._begin + minibatch, self._step_around(rest)
            flight = self._stage.forward(value, minibatch=in_run, leaves=leaves, **around)
        self._flights[minibatch] = flight
        if not self._last:
            meta = {"included": included}
            self._messages.send(
                Kind.ACTIVATION, self._number + 1, minibatch, flight.output, meta=meta
            )
            flight.output = None

    def _backward(self, minibatch: int) -> None:
        weights = self.weights
        assert weights is not None
        leaves = weights.begin_backward(
            minibatch, ahead=self._order.ahead(minibatch) + self._beyond
        )
        flight = self._flights.pop(minibatch)
        if self._last:
            loss, logs = flight.loss, flight.extra
            assert loss is not None
            with self._slowed():
                self._events.before_backward(loss)
                upstream = flight.backward(None, leaves=leaves)
        else:
            message = self._messages.receive(Kind.GRADIENT, self._number + 1, minibatch)
            logs, gradients = message.meta["logs"], message.tree["gradients"]
            loss = message.tree["loss"].clone()
            with self._slowed():
                upstream = flight.backward(gradients, leaves=leaves)
            del message, gradients
        if not self._first:
            tree = {"gradients": upstream, "loss": loss}
            self._messages.send(
                Kind.GRADIENT, self._number - 1, minibatch, tree, meta={"logs": logs}
            )
        self._gradients = weights.finish(minibatch)
        del flight, leaves, upstream
        self._messages.release(minibatch)
        with moment(self._recorder, "logs"):
            self._events.done(minibatch, loss=loss, logs=logs)

    def _update(self, number: int) -> None:
        weights = self.weights
        assert weights is not None
        gradients, self._gradients = self._gradients, None
        with moment(self._recorder, "sums"):
            averaged = self._replicas.average(
                gradients or {}, minibatches=int(gradients is not None)
            )
        with self._slowed(), weights.updating():
            self._events.update(averaged, step=self._order.step_of(number))
