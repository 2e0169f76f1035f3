"""Layers that draw from generators of every kind, recomputed against kept."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from sparsepipe.errors import ConfigError
from sparsepipe.runtime.stage import StageLayers
from tests.support.recomputation_cases import Ran, assert_equal, choices, ran, spans_of
from tests.support.weights_cases import Case, mlp_batch


class Masks(nn.Module):
    """Drops values by a generator."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.torchs = torch.Generator().manual_seed(1)
        self.numpys = np.random.default_rng(2)
        self.twister = np.random.RandomState(3)
        self.pythons = random.Random(4)
        self.system = random.SystemRandom()

    def forward(self, x: Tensor) -> Tensor:
        draws: dict[str, Callable[[], Any]] = {
            "torch": lambda: torch.rand(x.shape),
            "numpy": lambda: np.random.standard_normal(x.shape),  # noqa: NPY002
            "python": lambda: [[random.gauss() for _ in row] for row in x],
            "torchs": lambda: torch.rand(x.shape, generator=self.torchs),
            "numpys": lambda: self.numpys.random(x.shape),
            "twister": lambda: self.twister.standard_normal(x.shape),
            "pythons": lambda: [[self.pythons.random() for _ in row] for row in x],
        }
        return x * (torch.as_tensor(draws[self.kind]()) > 0.3).to(x.dtype)


KINDS = ("torch", "numpy", "python", "torchs", "numpys", "twister", "pythons")


def net_of(kind: str) -> nn.Sequential:
    inner = nn.Sequential(nn.Linear(8, 8), Masks(kind))
    return nn.Sequential(nn.Linear(6, 8), Masks(kind), nn.Tanh(), inner, nn.Linear(8, 3))


def trained(kind: str, spans: list[range], *, keyed: bool) -> tuple[Ran, list[float]]:
    """What is left of some minibatches, and what all generators draw afterwards."""
    made: list[nn.Sequential] = []

    def network() -> nn.Sequential:
        made.append(net_of(kind))
        return made[-1]

    np.random.seed(5)  # noqa: NPY002
    random.seed(6)
    found = ran(Case(network, mlp_batch), spans, order="F0 F1 B0 F2 B2 B1", keyed=keyed)
    masks = [module for module in made[-1].modules() if isinstance(module, Masks)]
    return found, [
        np.random.standard_normal(),  # noqa: NPY002
        random.gauss(),
        *(float(torch.rand((), generator=m.torchs)) for m in masks),
        *(m.numpys.random() for m in masks),
        *(m.twister.standard_normal() for m in masks),
        *(m.pythons.random() for m in masks),
    ]


@pytest.mark.parametrize("keyed", [False, True], ids=["plain", "keyed"])
@pytest.mark.parametrize("kind", KINDS)
def test_draws_are_repeated_and_go_on_where_they_were(kind: str, keyed: bool) -> None:
    kept, drawn = trained(kind, [], keyed=keyed)
    for spans in choices(5).values():
        found, after = trained(kind, spans, keyed=keyed)
        assert_equal(found, kept)
        assert after == drawn


def test_generators_that_are_replaced_between_minibatches_are_found() -> None:
    gradients = []
    for spans in ([], spans_of((0, 2))):
        torch.manual_seed(7)
        network = nn.Sequential(nn.Linear(6, 8), Masks("numpys"))
        stage = StageLayers(network, network, first=0, last=1, recomputed=spans)
        for number in range(2):
            network[1].numpys = np.random.default_rng(number)
            flight = stage.forward(mlp_batch(number), minibatch=number, leaves={})
            flight.backward([torch.ones(5, 8)], leaves={})
        gradients.append(network[0].weight.grad)
    assert torch.equal(*gradients)


class Changing(nn.Module):
    """Does something to its generators whenever it runs."""

    def __init__(self, change: Callable[[Changing], None]) -> None:
        super().__init__()
        self.rng = np.random.default_rng(1)
        self.change = change

    def forward(self, x: Tensor) -> Tensor:
        drawn = self.rng.random()
        self.change(self)
        return x * drawn


def makes(layer: Changing) -> None:
    layer.late = np.random.default_rng()


def replaces(layer: Changing) -> None:
    layer.rng = np.random.default_rng()


@pytest.mark.parametrize("change", [makes, replaces])
def test_layers_that_have_other_generators_after_they_ran_are_refused(
    change: Callable[[Changing], None],
) -> None:
    layers = nn.Sequential(nn.Linear(6, 8), Changing(change))
    stage = StageLayers(layers, layers, first=0, last=1, recomputed=spans_of((0, 2)))
    with pytest.raises(ConfigError, match="creates or replaces a random generator") as refused:
        stage.forward(mlp_batch(0), minibatch=0, leaves={})
    assert "__init__" in refused.value.remedy
