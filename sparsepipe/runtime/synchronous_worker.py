"""The worker of a synchronous pipeline: all of a minibatch, then its update.

Weights have one version: that of the parameters themselves. The microbatches of a minibatch add to
their gradients in the order of the schedule, as gradients accumulate in one process.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from sparsepipe.errors import ConfigError
from sparsepipe.runtime.base_worker import Microbatch, MinibatchEvents, StageWorker, moment
from sparsepipe.runtime.batch_norm import MinibatchNorms
from sparsepipe.runtime.microbatches import BatchPart, split
from sparsepipe.runtime.stage import Flight
from sparsepipe.runtime.transport import Kind, Message
from sparsepipe.schedule import Action, MinibatchSupply
from sparsepipe.schedule.synchronous import MicrobatchOrder


@dataclass(frozen=True, slots=True, kw_only=True)
class _Opened:
    """A microbatch as this stage takes it in."""

    samples: int
    weight: float
    value: Any
    rest: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class _InFlight:
    """A microbatch between its forward and its backward here; without samples it has no flight."""

    samples: int
    weight: float
    flight: Flight | None


class SynchronousWorker(StageWorker[MinibatchEvents]):
    """Runs one rank's share of every minibatch.

    A minibatch is what all ranks of stage 0 read in a round. Each cuts its batch into the
    microbatches that the schedule gives it. A microbatch's loss, the mean over its samples,
    counts by its share of its reader's samples, so that gradients are those of the mean over
    these; several readers count alike.

    Args:
        microbatches: T, parts of a minibatch.

    Attributes:
        sizes_read: samples of each microbatch that this rank has cut of its last batch; empty where
            it has read none.
        most_in_flight: most microbatches with samples at a time that had gone forward here and not
            backward yet.
    """

    def __init__(
        self,
        *,
        order: MicrobatchOrder,
        microbatches: int,
        parameters: Mapping[str, nn.Parameter],
        norms: MinibatchNorms,
        **common: Any,
    ) -> None:
        super().__init__(**common)
        self._order = order
        self._microbatches = microbatches
        self._parameters = dict(parameters)
        self._norms = norms
        self._own = self._plan.microbatches_of(self._rank, microbatches)
        self._rounds = 0
        self._minibatch = 0  # its number in the whole run
        self._read: dict[int, tuple[BatchPart, float]] = {}
        self._opened: dict[int, _Opened] = {}
        self._in_flight: dict[int, _InFlight] = {}
        self._returned: list[Microbatch] = []
        self.sizes_read: list[int] = []
        self.most_in_flight = 0

    @property
    def rounds(self) -> int:
        return self._rounds

    def feed(self, batch: Any, *, count: int, number: int) -> None:
        self._minibatch = self._replicas.first = number
        if self._recorder is not None:
            self._recorder.begin(number)
        self._messages.begin(number * self._microbatches, parts=self._microbatches)
        if self._first:
            with self._noting(f"cutting minibatch {number}"):
                reads = self._messages.leads and self._replica < count
                self._read = self._cut(batch if reads else None, count)
        self._taken_gradients()  # any that are left there are not this minibatch's
        with self._norms.gathering():
            for action in self._order(
                self._plan, self._rank, MinibatchSupply(1), self._microbatches
            ):
                self._do(action)
        assert not self._in_flight
        self._rounds += 1

    def _do(self, action: Action) -> None:
        in_run = replace(action, number=self._minibatch)
        if action.kind == "U":
            with self._recorded(in_run):
                self._finish()
            return
        assert action.microbatch is not None
        if action.kind == "B":
            self._open_next()
        described = self._description(action.kind, action.microbatch)
        with self._noting(described), self._recorded(in_run):
            do = {"F": self._forward, "B": self._backward}
            do[action.kind](action.microbatch)

    def drain(self, buffers: Iterable[Tensor]) -> None:
        # Nothing is under way between minibatches.
        self._replicas.average_statistics_(buffers)
        self._rounds = 0

    def _cut(self, batch: Any, count: int) -> dict[int, tuple[BatchPart, float]]:
        """This rank's microbatches with what their losses count, by number."""
        if batch is None:
            self.sizes_read = []
            return {number: (BatchPart(0, None), 0.0) for number in self._own}
        parts = split(batch, len(self._own))
        self.sizes_read = [part.samples for part in parts]
        samples = sum(self.sizes_read)
        shares = (part.samples / samples / count for part in parts)
        return dict(zip(self._own, zip(parts, shares, strict=True), strict=True))

    def _description(self, kind: str, number: int) -> str:
        doing = {"F": "forward", "B": "backward"}[kind]
        return f"{doing} of microbatch {number} of minibatch {self._minibatch}"

    def _forward(self, number: int) -> None:
        opened = self._opened.pop(number, None) or self._take_in(number)
        flight = self._computed(number, opened) if opened.samples else None
        self._in_flight[number] = _InFlight(
            samples=opened.samples, weight=opened.weight, flight=flight
        )
        in_flight = sum(each.flight is not None for each in self._in_flight.values())
        self.most_in_flight = max(self.most_in_flight, in_flight)
        if not self._last:
            output = None if flight is None else flight.output
            meta = {"samples": opened.samples, "weight": opened.weight}
            self._messages.send(Kind.ACTIVATION, self._number + 1, number, output, meta=meta)
            if flight is not None:
                flight.output = None

    def _open_next(self) -> None:
        """Takes in what goes forward next, while a gradient may still be on its way."""
        number = next(iter(self._read), None)
        if number is not None and not self._opened and not self._last:
            with self._noting(self._description("F", number)):
                self._opened[number] = self._take_in(number)

    def _take_in(self, number: int) -> _Opened:
        """A microbatch that is read here, with the step run up to its layers, or received."""
        if self._first:
            part, weight = self._read.pop(number)
            shares = {"samples": part.samples, "weight": weight}
            meta = self._messages.share(lambda: Message(minibatch=number, meta=shares)).meta
            samples, value, rest = meta["samples"], None, None
            if samples:
                with explaining_single_values(
                    samples, parts=self._microbatches, before_layers=True
                ):
                    value, rest = self._open_minibatch(number, part.batch)
            return _Opened(samples=samples, weight=meta["weight"], value=value, rest=rest)
        message = self._messages.receive(Kind.ACTIVATION, self._number - 1, number)
        samples, weight = message.meta["samples"], message.meta["weight"]
        rest = self._rest(number) if samples else None
        return _Opened(samples=samples, weight=weight, value=message.tree, rest=rest)

    def _computed(self, number: int, opened: _Opened) -> Flight:
        with self._slowed(), explaining_single_values(opened.samples, parts=self._microbatches):
            in_run = self._minibatch * self._microbatches + number
            return self._flight(opened.value, opened.rest, minibatch=in_run)

    def _backward(self, number: int) -> None:
        microbatch = self._in_flight.pop(number)
        loss, logs, upstream = self._computed_back(number, microbatch)
        if not self._first:
            tree = {"gradients": upstream, "loss": loss}
            self._messages.send(Kind.GRADIENT, self._number - 1, number, tree, meta={"logs": logs})
        del upstream
        self._messages.release(number)
        if loss is not None:
            self._returned.append(
                Microbatch(
                    minibatch=self._minibatch,
                    number=number,
                    samples=microbatch.samples,
                    weight=microbatch.weight,
                    loss=loss,
                    logs=logs,
                )
            )

    def _computed_back(
        self, number: int, microbatch: _InFlight
    ) -> tuple[Tensor | None, Any, list[Tensor | None] | None]:
        """Loss, logs and gradients of the input of a microbatch; nothing of one without samples."""
        flight = microbatch.flight
        if self._last:
            if flight is None:
                return None, None, None
            loss = flight.loss
            assert loss is not None
            with self._slowed():
                self._events.before_backward(loss)
                weight = torch.full_like(loss, microbatch.weight)
                return loss, flight.extra, flight.backward([weight])
        message = self._messages.receive(Kind.GRADIENT, self._number + 1, number)
        if flight is None:
            return None, None, None
        gradients, logs = message.tree["gradients"], message.meta["logs"]
        loss = message.tree["loss"].clone()
        del message
        with self._slowed():
            return loss, logs, flight.backward(gradients)

    def _finish(self) -> None:
        """The update, with the sum of what all replicas' microbatches gave."""
        gradients = self._taken_gradients()
        returned, self._returned = self._returned, []
        with self._noting(f"update of minibatch {self._minibatch}"):
            with moment(self._recorder, "sums"):
                total = self._replicas.total(gradients)
            self._norms.move(self._replicas)
            with moment(self._recorder, "logs"):
                self._events.done(sorted(returned, key=lambda part: part.number))
            with self._slowed():
                self._events.update(total, step=self._rounds)

    def _taken_gradients(self) -> dict[str, Tensor | None]:
        """The gradients that the parameters have gathered, taken from them."""
        gradients = {name: parameter.grad for name, parameter in self._parameters.items()}
        for parameter in self._parameters.values():
            parameter.grad = None
        return gradients


