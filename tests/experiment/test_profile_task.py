"""The task profile, from the configuration to its files, and from there to a plan."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
import torch
from experiment_harness import SUPPORT, composed

from sparsepipe.errors import ConfigError, HardwareError, ProfileError, SparsePipeError
from sparsepipe.experiment.build import build_inventory
from sparsepipe.experiment.job import run_job
from sparsepipe.experiment.profile import profile
from sparsepipe.experiment.run import Run
from sparsepipe.experiment.rundir import RunDir
from sparsepipe.experiment.signals import SignalWatch
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


def test_a_training_without_an_end_has_no_share(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="sparsepipe"):
        done = run(*PROFILE, "trainer.max_epochs=-1")
    assert "no given end" in caplog.text
    assert "profile_share_of_training" not in json.loads(done.result.read_text())


@pytest.mark.parametrize(
    ("override", "error", "message"),
    [
        (("task.num_batches=0",), ProfileError, "num_batches=0"),
        (("task.num_batches=-1",), ProfileError, "num_batches=-1"),
        (("trainer.precision=bf16-mixed",), ConfigError, "float32 so far"),
        pytest.param(
            ("hardware=paper_8gpu",),
            HardwareError,
            "torch finds none",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU"),
        ),
    ],
)
def test_what_cannot_be_measured_is_refused(
    override: tuple[str, ...], error: type[SparsePipeError], message: str
) -> None:
    with pytest.raises(error, match=message) as caught:
        run(*PROFILE, *override)
    assert caught.value.remedy


def test_several_processes_are_refused(tmp_path: Path) -> None:
    config = composed(*PROFILE, "parallel=dp", "parallel.devices=2", "hardware.cpu_devices=2")
    alone = Run(
        config=config,
        directory=RunDir(tmp_path),
        inventory=build_inventory(config),
        watch=SignalWatch(),
    )
    with pytest.raises(ConfigError, match="profile runs as one process") as caught:
        profile(alone)
    assert "parallel=single" in caught.value.remedy


def test_no_measured_pass_is_refused() -> None:
    with pytest.raises(ProfileError, match="0 measured"):
        run(*PROFILE[:2], "task.num_measured=0")
