"""How fast a training would go does not depend on how long the simulated epoch is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sparsepipe.launch.job import run_job
from sparsepipe.schedule.communication import INBOX_DEPTH
from tests.support.command_line import composed
from tests.support.emulated_cases import BACKWARD_S, FORWARD_S, profile

PAPER = ("task=simulate", "hardware=paper_5gpu", "task.timeline_minibatches=1")


def result(outputs: Path, *overrides: str) -> dict[str, Any]:
    done = run_job(composed(f"paths.outputs={outputs}", *overrides))
    found: dict[str, Any] = json.loads(done.result.read_text())
    return found


@pytest.mark.parametrize("minibatches", [4, 16])
def test_data_parallelism_on_devices_that_are_alike(tmp_path: Path, minibatches: int) -> None:
    """On a link that takes no time a round takes what the layers take."""
    layers = profile()
    layers.save(tmp_path / "mlp.json")
    device = f"{{name: gpu, count: 8, profile: {{mlp: {tmp_path / 'mlp.json'}}}}}"
    found = result(
        tmp_path,
        "experiment=tiny",
        "task=simulate",
        "hardware=cores",
        f"hardware.value.hosts=[{{name: here, link: {{bytes_per_s: 1e15}}, devices: [{device}]}}]",
        "parallel=dp",
        f"task.minibatches={minibatches}",
        "task.timeline_minibatches=1",
    )
    round_s = layers.num_layers * (FORWARD_S + BACKWARD_S)
    assert found["minibatch_s"] == pytest.approx(round_s / 8, rel=1e-6)
    assert found["epoch_s"] == pytest.approx(-(-minibatches // 8) * round_s, rel=1e-6)
    assert found["busy_share"] == pytest.approx(1.0, rel=1e-6)


def test_a_short_epoch_tells_the_same_pace_as_a_long_one(tmp_path: Path) -> None:
    few, many = (
        result(tmp_path, *PAPER, "parallel=paper_mp", f"task.minibatches={count}")
        for count in (3, 154)
    )
    for key in ("minibatch_s", "dp_minibatch_s", "speedup_over_dp", "busy_share"):
        assert few[key] == pytest.approx(many[key], rel=1e-6)
    assert few["epoch_s"] < many["epoch_s"] / 10
    assert few["epoch_minibatches"] == 3


def test_messages_wait_where_they_do_in_training() -> None:
    task = composed("task=simulate", "hardware=paper_5gpu", "parallel=dp").to_dict()["task"]
    assert (task["outbox"], task["inbox"]) == (None, INBOX_DEPTH)
