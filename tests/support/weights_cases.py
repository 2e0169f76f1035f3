"""Networks with batches, and plain training on clones of every version to compare with."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from sparsepipe.models.vgg import DenseGlobalMaxPool, sparse_vgg
from sparsepipe.runtime.weights import Weights
from sparsepipe.sparse import SparseTensor

Gradients = dict[str, Tensor | None]


def mlp() -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3)
    )


def mlp_batch(number: int) -> Tensor:
    return torch.randn(5, 6, generator=torch.Generator().manual_seed(number))


def conv() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv3d(2, 4, 3, padding=1, bias=False),
        nn.BatchNorm3d(4),
        nn.ReLU(),
        nn.Conv3d(4, 6, 2, stride=2),
        nn.GroupNorm(2, 6),
        DenseGlobalMaxPool(),
        nn.Linear(6, 3),
    )


def conv_batch(number: int) -> Tensor:
    return torch.randn(3, 2, 6, 6, 6, generator=torch.Generator().manual_seed(number))


def sparse() -> nn.Sequential:
    return sparse_vgg(11, 3, width=0.05, dropout=0.0)


def sparse_batch(number: int) -> SparseTensor:
    generator = torch.Generator().manual_seed(number)
    coords_N4 = (torch.rand(4, 12, 12, 12, generator=generator) < 0.1).nonzero().int()
    feats_NC = torch.randn(len(coords_N4), 1, generator=generator)
    return SparseTensor(feats_NC, coords_N4, spatial_shape=(12, 12, 12), batch_size=4)


@dataclass(frozen=True)
class Case:
    """How to make a network and its minibatches."""

    network: Callable[[], nn.Sequential]
    batch: Callable[[int], Any]

    def fresh(self) -> nn.Sequential:
        torch.manual_seed(7)
        return self.network()


CASES = {
    "mlp": Case(mlp, mlp_batch),
    "conv": Case(conv, conv_batch),
    "sparse": Case(sparse, sparse_batch),
}
SGD: Callable[..., torch.optim.Optimizer] = lambda parameters: torch.optim.SGD(  # noqa: E731
    parameters, lr=0.05, momentum=0.9, weight_decay=1e-3
)


def loss_of(output: Tensor) -> Tensor:
    return output.square().mean() + output[:, 0].mean()


def clones(network: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in network.named_parameters()}


def given(
    optimizer: torch.optim.Optimizer, network: nn.Module, gradients: Mapping[str, Any]
) -> None:
    """One step on gradients that were computed elsewhere."""
    for name, parameter in network.named_parameters():
        parameter.grad = gradients[name]
    optimizer.step()
    optimizer.zero_grad()


class Oracle:
    """Keeps clones of every version for ever and runs a minibatch on one of them in one go."""

    def __init__(
        self, network: nn.Module, optimizer: Callable[..., torch.optim.Optimizer] = SGD
    ) -> None:
        self._network = deepcopy(network)  # holds the newest version and the buffers
        self._optimizer = optimizer(self._network.parameters())
        self.history = [clones(self._network)]

    def gradients(self, version: int | Mapping[str, Tensor], value: Any) -> Gradients:
        """Of a minibatch on a version, or on weights that the caller computed."""
        chosen = self.history[version] if isinstance(version, int) else version
        worker = deepcopy(self._network)
        with torch.no_grad():
            for name, parameter in worker.named_parameters():
                parameter.copy_(chosen[name])
        loss_of(worker(value)).backward()
        with torch.no_grad():
            for mine, its in zip(self._network.buffers(), worker.buffers(), strict=True):
                mine.copy_(its)
        return {name: p.grad for name, p in worker.named_parameters()}

    def update(self, gradients: Gradients) -> None:
        given(self._optimizer, self._network, gradients)
        self.history.append(clones(self._network))

    def state(self) -> dict[str, Tensor]:
        return self._network.state_dict()


class Runner:
    """Drives weights through single events, as a worker does."""

    def __init__(self, case: Case, mode: str, *, optimizer: Any = SGD, **options: Any) -> None:
        self.case = case
        self.network = case.fresh()
        self.optimizer = optimizer(self.network.parameters())
        parameters = dict(self.network.named_parameters())
        self.weights = Weights(parameters, mode, self.optimizer, **options)
        self.losses: dict[int, Tensor] = {}
        self.gradients: Gradients = {}

    def forward(self, minibatch: int, **options: Any) -> dict[str, Tensor]:
        options = {"version": self.weights.version, **options}
        leaves = self.weights.begin(minibatch, **options)
        output = functional_call(self.network, leaves, (self.case.batch(minibatch),))
        self.losses[minibatch] = loss_of(output)
        return leaves

    def backward(self, minibatch: int, **options: Any) -> Gradients:
        self.weights.begin_backward(minibatch, **options)
        self.losses.pop(minibatch).backward()
        self.gradients = self.weights.finish(minibatch)
        return self.gradients

    def update(self, gradients: Gradients | None = None) -> None:
        with self.weights.updating():
            given(self.optimizer, self.network, gradients or self.gradients)


def alive_after(runner: Runner, actions: str, **forward: Callable[[int], Any]) -> Iterator[int]:
    """Versions alive after each of the actions, such as "F0 F1 B0 U0"."""
    for action in actions.split():
        minibatch = int(action[1:])
        if action[0] == "F":
            runner.forward(minibatch, **{key: rule(minibatch) for key, rule in forward.items()})
        elif action[0] == "B":
            runner.backward(minibatch)
        else:
            runner.update()
        yield 1 + runner.weights.memory.copies


def assert_same(found: Mapping[str, Tensor | None], expected: Mapping[str, Tensor | None]) -> None:
    """The same names and bits."""
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        other = found[name]
        if tensor is None or other is None:
            assert other is tensor, name
        else:
            torch.testing.assert_close(other, tensor, rtol=0, atol=0, msg=name)
