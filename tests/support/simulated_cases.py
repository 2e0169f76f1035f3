"""Simulations of the paper's devices, and what they leave."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from sparsepipe.launch.job import run_job
from sparsepipe.runs.rundir import RunDir
from tests.support.command_line import composed

PAPER = ("task=simulate", "hardware=paper_5gpu", "task.timeline_minibatches=3")
SEARCHED = (*PAPER, "parallel=hete_mp", "parallel.search.bandwidth_bytes_per_s=60e6")
BY_HAND = (*PAPER, "parallel=pipeline", "parallel.plan.config=4-1", "parallel.plan.cuts=[24]")


def run(outputs: Path, *overrides: str) -> RunDir:
    return run_job(composed(f"paths.outputs={outputs}", *overrides))


def result(done: RunDir) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(done.result.read_text())
    return found


def layers_s(profile: str, layers: slice) -> float:
    """Forward and backward, read from the file as it is shipped."""
    text = (Path("sparsepipe/assets/profiles/paper") / profile).read_text()
    return sum(
        each["forward_s"] + each["backward_s"] for each in json.loads(text)["layers"][layers]
    )