@contextmanager
def explaining_single_values(
    samples: int, *, parts: int, before_layers: bool = False
) -> Iterator[None]:
    """Explains torch's error of a batch norm that gets a single value of each channel."""
    try:
        yield
    except ValueError as error:
        if not is_of_single_values(error):
            raise
        has = "has 1 sample" if samples == 1 else f"has {samples} samples"
        fewer = f"fewer microbatches than {parts}, or " if parts > 1 else ""
        there = "make it the first entry of the Sequential and " if before_layers else ""
        raise ConfigError(
            f"a batch norm is to normalise a microbatch that {has}, and sees a single value of "
            f"each channel in it, which has no variance ({error})",
            remedy=f"take {fewer}larger batches, so that each microbatch has more samples; where "
            "it is the epoch's last batch that is too small, leave it out (drop_last=True of the "
            f"loader, or trainer.limit_train_batches); or {there}set batch_norm=running, which "
            "ties no samples together",
        ) from error


def is_of_single_values(error: ValueError) -> bool:
    """Whether a batch norm got a single value of each channel: group norms raise the same message,
    which is about something else there.
    """
    if "more than 1 value per channel" not in str(error):
        return False
    frames = traceback.walk_tb(error.__traceback__)
    return any(isinstance(frame.f_locals.get("self"), _BatchNorm) for frame, _ in frames)
