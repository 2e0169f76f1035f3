"""Copies of stashed weights: from a profile's file to the pace of a simulated training."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from sparsepipe.launch.job import run_job
from tests.support.command_line import composed
from tests.support.emulated_cases import BACKWARD_S, FORWARD_S, profile

COPY_S = 0.005


@pytest.mark.parametrize(
    ("told", "mode", "copies"),
    [
        (True, "stash", True),
        (True, "vertical_sync", True),
        (True, "none", False),
        (True, "spectrain", False),
        (False, "stash", False),
    ],
)
def test_they_count_where_weights_are_stashed_and_profiles_tell(
    tmp_path: Path, told: bool, mode: str, copies: bool
) -> None:
    one = profile()
    each = tuple(replace(layer, copy_s=COPY_S) for layer in one.layers)
    replace(one, layers=each if told else one.layers).save(tmp_path / "mlp.json")
    device = f"{{name: gpu, count: 2, profile: {{mlp: {tmp_path / 'mlp.json'}}}}}"
    done = run_job(
        composed(
            f"paths.outputs={tmp_path}",
            "experiment=tiny",
            "task=simulate",
            "hardware=cores",
            f"hardware.value.hosts=[{{name: here, link: {{bytes_per_s: 1e15}}, "
            f"devices: [{device}]}}]",
            "parallel=pipeline",
            "parallel.plan.config=1-1",
            "parallel.plan.cuts=[2]",
            f"parallel.strategy.mode={mode}",
        )
    )
    found = json.loads(done.result.read_text())
    stage_s = 2 * (FORWARD_S + BACKWARD_S)
    expected_s = stage_s + 2 * COPY_S * copies
    assert found["minibatch_s"] == pytest.approx(expected_s, rel=1e-6)
