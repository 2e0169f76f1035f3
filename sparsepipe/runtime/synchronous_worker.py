"""The worker of a synchronous pipeline: it runs all of a minibatch, then the update.

Weights have one version, the parameters themselves. The microbatches of a minibatch add to the
parameters' gradients in the schedule's order, as when gradients accumulate in one process.
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
from sparsepipe.runtime.base_worker import (
    Microbatch,
    MinibatchEvents,
    StageWorker,
    moment,
    untouched_gradients,
)
from sparsepipe.runtime.batch_norm import MinibatchNorms
from sparsepipe.runtime.microbatches import BatchPart, split
from sparsepipe.runtime.stage import Flight
from sparsepipe.runtime.transport import Kind, Message
from sparsepipe.schedule import MinibatchSupply
from sparsepipe.schedule.synchronous import MicrobatchOrder


@dataclass(slots=True, kw_only=True)
class _OwnPart:
    """A microbatch on this rank: first its input, then its flight; neither without samples."""

    samples: int
    weight: float
    scale: float = 1.0  # of the weight: that of the loss for each sample
    value: Any = None
    rest: Any = None
    flight: Flight | None = None


class SynchronousWorker(StageWorker[MinibatchEvents]):
    """Runs one rank of a synchronous pipeline.

    A minibatch is what all ranks of stage 0, the readers, read in a round. Each reader cuts its
    batch into those of the ``microbatches`` that it has by the schedule. A microbatch's loss, a
    mean over its samples, is weighted with its share of its reader's samples, so that gradients are
    those of the mean loss over each reader's samples, averaged over the readers. If a loss has a
    weight of its own (:attr:`Steps.weight`), that takes the place of the number of samples; the
    last stage alone knows it, so the sum of all weights divides the gradients before the update.

    Attributes:
        sizes_read: numbers of samples of the microbatches that this rank cut from its last batch.
        most_in_flight: most microbatches with samples that were in flight here at a time.
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
        self._minibatch = 0  # its number in the whole run
        self._read: dict[int, tuple[BatchPart, float]] = {}
        self._opened: dict[int, _OwnPart] = {}
        self._in_flight: dict[int, _OwnPart] = {}
        self._returned: list[Microbatch] = []
        self._excess = 0.0  # of the weights of the microbatches that came back, over their shares
        self.sizes_read: list[int] = []
        self.most_in_flight = 0

    def feed(self, batch: Any, *, count: int, number: int) -> None:
        self._minibatch = self._replicas.first = number
        if self._recorder is not None:
            self._recorder.begin(number)
        self._messages.begin(number * self._microbatches, parts=self._microbatches)
        if self._first:
            with self._noting(f"cutting minibatch {number}"):
                reads = self._messages.leads and self._replica < count
                nothing = [BatchPart(0, None) for _ in self._own]
                parts = split(batch, len(self._own)) if reads else nothing
            self.sizes_read = [part.samples for part in parts if reads]
            samples = sum(self.sizes_read) or 1
            shares = [part.samples / samples / count for part in parts]
            self._read = dict(zip(self._own, zip(parts, shares, strict=True), strict=True))
        for parameter in self._parameters.values():
            parameter.grad = None  # any that is left there is not this minibatch's
        supply = MinibatchSupply(1)
        with self._norms.gathering():
            for action in self._order(self._plan, self._rank, supply, self._microbatches):
                in_run = replace(action, number=number)
                if action.kind == "U":
                    with self._noting(f"update of minibatch {number}", in_run):
                        self._finish()
                    continue
                part = action.microbatch
                assert part is not None
                following = next(iter(self._read), None)
                ahead = action.kind == "B" and not self._opened and not self._last
                if ahead and following is not None:
                    # What goes forward next is read while a gradient may still be on its way.
                    with self._noting(f"forward of microbatch {following} of minibatch {number}"):
                        self._opened[following] = self._take_in(following)
                doing, do = "forward", self._forward
                if action.kind == "B":
                    doing, do = "backward", self._backward
                with self._noting(f"{doing} of microbatch {part} of minibatch {number}", in_run):
                    do(part)
        assert not self._in_flight
        self.rounds += 1

    def drain(self, buffers: Iterable[Tensor]) -> None:
        # Nothing is under way between minibatches.
        self._replicas.average_statistics_(buffers)
        self.rounds = 0

    def _forward(self, number: int) -> None:
        part = self._opened.pop(number, None) or self._take_in(number)
        if part.samples:
            in_run = self._minibatch * self._microbatches + number
            around = self._step_around(part.rest)
            explained = explaining_single_values(part.samples, parts=self._microbatches)
            with self._slowed(), explained, untouched_gradients(self._parameters):
                part.flight = self._stage.forward(part.value, minibatch=in_run, **around)
            if self._last and (weight := self._steps.weight) is not None:
                part.scale = weight / part.samples
        part.value = part.rest = None
        self._in_flight[number] = part
        in_flight = sum(each.flight is not None for each in self._in_flight.values())
        self.most_in_flight = max(self.most_in_flight, in_flight)
        if not self._last:
            output = None if part.flight is None else part.flight.output
            meta = {"samples": part.samples, "weight": part.weight}
            self._messages.send(Kind.ACTIVATION, self._number + 1, number, output, meta=meta)
            if part.flight is not None:
                part.flight.output = None

    def _take_in(self, number: int) -> _OwnPart:
        """Runs the step of a microbatch up to the layers, or receives the layers' input."""
        if self._first:
            part, weight = self._read.pop(number)
            shares = {"samples": part.samples, "weight": weight}
            meta = self._messages.share(lambda: Message(minibatch=number, meta=shares)).meta
            opened = _OwnPart(samples=meta["samples"], weight=meta["weight"])
            if opened.samples:
                explained = explaining_single_values(
                    opened.samples, parts=self._microbatches, before_layers=True
                )
                with explained, untouched_gradients(self._parameters):
                    opened.value, opened.rest = self._open_minibatch(number, part.batch)
            return opened
        message = self._messages.receive(Kind.ACTIVATION, self._number - 1, number)
        samples, weight = message.meta["samples"], message.meta["weight"]
        has_rest = self._last and samples
        rest = self._messages.receive(Kind.BATCH, 0, number).tree if has_rest else None
        return _OwnPart(samples=samples, weight=weight, value=message.tree, rest=rest)

    def _backward(self, number: int) -> None:
        part = self._in_flight.pop(number)
        flight, part.flight = part.flight, None
        loss, logs, upstream = None, None, None
        if self._last:
            if flight is not None:
                loss, logs = flight.loss, flight.extra
                assert loss is not None
                factor = part.weight * part.scale
                with self._slowed():
                    with untouched_gradients(self._parameters):
                        self._events.before_backward(loss)
                    # A loss without weight may be 0 / 0, and so its gradient.
                    upstream = flight.backward([torch.full_like(loss, factor) if factor else None])
        else:
            message = self._messages.receive(Kind.GRADIENT, self._number + 1, number)
            gradients, logs = message.tree["gradients"], message.meta["logs"]
            part.scale = message.meta["scale"]
            loss = None if flight is None else message.tree["loss"].clone()
            del message
            if flight is not None:
                with self._slowed():
                    upstream = flight.backward(gradients)
            del gradients
        del flight
        if not self._first:
            tree = {"gradients": upstream, "loss": loss}
            meta = {"logs": logs, "scale": part.scale}
            self._messages.send(Kind.GRADIENT, self._number - 1, number, tree, meta=meta)
        del upstream
        self._messages.release(number)
        self._excess += part.weight * (part.scale - 1)
        if loss is not None:
            self._returned.append(
                Microbatch(
                    minibatch=self._minibatch,
                    number=number,
                    samples=part.samples,
                    weight=part.weight * part.scale,
                    loss=loss,
                    logs=logs,
                )
            )

    def _finish(self) -> None:
        """Updates the weights with the sum of the gradients of all replicas' microbatches."""
        gradients = {name: parameter.grad for name, parameter in self._parameters.items()}
        for parameter in self._parameters.values():
            parameter.grad = None
        returned, self._returned = self._returned, []
        with moment(self._recorder, "sums"):
            total = self._replicas.total(gradients, excess=self._excess)
        if self._excess and all(gradient is None for gradient in total.values()):
            # No loss has a weight: torch's gradient of ignored labels is 0, which moves momenta.
            total = {name: torch.zeros_like(p) for name, p in self._parameters.items()}
        self._excess = 0.0
        self._norms.move(self._replicas)
        with moment(self._recorder, "logs"):
            self._events.done(sorted(returned, key=lambda part: part.number))
        with self._slowed():
            self._events.update(total, step=self.rounds)


