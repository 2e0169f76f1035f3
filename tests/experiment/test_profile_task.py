"""The task profile, from the configuration to its files, and from there to a plan."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from experiment_harness import SUPPORT, composed

from sparsepipe.errors import ProfileError
from sparsepipe.experiment.job import run_job
from sparsepipe.experiment.rundir import RunDir
from sparsepipe.profiling import Profile
from sparsepipe.schedule import Plan

PROFILE = ("experiment=tiny", "task=profile", "task.num_warmup=1", "task.num_measured=4")


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.syspath_prepend(str(SUPPORT))
    monkeypatch.chdir(tmp_path)


def run(*overrides: str) -> RunDir:
    return run_job(composed(*overrides))


def test_a_profile_and_the_plan_that_it_leads_to(tmp_path: Path) -> None:
    done = run(*PROFILE)
    found = Profile.load(done.path / "profile.json")
    assert [layer.kind for layer in found.layers][:1] == ["Linear"]
    assert all(layer.forward_s > 0 for layer in found.layers)
    assert found.meta["num_measured"] == 4
    assert found.meta["model"] == "mlp"
    assert (done.path / "shares.png").read_bytes().startswith(b"\x89PNG")
    result = json.loads(done.result.read_text())
    assert result["kind"] == "measured"
    assert result["layers_s"] == pytest.approx(found.compute_s)
    assert result["profile_share_of_training"] > 0
    device = found.meta["device"]
    planned = run(
        "experiment=tiny",
        "task=partition",
        "task.search=exact",
        "hardware.cpu_devices=3",
        "task.bandwidth_bytes_per_s=1e9",
        f"++task.profiles={{{device}: {done.path / 'profile.json'}}}",
    )
    plan = Plan.from_json(planned.plan.read_text())
    assert plan.num_ranks == 3
    assert plan.num_layers == found.num_layers


def test_no_measured_pass_is_refused() -> None:
    with pytest.raises(ProfileError, match="0 measured"):
        run(*PROFILE[:2], "task.num_measured=0")
