"""The benchmark that compares profiles of one device: what it makes of given ones, and a run."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest

from sparsepipe.profiling import Profile
from tests.support.instances import profile_of

BENCHMARK = Path(__file__).parents[3] / "benchmarks" / "profile_repeatability.py"


def profile(*times_s: float, step_s: float) -> Profile:
    costs = [
        {"forward_s": time_s / 4, "backward_s": 3 * time_s / 4, "parameter_bytes": 1000}
        for time_s in times_s
    ]
    return profile_of(costs, model="net", step_s=step_s)


def report(capsys: pytest.CaptureFixture[str], *profiles: Profile) -> tuple[bool, list[str]]:
    names: dict[str, Any] = runpy.run_path(str(BENCHMARK))
    taken = [names["Taken"].of(one, devices=2, bandwidth_bytes_per_s=1.0) for one in profiles]
    met = names["report"](taken)
    return met, capsys.readouterr().out.splitlines()


def test_unlike_profiles_do_not(capsys: pytest.CaptureFixture[str]) -> None:
    # By the first profile 1-1 at 2 is best, by the second 1-1 at 1: each costs the other 3 for 2.
    met, said = report(
        capsys, profile(1.0, 1.0, 2.0, step_s=4.0), profile(2.0, 1.0, 1.0, step_s=8.0)
    )
    assert not met
    assert said[-3:] == [
        "totals lie apart by 0.0%, goal 10%: met",
        "a plan by another profile costs more by 50.0%, goal 3%: MISSED",
        "layers differ from the step by 50.0%, goal 10%: MISSED",
    ]
