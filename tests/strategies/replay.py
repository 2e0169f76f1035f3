"""The oracle: one process replays the weights that each minibatch is recorded to have seen.

Delayed SGD, written down from its definition: minibatch m goes through the whole network at
once, each stage on the weights it had after the recorded number of updates; a stage's round
of gradients is averaged and given to its own optimizer.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F


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
        self.replicas = replicas
        # One copy of each stage for each of its replicas: batch norms see different batches.
        self.copies = [
            [copy.deepcopy(layers[a:b]) for _ in range(count)]
            for a, b, count in zip(bounds, bounds[1:], replicas, strict=False)
        ]
        self.masters = [
            [nn.Parameter(p.detach().clone()) for p in stage[0].parameters()]
            for stage in self.copies
        ]
        self.optimizers = [optimizer(m) if m else None for m in self.masters]

    def segment(
        self,
        batches: Sequence[tuple[Any, Tensor]],
        versions: Mapping[tuple[int, int], int],
        *,
        rates: Callable[[int, int], float] | None = None,
        predict: Callable[[int, int], int] | None = None,
        average: bool = True,
    ) -> list[float]:
        """Replays what ran between two drains; the losses.

        Args:
            batches: input and labels of each minibatch.
            versions: updates before the forward, by stage and minibatch.
            rates: learning rate of an update, by stage and round.
            predict: SpecTrain's updates to look ahead, by stage and minibatch.
        """
        history = [[[p.detach().clone() for p in masters]] for masters in self.masters]
        speeds: list[list[list[Tensor]]] = [[self._speed(s)] for s in range(len(self.masters))]
        sums: dict[tuple[int, int], list[list[Tensor | None]]] = {}
        losses = []
        for minibatch, (x, y) in enumerate(batches):
            run = []
            for stage, copies in enumerate(self.copies):
                replica = copies[minibatch % self.replicas[stage]]
                version = versions[stage, minibatch]
                values = history[stage][version]
                if predict is not None:
                    ahead, lr = predict(stage, minibatch), self._rate(stage)
                    values = [
                        torch.add(w, v, alpha=-ahead * lr) if ahead else w
                        for w, v in zip(values, speeds[stage][version], strict=True)
                    ]
                for parameter, value in zip(replica.parameters(), values, strict=True):
                    parameter.data = value.clone()
                    parameter.grad = None
                run.append(replica)
            value = x
            for replica in run:
                value = replica(value)
            loss = F.cross_entropy(value, y)
            loss.backward()
            losses.append(float(loss.detach()))
            for stage, replica in enumerate(run):
                number = minibatch // self.replicas[stage]
                done = sums.setdefault((stage, number), [])
                done.append([p.grad for p in replica.parameters()])
                full = len(done) == self.replicas[stage] or minibatch == len(batches) - 1
                if full:
                    self._update(stage, done, None if rates is None else rates(stage, number))
                    history[stage].append([p.detach().clone() for p in self.masters[stage]])
                    speeds[stage].append(self._speed(stage))
            if minibatch == len(batches) - 1:
                self._finish(history, sums)
        return losses

    def _finish(self, history: Any, sums: Any) -> None:
        for stage, copies in enumerate(self.copies):
            for replica in copies:
                for parameter, master in zip(
                    replica.parameters(), self.masters[stage], strict=True
                ):
                    parameter.data = master.detach().clone()
            for buffers in zip(*(replica.buffers() for replica in copies), strict=True):
                if buffers[0].is_floating_point():
                    mean = torch.stack([b.double() for b in buffers]).mean(0)
                else:
                    mean = torch.stack(buffers).amax(0)
                for buffer in buffers:
                    buffer.copy_(mean)

    def _update(self, stage: int, done: list[list[Tensor | None]], rate: float | None) -> None:
        optimizer = self.optimizers[stage]
        if optimizer is None:
            return
        for parameter, *gradients in zip(self.masters[stage], *done, strict=True):
            present = [g for g in gradients if g is not None]
            parameter.grad = sum(present) / len(done) if present else None  # type: ignore[assignment]
        if rate is not None:
            for group in optimizer.param_groups:
                group["lr"] = rate
        optimizer.step()

    def _speed(self, stage: int) -> list[Tensor]:
        optimizer = self.optimizers[stage]
        return [
            torch.zeros_like(p)
            if optimizer is None or optimizer.state.get(p, {}).get("momentum_buffer") is None
            else optimizer.state[p]["momentum_buffer"].clone()
            for p in self.masters[stage]
        ]

    def _rate(self, stage: int) -> float:
        optimizer = self.optimizers[stage]
        return 0.0 if optimizer is None else float(optimizer.param_groups[0]["lr"])

    def state(self) -> dict[str, Tensor]:
        """Parameters and buffers under the names of the whole Sequential."""
        first = 0
        found = {}
        for copies in self.copies:
            for number, layer in enumerate(copies[0]):
                for name, value in layer.state_dict().items():
                    found[f"{first + number}.{name}"] = value
            first += len(copies[0])
        return found
