"""What a worker asks and tells: of both ends of the pipeline, and of what it has done."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor


class Steps(Protocol):
    """What a minibatch is for, at both ends of the pipeline."""

    def open(self, batch: Any) -> tuple[Any, Any]:
        """The input of the layers, and what the last stage is to have of the batch."""

    def close(self, rest: Any, run: Callable[[], Any]) -> tuple[Tensor, Any]:
        """Loss and logs, given the batch's rest and what gives the layers' output."""

    def close_evaluation(self, rest: Any, run: Callable[[], Any]) -> tuple[Any, Any]:
        """Result and logs of a step that does not train."""

    def whole(self, batch: Any, run: Callable[[Any], Any]) -> tuple[Tensor, Any]:
        """Loss and logs where both ends are here, given what takes the layers' input."""

    def whole_evaluation(self, batch: Any, run: Callable[[Any], Any]) -> tuple[Any, Any]:
        """The same of a step that does not train."""


class Events(Protocol):
    """What the worker tells while it works."""

    def before_backward(self, loss: Tensor) -> None:
        """The last stage is about to run a backward."""

    def update(self, gradients: Mapping[str, Tensor | None], *, step: int) -> None:
        """Apply the gradients of a round to this stage's parameters, in place.

        ``step`` is the round of stage 0 since the last drain whose learning rate counts. It is
        the same for all replicas, which may have come to the update in different ones.
        """

    def done(self, minibatch: int, *, loss: Tensor, logs: Any) -> None:
        """A minibatch has gone backward through this stage."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Microbatch:
    """A part of a minibatch that has gone forward and backward through a stage.

    Attributes:
        minibatch: whose part it is, by its number in the whole run.
        number: of the part, from 0.
        samples: how many it has; one at least.
        weight: what its loss counts in the minibatch's.
        loss: the mean over its samples.
        logs: what its step logged.
    """

    minibatch: int
    number: int
    samples: int
    weight: float
    loss: Tensor
    logs: Any


class MinibatchEvents(Protocol):
    """What the worker of a synchronous pipeline tells while it works."""

    def before_backward(self, loss: Tensor) -> None:
        """The last stage is about to run a microbatch's backward."""

    def done(self, microbatches: Sequence[Microbatch]) -> None:
        """A minibatch has gone backward through this stage; those of it that came this way.

        In the order of their numbers; a rank of several replicas has its own ones only.
        """

    def update(self, gradients: Mapping[str, Tensor | None], *, step: int) -> None:
        """Apply a minibatch's gradients to this stage's parameters, in place.

        ``step`` counts minibatches since the last drain.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """What ran between two drains on this rank.

    Attributes:
        minibatches: how many, over all replicas.
        version_of_forward: by minibatch of this rank, updates before its forward.
        version_of_backward: the version that its backward used.
        peak_versions: most sets of weights in use at a time.
    """

    minibatches: int
    version_of_forward: Mapping[int, int]
    version_of_backward: Mapping[int, int]
    peak_versions: int
