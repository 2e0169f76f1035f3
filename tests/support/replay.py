"""The oracle: one process replays the weights that each minibatch is recorded to have seen.

Delayed SGD, written down from its definition: minibatch m goes through the whole network at
once, each stage on the weights it had after the recorded number of updates; a stage's round
of gradients is averaged and given to its own optimizer.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Gradients = list[Tensor | None]


@dataclass(frozen=True)
class Seen:
    """The weights that a minibatch sees in a stage.

    Args:
        version: those after so many updates since the last drain,
        ahead: and so many more steps of lr * v, v being the momentum of that time,
        rate: with this lr.
    """

    version: int
    ahead: int = 0
    rate: float = 0.0


@dataclass(frozen=True)
class Past:
    """What a stage's weights and SGD's momentum were after some update."""

    weights: list[Tensor]
    momentum: list[Tensor]


class Replay:
    """A network in stages, in one process.

    Args:
        layers: the network; not changed.
        bounds: first layer of each stage, and the number of layers.
        replicas: of each stage.
        optimizer: makes one from parameters.
    """

    def __init__(
        self,
        layers: nn.Sequential,
        *,
        bounds: Sequence[int],
        replicas: Sequence[int],
        optimizer: Callable[[Any], torch.optim.Optimizer],
    ) -> None:
        self.stages = [
            Stage(layers[a:b], replicas=count, optimizer=optimizer)
            for (a, b), count in zip(pairwise(bounds), replicas, strict=True)
        ]

    def segment(
        self,
        batches: Sequence[tuple[Any, Tensor]],
        forward: Callable[[int, int], Seen],
        *,
        backward: Callable[[int, int], Seen] | None = None,
        rate: Callable[[int, int], float] | None = None,
    ) -> list[float]:
        """Replays what ran between two drains; the losses.

        Args:
            batches: input and labels of each minibatch.
            forward: the weights of a stage's forward, by stage and minibatch.
            backward: those of its backward, if they are others.
            rate: learning rate of an update, by stage and round.
        """
        for stage in self.stages:
            stage.begin()
        losses = []
        for minibatch, batch in enumerate(batches):
            losses.append(self._train(minibatch, batch, forward, backward))
            for number, stage in enumerate(self.stages):
                if stage.round_is_full() or minibatch == len(batches) - 1:
                    stage.update(None if rate is None else rate(number, stage.updates))
        for stage in self.stages:
            stage.end()
        return losses

    def _train(
        self,
        minibatch: int,
        batch: tuple[Any, Tensor],
        forward: Callable[[int, int], Seen],
        backward: Callable[[int, int], Seen] | None,
    ) -> float:
        """One minibatch through the whole network; each stage keeps its gradient."""
        value, labels = batch
        for number, stage in enumerate(self.stages):
            stage.use(minibatch, forward(number, minibatch))
            value = stage.replica(minibatch)(value)
        loss = F.cross_entropy(value, labels)
        if backward is not None:
            for number, stage in enumerate(self.stages):
                stage.use(minibatch, backward(number, minibatch))
        loss.backward()
        for stage in self.stages:
            stage.take_gradient(minibatch)
        return float(loss.detach())

    def state(self) -> dict[str, Tensor]:
        """Parameters and buffers under the names of the whole Sequential."""
        layers = [layer for stage in self.stages for layer in stage.replica(0)]
        return {
            f"{number}.{name}": value
            for number, layer in enumerate(layers)
            for name, value in layer.state_dict().items()
        }


class Stage:
    """Some layers with the weights that they had at all times since the last drain.

    There is a copy of the layers for each replica, since batch norms see different batches.
    """

    def __init__(
        self,
        layers: nn.Sequential,
        *,
        replicas: int,
        optimizer: Callable[[Any], torch.optim.Optimizer],
    ) -> None:
        self._copies = [copy.deepcopy(layers) for _ in range(replicas)]
        self._newest = [nn.Parameter(p.detach().clone()) for p in layers.parameters()]
        self._optimizer = optimizer(self._newest) if self._newest else None
        self._past: list[Past] = []
        self._round: list[Gradients] = []

    @property
    def updates(self) -> int:
        """Since the last drain."""
        return len(self._past) - 1

    def replica(self, minibatch: int) -> nn.Sequential:
        """The copy that a minibatch goes through."""
        return self._copies[minibatch % len(self._copies)]

    def begin(self) -> None:
        """After a drain: nothing is known of earlier weights."""
        self._past = [self._present()]

    def use(self, minibatch: int, seen: Seen) -> None:
        """Writes weights into a replica: under its graph, if it has run forward already."""
        past = self._past[seen.version]
        parameters = self.replica(minibatch).parameters()
        for parameter, w, v in zip(parameters, past.weights, past.momentum, strict=True):
            value = torch.add(w, v, alpha=-seen.ahead * seen.rate) if seen.ahead else w
            parameter.data.copy_(value)

    def take_gradient(self, minibatch: int) -> None:
        """Adds a minibatch's gradient to those of the round."""
        parameters = list(self.replica(minibatch).parameters())
        self._round.append([p.grad for p in parameters])
        for parameter in parameters:
            parameter.grad = None

    def round_is_full(self) -> bool:
        """Whether every replica has had its minibatch of the round."""
        return len(self._round) == len(self._copies)

    def update(self, rate: float | None) -> None:
        """One step with the mean gradient of the round, if there is a round."""
        if not self._round:
            return
        gradients, self._round = self._round, []
        if self._optimizer is not None:
            for parameter, *every in zip(self._newest, *gradients, strict=True):
                parameter.grad = _mean(every)
            for group in self._optimizer.param_groups:
                group["lr"] = group["lr"] if rate is None else rate
            self._optimizer.step()
        self._past.append(self._present())

    def end(self) -> None:
        """A drain: all replicas get the newest weights, and the mean of their statistics."""
        for layers in self._copies:
            for parameter, newest in zip(layers.parameters(), self._newest, strict=True):
                parameter.data.copy_(newest.detach())
        for buffers in zip(*(layers.buffers() for layers in self._copies), strict=True):
            if buffers[0].is_floating_point():
                agreed = torch.stack([b.double() for b in buffers]).mean(0)
            else:
                agreed = torch.stack(buffers).amax(0)
            for buffer in buffers:
                buffer.copy_(agreed)

    def _present(self) -> Past:
        return Past(
            weights=[p.detach().clone() for p in self._newest],
            momentum=[self._momentum(p) for p in self._newest],
        )

    def _momentum(self, parameter: nn.Parameter) -> Tensor:
        assert self._optimizer is not None
        found = self._optimizer.state.get(parameter, {}).get("momentum_buffer")
        return torch.zeros_like(parameter) if found is None else found.clone()


def _mean(gradients: Sequence[Tensor | None]) -> Tensor | None:
    """Over all minibatches of a round; those without a gradient count as zero."""
    present = [g for g in gradients if g is not None]
    return sum(present[1:], present[0]) / len(gradients) if present else None
