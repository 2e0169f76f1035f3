"""Which Sequential is cut, and what may lie on both sides of a cut."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sparsepipe.errors import ConfigError
from sparsepipe.schedule import Plan
from sparsepipe.strategies.pipeline.stage_plan import StagePlacement, find_layers


class Residual(nn.Sequential):
    """Not what a pipeline would run: its layers one by one."""

    def forward(self, x: Tensor) -> Tensor:
        return x + super().forward(x)


class Named(nn.Sequential):
    """The same as its parent, under another name."""


def holding(layers: nn.Module) -> nn.Module:
    module = nn.Module()
    module.layers = layers
    return module


@pytest.mark.parametrize("name", [None, "layers"])
def test_a_sequential_with_a_forward_of_its_own(name: str | None) -> None:
    entries = nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)
    with pytest.raises(ConfigError, match="layers is a Residual with a forward of its own") as no:
        find_layers(holding(Residual(*entries)), name)
    assert "entry of the Sequential" in no.value.remedy
    replaced = nn.Sequential(*entries)
    replaced.forward = lambda x: x  # type: ignore[method-assign]
    with pytest.raises(ConfigError, match="of its own"):
        find_layers(holding(replaced), name)
    for layers in (nn.Sequential(*entries), Named(*entries), Named(Residual(*entries))):
        assert find_layers(holding(layers), name) == "layers"


class Shifted(nn.Module):
    def __init__(self, shift: Any) -> None:
        super().__init__()
        if isinstance(shift, nn.Parameter):
            self.shift = shift
        else:
            self.register_buffer("shift", shift)


@pytest.mark.parametrize(("kind", "word"), [(torch.Tensor, "buffer"), (nn.Parameter, "parameter")])
def test_what_two_stages_would_share(kind: Any, word: str) -> None:
    shared = kind(torch.ones(2))
    module = holding(nn.Sequential(Shifted(shared), Shifted(shared), Shifted(kind(torch.ones(2)))))

    def check(cut: int) -> None:
        plan = Plan.of(config="1-1", cuts=[cut], num_layers=3)
        StagePlacement(module=module, name="layers", plan=plan).check()

    check(2)
    with pytest.raises(ConfigError) as refused:
        check(1)
    assert refused.value.message == (
        f"layers.0.shift (stage 0) and layers.1.shift (stage 1) are one {word}"
    )
