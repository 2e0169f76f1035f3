"""The weights of each minibatch in flight on one rank."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor, nn
from torch.optim import Optimizer

from sparsepipe.errors import ConfigError
from sparsepipe.runtime.weights.modes import (
    Memory,
    Mode,
    Policy,
    SpecTrain,
    Stash,
    VerticalSync,
    WeightSet,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Flight:
    weights: WeightSet
    leaves: dict[str, Tensor]
    places: dict[str, int]  # in memory


class Weights:
    """Gives each minibatch its weights, as leaves for ``torch.func.functional_call``.

    Forward and backward of a minibatch may lie several updates apart. A minibatch goes through
    :meth:`begin`, :meth:`begin_backward` and :meth:`finish`; updates happen inside
    :meth:`updating`. Minibatches and versions count from 0 in each segment, which runs between two
    drains (see :meth:`restart`). If layers keep something computed from their weights for the
    backward, as convolutions under autocast do, the backward uses that in every mode.

    Args:
        parameters: the stage's parameters by name.
        mode: which weights a minibatch uses.
        optimizer: SpecTrain reads its momentum; None: nothing learns.
        replicas: number of replicas of this stage, and so of minibatches per update.
        predict_backward: whether SpecTrain predicts for the backward too, after its paper's idea;
            ``ahead`` of :meth:`begin` then differs.
        watched: whether to compare values before and after code that is not the pipeline's.

    Attributes:
        updating: makes a context in which the parameters change in place, to the next version.
        keep_from: to be called with the smallest ``included`` of any later :meth:`begin`, or None
            if none follows before :meth:`restart`; lets vertical sync free versions early.
        note_values: to be called before code runs that is not the pipeline's.
        check_values: to be called after such code; raises a ConfigError if it changed a parameter
            that a minibatch in flight uses.
        memory: holds and counts the sets of weights in use.
        version_of_forward: by minibatch, the version that its forward used or predicted from.
        version_of_backward: the same for its backward.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        mode: Mode | str,
        optimizer: Optimizer | None = None,
        *,
        replicas: int = 1,
        predict_backward: bool = False,
        watched: bool = True,
    ) -> None:
        if mode not in list(Mode):
            raise ConfigError(
                f"unknown mode of weight versions: {str(mode)!r}",
                remedy=f"choose one of {', '.join(Mode)}",
            )
        if predict_backward and mode != Mode.SPECTRAIN:
            raise ConfigError(
                f"predict_backward is set, but mode {str(mode)!r} predicts nothing",
                remedy="unset it, or choose the mode spectrain",
            )
        self.mode = Mode(mode)
        self.predict_backward = predict_backward
        self.memory = memory = Memory(parameters)
        self._policy: Policy
        match self.mode:
            case Mode.STASH:
                self._policy = Stash(memory, watched=watched)
            case Mode.VERTICAL_SYNC:
                self._policy = VerticalSync(memory, watched=watched, replicas=replicas)
            case Mode.SPECTRAIN:
                self._policy = SpecTrain(memory, optimizer, predict_backward=predict_backward)
            case Mode.NONE:
                self._policy = Policy(memory)
        self.updating = self._policy.updating
        self.keep_from = self._policy.keep_from
        self.note_values = self._policy.note_values
        self.check_values = self._policy.check_values
        self._matched = self.mode is not Mode.NONE and not predict_backward
        self._flights: dict[int, _Flight] = {}
        self.version_of_forward: dict[int, int] = {}
        self.version_of_backward: dict[int, int] = {}

    @property
    def version(self) -> int:
        """Number of updates since the segment began: the version that the parameters hold."""
        return self._policy.version

    @property
    def in_flight(self) -> tuple[int, ...]:
        """Numbers of the minibatches that have begun but not finished, the earliest first."""
        return tuple(self._flights)

    def begin(
        self, minibatch: int, *, version: int, ahead: int = 0, included: int | None = None
    ) -> dict[str, Tensor]:
        """The leaves for a minibatch's forward, by parameter name; each has its own gradient.

        Args:
            minibatch: its number in the segment.
            version: number of updates before this forward, by the schedule.
            ahead: number of updates that SpecTrain looks ahead: those of this stage until the
                minibatch's own or, with ``predict_backward``, until its return to stage 0.
            included: number of minibatches whose gradients stage 0's weights included when this
                one went forward there; needed for vertical sync. It never decreases.
        """
        assert minibatch not in self.version_of_forward, f"minibatch {minibatch} began before"
        assert version == self.version, f"{self.version} updates, the schedule has {version}"
        self.check_values()
        weights = self._policy.take(ahead=ahead, included=included)
        # ``.data`` has a version counter of its own, which ``detach()`` would share: modes write to
        # memory in place under graphs on purpose, and nothing else does.
        leaves = {
            name: weights.tensors.get(name, p).data.requires_grad_(p.requires_grad)
            for name, p in self.memory.parameters.items()
        }
        places = {name: leaf.data_ptr() for name, leaf in leaves.items()}
        self._flights[minibatch] = _Flight(weights=weights, leaves=leaves, places=places)
        self.version_of_forward[minibatch] = weights.version
        return dict(leaves)

    def begin_backward(self, minibatch: int, *, ahead: int = 0) -> dict[str, Tensor]:
        """The leaves for a minibatch's backward: the objects that :meth:`begin` gave.

        Their values are the forward's, except in mode ``none`` (the present ones) and where
        SpecTrain predicts for the backward, ``ahead`` updates from now. Raises a ConfigError if a
        layer changed its parameters in the forward.
        """
        flight = self._flights[minibatch]
        for name, leaf in flight.leaves.items():
            if leaf._version or leaf.data_ptr() != flight.places[name]:
                raise ConfigError(
                    f"{name} was changed by a layer's forward, while minibatches were in flight",
                    remedy="compute the changed weight anew in each forward, as "
                    "torch.nn.utils.parametrize does, or change it in on_before_optimizer_step",
                )
        version = self._policy.begin_backward(flight.weights, ahead=ahead)
        if self._matched:
            assert version == self.version_of_forward[minibatch]
        self.version_of_backward[minibatch] = version
        return dict(flight.leaves)

    def finish(self, minibatch: int) -> dict[str, Tensor | None]:
        """Returns a minibatch's gradients by name, None for missing ones, and frees its weights."""
        assert minibatch in self.version_of_backward, f"minibatch {minibatch} had no backward"
        flight = self._flights.pop(minibatch)
        gradients = {name: tensor.grad for name, tensor in flight.leaves.items()}
        for tensor in flight.leaves.values():
            tensor.grad = None  # a leaf that is still referred to must not keep its gradient alive
        self._policy.give(flight.weights)
        return gradients

    def restart(self) -> None:
        """Begins a segment after a drain: resets version, records and ``memory.segment_peak``."""
        assert not self._flights, f"in flight: {self.in_flight}"
        self._policy.restart()
        self.memory.segment_peak = 1 + self.memory.copies
        self.version_of_forward.clear()
        self.version_of_backward.clear()
