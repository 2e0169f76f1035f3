"""Costs by hand, from the equations."""

from __future__ import annotations

import pytest

from sparsepipe.errors import ConfigError
from sparsepipe.partition.costs.model import PRESETS, cost_model


@pytest.mark.parametrize(
    ("name", "stage_s", "cut_s"),
    [
        # 12 s of compute, 60 bytes of parameters, 3 devices, 10 bytes/s; 40 bytes cut.
        ("eq4", (12 + 2 * 2 * 60 / 10) / 3, 40 / 10),
        ("pipedream", (12 + 4 * 2 * 60 / (3 * 10)) / 3, 2 * 40 / (10 * 3)),
        ("sparsepipe_mp", (12 + 2 * 2 * 60 / (3 * 10)) / 3, 2 * 40 / (10 * 3)),
        ("sparsepipe_hete", (12 + 2 * 2 * 60 / (3 * 10)) / 3, 2 * 40 / 10),
        ("4_whole", (12 + 4 * 2 * 60 / (3 * 10)) / 3, 2 * 40 / 10),
        ("2_shared", (12 + 2 * 2 * 60 / (3 * 10)) / 3, 2 * 40 / (10 * 3)),
    ],
)
def test_costs_by_the_equations(name: str, stage_s: float, cut_s: float) -> None:
    model = cost_model(name)
    assert model.stage_s(12, 60, replicas=3, bytes_per_s=10) == pytest.approx(stage_s)
    assert 40 * model.cut_s_per_byte(3, bytes_per_s=10) == pytest.approx(cut_s)


@pytest.mark.parametrize("name", PRESETS)
def test_one_device_reduces_nothing(name: str) -> None:
    assert cost_model(name).stage_s(12, 60, replicas=1, bytes_per_s=10) == 12


def test_an_unknown_model_is_refused_with_those_there_are() -> None:
    with pytest.raises(ConfigError, match="sparsepipe_hete"):
        cost_model("gpipe")