@contextmanager
def explaining_single_values(
    samples: int, *, parts: int, before_layers: bool = False
) -> Iterator[None]:
    """Context of a microbatch, one of ``parts``, in which a batch norm's error about a single value
    per channel becomes a ConfigError. ``before_layers``: whether code before the layers runs.
    """
    try:
        yield
    except ValueError as error:
        if not is_of_single_values(error):
            raise
        has = "has 1 sample" if samples == 1 else f"has {samples} samples"
        fewer = f"fewer microbatches than {parts}, or " if parts > 1 else ""
        there = "make that norm the first entry of the Sequential and " if before_layers else ""
        raise ConfigError(
            f"a batch norm got a microbatch that {has}, with a single value per channel, which has "
            f"no variance ({error})",
            remedy=f"use {fewer}larger batches, so that each microbatch has more samples; if only "
            "the epoch's last batch is too small, leave it out (drop_last=True of the loader, or "
            f"trainer.limit_train_batches); or {there}set batch_norm=running, which normalises "
            "samples independently of each other",
        ) from error


def is_of_single_values(error: ValueError) -> bool:
    """Whether a batch norm raised ``error`` about a single value; group norms use the same text."""
    if "more than 1 value per channel" not in str(error):
        return False
    frames = traceback.walk_tb(error.__traceback__)
    return any(isinstance(frame.f_locals.get("self"), _BatchNorm) for frame, _ in frames)
