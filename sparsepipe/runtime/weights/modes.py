"""The ways to choose a minibatch's weights, and the memory of the weight sets in use.

Versions count the updates of this rank since the last drain: version v follows v updates.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from sparsepipe.errors import ConfigError


class Mode(StrEnum):
    """Which weights a minibatch uses."""

    STASH = "stash"
    """The backward uses the weights that the forward used (PipeDream's weight stashing)."""
    VERTICAL_SYNC = "vertical_sync"
    """Stashing of weights that, on all stages, include the gradients of the same minibatches."""
    SPECTRAIN = "spectrain"
    """The forward uses a prediction of the weights that the minibatch's own update will change."""
    NONE = "none"
    """Forward and backward use the newest weights: plain asynchronous training."""


class Memory:
    """The sets of weights in memory: makes copies, counts them and reuses their memory.

    Only parameters that require a gradient are copied: the others are never updated.

    Attributes:
        copies: number of sets in use besides the one that the parameters hold.
        peak_versions: largest number of sets in use at a time, including the parameters' own.
        segment_peak: the same since the present segment began.
        peak_bytes: most bytes in use at a time, which is all that was ever allocated.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter]) -> None:
        self.parameters = dict(parameters)
        distinct = {id(parameter) for parameter in self.parameters.values()}
        assert len(distinct) == len(self.parameters), "a parameter goes by one name"
        self.copies = 0
        self.peak_versions = self.segment_peak = 1
        self._bytes = self.peak_bytes = sum(p.nbytes for p in self.parameters.values())
        self._free: dict[str, list[Tensor]] = {name: [] for name in self.parameters}

    def take(self) -> dict[str, Tensor]:
        """Memory for one more set, by parameter name; its values are undefined."""
        taken = {}
        for name, parameter in self.parameters.items():
            if parameter.requires_grad:
                free = self._free[name]
                taken[name] = free.pop() if free else torch.empty_like(parameter.data)
        self.copies += 1
        self._bytes += sum(tensor.nbytes for tensor in taken.values())
        self.segment_peak = max(self.segment_peak, 1 + self.copies)
        self.peak_versions = max(self.peak_versions, self.segment_peak)
        self.peak_bytes = max(self.peak_bytes, self._bytes)
        return taken

    def move(self) -> dict[str, Tensor]:
        """Moves the parameters to other memory; returns the old memory, which keeps its values.

        The parameters move, since graphs hold views of the old memory that cannot be moved.
        """
        left = {}
        for name, buffer in self.take().items():
            parameter = self.parameters[name]
            left[name] = parameter.data
            buffer.copy_(parameter.data)
            parameter.data = buffer
        return left

    def give_back(self, tensors: Mapping[str, Tensor]) -> None:
        """Frees a set from :meth:`take` or :meth:`move`, whose memory later ones reuse."""
        assert self.copies > 0
        self.copies -= 1
        self._bytes -= sum(tensor.nbytes for tensor in tensors.values())
        for name, tensor in tensors.items():
            self._free[name].append(tensor)


@dataclass(slots=True, kw_only=True, eq=False)
class WeightSet:
    """One set of weights.

    Attributes:
        tensors: values by parameter name; empty while the parameters themselves hold them.
        users: number of minibatches in flight that use the set.
    """

    version: int
    tensors: dict[str, Tensor] = field(default_factory=dict)
    users: int = 0


class Policy:
    """Chooses weights of minibatches in flight; this class, mode ``none``, always the newest."""

    def __init__(self, memory: Memory) -> None:
        self._memory = memory
        self.version = 0

    def take(self, *, ahead: int, included: int | None) -> WeightSet:
        """Chooses the weights of a minibatch; :meth:`.Weights.begin` explains the arguments."""
        return WeightSet(version=self.version)

    def begin_backward(self, weights: WeightSet, *, ahead: int) -> int:
        """Prepares the weights of a minibatch for its backward; returns their version."""
        return self.version

    def give(self, weights: WeightSet) -> None:
        """Takes back the weights of a minibatch after its backward."""

    def keep_from(self, included: int | None) -> None:
        """Frees unused sets that include fewer than ``included`` minibatches; None: all of them."""

    @contextmanager
    def updating(self) -> Iterator[None]:
        """Context in which the parameters change in place; at its end ``version`` grows by one."""
        yield
        self.version += 1

    def note_values(self) -> None:
        """Notes the values in use; called before code runs that is not the pipeline's."""

    def check_values(self) -> None:
        """Raises a ConfigError if noted values changed in code that is not the pipeline's."""

    def restart(self) -> None:
        self.version = 0


class Stash(Policy):
    """Weight stashing: an update moves the parameters first if their values are still needed.

    Args:
        watched: whether to compare values, to find code that changes them between updates.
    """

    def __init__(self, memory: Memory, *, watched: bool) -> None:
        super().__init__(memory)
        self._watched = watched
        self._live = WeightSet(version=0)
        self._kept: dict[int, WeightSet] = {}  # sets that the parameters no longer hold, by version
        self._needed_from = math.inf  # the oldest version that a minibatch may still ask for
        self._marks: dict[str, tuple[int, ...]] = {}
        self._noted: tuple[int, Tensor] | None = None  # version and checksums

    def take(self, *, ahead: int, included: int | None) -> WeightSet:
        return self._use(self._live)

    def _use(self, weights: WeightSet) -> WeightSet:
        if weights is self._live:
            if weights.users:
                self._check_untouched()
            else:
                self._marks = self._mark()
        weights.users += 1
        return weights

    def begin_backward(self, weights: WeightSet, *, ahead: int) -> int:
        if weights is self._live:
            self._check_untouched()
        return weights.version

    def give(self, weights: WeightSet) -> None:
        weights.users -= 1
        assert weights.users >= 0
        self._drop_unneeded()

    @contextmanager
    def updating(self) -> Iterator[None]:
        if self._live.users:
            self._check_untouched()
        if self._live.users or self.version >= self._needed_from:
            left = self._live
            left.tensors = self._memory.move()
            self._kept[left.version] = left
            self._live = WeightSet(version=left.version)
        yield
        self.version += 1
        self._live.version = self.version

    def note_values(self) -> None:
        if not (self._watched and self._live.users and self._memory.parameters):
            self._noted = None
        elif self._noted is None or self._noted[0] != self.version:
            self._noted = self.version, checksums(self._memory.parameters.values())

    def check_values(self) -> None:
        if self._noted is None or not self._live.users or self._noted[0] != self.version:
            return
        found = checksums(self._memory.parameters.values())
        differ = (found != self._noted[1]).any(dim=1)
        if differ.any():
            names = list(self._memory.parameters)
            raise _changed(names[int(differ.int().argmax())])

    def restart(self) -> None:
        super().restart()
        assert not self._kept
        self._live.version = 0
        self._noted = None

    def _drop_unneeded(self) -> None:
        for version, weights in list(self._kept.items()):
            if not weights.users and version < self._needed_from:
                self._memory.give_back(self._kept.pop(version).tensors)

    def _mark(self) -> dict[str, tuple[int, ...]]:
        parameters = self._memory.parameters.items()
        return {name: (p._version, p.data_ptr(), p.requires_grad) for name, p in parameters}

    def _check_untouched(self) -> None:
        for name, mark in self._mark().items():
            if mark != self._marks[name]:
                raise _changed(name)


def _changed(name: str) -> ConfigError:
    return ConfigError(
        f"{name} was changed between two updates, while minibatches were in flight",
        remedy="change parameters in the optimizer's step or its hooks, or between "
        "epochs, when the pipeline is empty",
    )


def checksums(parameters: Iterable[Tensor]) -> Tensor:
    """int64 [n, 2], by parameter: sum of 8-byte words, and sum of what is left, as float64 bits."""
    found = []
    for tensor in (parameter.data for parameter in parameters):
        real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
        if real.untyped_storage().nbytes() == real.nbytes:  # dense, in whatever order
            flat = real.as_strided((real.numel(),), (1,), 0)
        else:
            flat = real.reshape(-1)
        if flat.storage_offset() * flat.element_size() % 8:  # a part of a larger tensor
            flat = flat.clone()
        whole = flat.numel() - flat.numel() * real.element_size() % 8 // real.element_size()
        rest = flat[whole:].double().sum()
        found.append(torch.stack([flat[:whole].view(torch.int64).sum(), rest.view(torch.int64)]))
    return torch.stack(found)


class VerticalSync(Stash):
    """Chooses the kept version that includes the same minibatches as stage 0's weights did."""

    def __init__(self, memory: Memory, *, watched: bool, replicas: int) -> None:
        super().__init__(memory, watched=watched)
        self._replicas = replicas  # minibatches that an update of this stage includes
        self._needed_from = 0

    def take(self, *, ahead: int, included: int | None) -> WeightSet:
        assert included is not None, "vertical sync needs to know what stage 0's weights include"
        self.keep_from(included)
        version = included // self._replicas
        assert version <= self.version, f"version {version} is not there yet"
        return self._use(self._live if version == self.version else self._kept[version])

    def keep_from(self, included: int | None) -> None:
        version = math.inf if included is None else included // self._replicas
        assert version >= self._needed_from, f"version {version} may be gone"
        self._needed_from = version
        self._drop_unneeded()

    def restart(self) -> None:
        self.keep_from(None)
        super().restart()
        self._needed_from = 0


class SpecTrain(Policy):
    """Gives each minibatch its own prediction of the weights some updates ahead, by SGD's momentum.

    After the idea of Chen, Yang and Cheng, "Efficient and Robust Parallel DNN Training through
    Model Parallelism on Multi-GPU Platform": w - s * lr * v, where w are the weights, v is the
    smoothed gradient (SGD's momentum buffer) and s the number of updates. lr is the learning rate
    at the time of the prediction; for a forward, when the minibatch enters the pipeline. The
    prediction assumes that v does not change: every later step would then be lr * v, whatever
    ``dampening``, ``nesterov``, ``weight_decay`` and ``maximize`` are.

    With ``predict_backward`` weights are predicted again for the backward, in place of those that
    the forward used: gradients of layers then use the forward's activations and the new weights.
    """

    def __init__(
        self, memory: Memory, optimizer: Optimizer | None, *, predict_backward: bool
    ) -> None:
        super().__init__(memory)
        self._optimizer = optimizer
        self._predict_backward = predict_backward
        if optimizer is None:
            learns = any(parameter.requires_grad for parameter in memory.parameters.values())
            assert not learns, "parameters that learn have an optimizer"
            return
        momenta = [group.get("momentum", 0) for group in optimizer.param_groups]
        # A class derived from SGD may take other steps.
        if type(optimizer) is not SGD or not all(momentum > 0 for momentum in momenta):
            raise ConfigError(
                "SpecTrain predicts the steps of SGD with momentum, but the optimizer is "
                f"{type(optimizer).__name__} with momenta {momenta}",
                remedy="train with torch.optim.SGD and a momentum above 0, or choose weight "
                "stashing, which works with every optimizer",
            )

    def take(self, *, ahead: int, included: int | None) -> WeightSet:
        weights = WeightSet(version=self.version, tensors=self._memory.take(), users=1)
        self._predict(weights.tensors, updates=ahead)
        return weights

    def begin_backward(self, weights: WeightSet, *, ahead: int) -> int:
        if not self._predict_backward:
            return weights.version
        self._predict(weights.tensors, updates=ahead)
        return self.version

    def give(self, weights: WeightSet) -> None:
        self._memory.give_back(weights.tensors)

    @torch.no_grad()
    def _predict(self, buffers: Mapping[str, Tensor], *, updates: int) -> None:
        """Writes the weights expected after ``updates`` more to ``buffers``, rounded as by SGD."""
        assert updates >= 0, updates
        groups = [] if self._optimizer is None else self._optimizer.param_groups
        rates = {id(p): float(group["lr"]) for group in groups for p in group["params"]}
        state: Mapping[Any, Any] = {} if self._optimizer is None else self._optimizer.state
        for name, buffer in buffers.items():
            parameter = self._memory.parameters[name]
            # Not by index: the state is a defaultdict, which would add an entry.
            velocity: Tensor | None = state.get(parameter, {}).get("momentum_buffer")
            if velocity is None or updates == 0:
                buffer.copy_(parameter.data)
            else:
                alpha = -updates * rates[id(parameter)]
                torch.add(parameter.data, velocity, alpha=alpha, out=buffer)
