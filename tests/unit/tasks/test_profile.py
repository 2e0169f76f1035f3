"""The task profile, from the configuration to its files, and from there to a plan."""

from __future__ import annotations

import csv
import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.demos.boring_classes import BoringModel, RandomDataset
from torch.utils.data import DataLoader
from typing_extensions import override

from sparsepipe.errors import ConfigError, HardwareError, PlanError, ProfileError, SparsePipeError
from sparsepipe.launch.job import run_job
from sparsepipe.profiling import Profile
from sparsepipe.runs.rundir import RunDir
from sparsepipe.schedule import Plan
from sparsepipe.tasks.profile import batches_of_training
from sparsepipe.utils.host import usable_cores
from sparsepipe.utils.process import give_freed_memory_back
from tests.support.command_line import composed
from tests.support.freed_blocks import kept_mib, needs_glibcs_own
from tests.support.picture_checks import shares_picture

pytestmark = pytest.mark.usefixtures("workplace")
PROFILE = ("experiment=tiny", "task=profile", "task.num_warmup=1", "task.num_measured=4")


def run(*overrides: str) -> RunDir:
    return run_job(composed(*overrides))


def test_a_profile_and_the_plan_that_it_leads_to(tmp_path: Path) -> None:
    done = run(*PROFILE)
    found = Profile.load(done.path / "profile.json")
    assert [layer.kind for layer in found.layers][:1] == ["Linear"]
    assert all(layer.forward_s > 0 for layer in found.layers)
    assert found.meta["num_measured"] == 4
    assert found.meta["model"] == "mlp"
    rows = (done.path / "profile.txt").read_text().splitlines()
    assert rows[0].startswith("| layer ")
    assert len(rows) == 2 + found.num_layers
    assert (done.path / "shares.png").read_bytes().startswith(b"\x89PNG")
    result = json.loads(done.result.read_text())
    assert result["kind"] == "measured"
    assert result["layers_s"] == pytest.approx(found.compute_s)
    assert result["update_s"] == found.update_s > 0
    assert result["copy_s"] == found.copy_s > 0
    assert 0 < found.load_s < found.meta["cost_s"]
    assert found.meta["optimizer"] == "torch.optim.SGD momentum"
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


@needs_glibcs_own
def test_runs_on_processors_keep_what_they_free() -> None:
    give_freed_memory_back()
    assert kept_mib() < 10
    run(*PROFILE)
    assert kept_mib() > 190


def test_of_somebodys_own_module_no_update_is_measured() -> None:
    found = Profile.load(run(*PROFILE, "model=own").path / "profile.json")
    assert found.update_s is None
    assert found.copy_s is None
    assert "optimizer" not in found.meta
    with pytest.raises(ConfigError, match="refuses its settings"):
        run(*PROFILE, "optim.optimizer.nesterov=true", "optim.optimizer.momentum=0")


def test_the_picture_marks_the_cuts_of_a_plan_amid_all_devices(tmp_path: Path) -> None:
    first = run(*PROFILE).path / "profile.json"
    layers = Profile.load(first).num_layers
    plan = tmp_path / "plan.json"
    plan.write_text(Plan.of(config="1-1", cuts=[2], num_layers=layers).to_json())
    known = f"{{name: measured, count: 1, accelerator: cpu, profile: {{mlp: {first}}}}}"
    hosts = f"[{{name: here, devices: [{known}, {{name: core, count: 1, accelerator: cpu}}]}}]"
    beside = (*PROFILE, "hardware=cores", f"hardware.value.hosts={hosts}", "task.device=core")
    done = run(*beside, f"task.plan={plan}")
    files = {"measured": first, "core": done.path / "profile.json"}
    assert (done.path / "shares.png").read_bytes() == shares_picture(files, tmp_path, cuts=[2])
    plan.write_text(Plan.of(config="1-1", cuts=[3], num_layers=layers).to_json())
    assert run(*beside, f"task.plan={plan}").path != done.path, "another plan is another picture"


def test_the_picture_shows_profiles_of_other_batches_and_widths_beside(tmp_path: Path) -> None:
    first = run(*PROFILE).path / "profile.json"
    wide = (*PROFILE, "model.width=16", "data.batch_size=8")
    done = run(*wide, f"++task.beside={{printed: {first}}}")
    with (done.path / "shares.csv").open() as stream:
        rows = list(csv.DictReader(stream))
    (ours,) = {name.partition(": ")[0] for name in rows[0]} - {"layer", "printed"}
    for name, path in (("printed", first), (ours, done.path / "profile.json")):
        times_s = [layer.compute_s for layer in Profile.load(path).layers]
        shares = [sum(times_s[: i + 1]) / sum(times_s) for i in range(len(times_s))]
        assert [float(row[f"{name}: compute time"]) for row in rows] == pytest.approx(shares)
    assert run(*wide).path != done.path, "another picture"
    with pytest.raises(ProfileError, match="printed has 52 layers, but the network has 4"):
        run(*PROFILE, "++task.beside={printed: profiles/paper/titan_xp.json}")


@pytest.mark.parametrize(
    ("text", "message"), [(None, "cannot be read"), ("{}", "plan"), ("long", "covers 9 layers")]
)
def test_a_plan_that_does_not_fit_is_refused_before_anything_is_measured(
    text: str | None, message: str, tmp_path: Path
) -> None:
    plan = tmp_path / "plan.json"
    if text is not None:
        long = Plan.of(config="1-1", cuts=[2], num_layers=9).to_json()
        plan.write_text(long if text == "long" else text)
    with pytest.raises(PlanError, match=message):
        run(*PROFILE, f"task.plan={plan}")
    assert not list(tmp_path.rglob("profile.json"))


@pytest.fixture
def _threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Lets a profile choose its threads, and puts them back."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("_threads", "networks_for_ranks")
@pytest.mark.parametrize("in_sweep", [False, pytest.param(True, marks=pytest.mark.full)])
def test_a_named_device_is_measured_as_it_is_used(in_sweep: bool) -> None:
    config = composed(*PROFILE, "hardware=two_speeds", "task.device=half-speed")
    done = run_job(config, fresh_processes=in_sweep)
    found = Profile.load(done.path / "profile.json")
    assert (found.meta["device"], found.meta["slowdown"]) == ("half-speed", 2.0)
    assert found.meta["threads"] == max(1, usable_cores() // 2)
    assert found.meta["model_settings"] == {"width": 8, "dropout": 0.0, "norm": False}
    assert (found.meta["num_classes"], found.meta["batch_size"]) == (2, 4)


def test_profiles_of_other_networks_and_workloads(caplog: pytest.LogCaptureFixture) -> None:
    measured = run(*PROFILE, "hardware=cores").path / "profile.json"
    given = ("experiment=tiny", "hardware=cores", "task=partition",
             "task.bandwidth_bytes_per_s=1e9", f"++task.profiles={{core: {measured}}}")  # fmt: skip
    with pytest.raises(ProfileError, match="mlp with width=8, not with width=16") as caught:
        run(*given, "model.width=16")
    assert "model.width=8" in caught.value.remedy
    with caplog.at_level(logging.INFO, logger="sparsepipe"):
        run(*given, "data.batch_size=8")
    assert "core was measured with data.batch_size=4, not 8" in caplog.text
    training = ("experiment=tiny", "hardware=cores", "parallel=hete_mp",
                f"parallel.search.profiles={{core: {measured}}}")  # fmt: skip
    with pytest.raises(ProfileError, match=r"data\.batch_size=4, not 8") as caught:
        run(*training, "data.batch_size=8")
    assert "task=profile" in caught.value.remedy
    with pytest.raises(ProfileError, match="width=8, not with width=16"):
        run(*training, "model.width=16")
    told = json.loads(measured.read_text())
    told["meta"]["num_classes"] = 40
    measured.write_text(json.dumps(told))
    with pytest.raises(ProfileError, match="for 40 classes, but the data have 2"):
        run(*training)


@pytest.mark.parametrize(
    ("override", "error", "message", "remedy"),
    [
        (("hardware=two_speeds",), ConfigError, "of devices: full-speed, half-speed", "full-speed"),
        (("hardware=two_speeds", "task.device=quick"), ConfigError, "named quick", "full-speed"),
        (("task.num_measured=0",), ProfileError, r"measured passes \(0\)", ""),
        (("trainer.precision=bf16-mixed",), ConfigError, "float32 only", "32-true"),
        pytest.param(
            ("hardware=paper_8gpu",), HardwareError, "torch finds none", "hardware=local",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU"),
        ),
    ],
)  # fmt: skip
def test_what_cannot_be_measured_is_refused(
    override: tuple[str, ...], error: type[SparsePipeError], message: str, remedy: str
) -> None:
    with pytest.raises(error, match=message) as caught:
        run(*PROFILE, *override)
    assert caught.value.remedy
    assert remedy in caught.value.remedy


LOADED = 7


class Counting(pl.Callback):
    """Counts the batches that a training takes."""

    batches = 0

    @override
    def on_train_batch_start(self, *_: Any) -> None:
        self.batches += 1


@pytest.mark.parametrize(
    "settings",
    [
        {"max_epochs": 3},
        {"max_epochs": 3, "limit_train_batches": 5},
        {"max_epochs": 3, "limit_train_batches": 50},
        {"max_epochs": 3, "limit_train_batches": 0.5},
        {"max_epochs": 3, "limit_train_batches": 1.0},
        {"max_epochs": 3, "limit_train_batches": 1},
        {"max_epochs": 3, "overfit_batches": 2, "limit_train_batches": 5},
        {"max_epochs": 3, "max_steps": 10},
        {"max_epochs": 1, "max_steps": 10},
        {"max_epochs": -1, "max_steps": 10},
        {"max_epochs": None, "max_steps": 10},
        {"max_epochs": 9, "max_steps": 10, "accumulate_grad_batches": 3},
        {"max_epochs": 9, "max_steps": 5, "accumulate_grad_batches": 2, "limit_train_batches": 4},
        {"max_epochs": 2, "accumulate_grad_batches": 3},
    ],
    ids=str,
)
def test_it_is_as_long_as_lightning_trains(settings: dict[str, Any]) -> None:
    counting = Counting()
    trainer = pl.Trainer(
        **settings,
        accelerator="cpu",
        callbacks=[counting],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        limit_val_batches=0,
    )
    trainer.fit(BoringModel(), DataLoader(RandomDataset(32, LOADED)))
    assert counting.batches > 0
    full = composed("trainer=default").replace({f"trainer.{k}": v for k, v in settings.items()})
    assert batches_of_training(full.trainer, LOADED) == counting.batches


@pytest.mark.parametrize("epochs", [None, -1])
def test_without_an_end_there_is_no_length(epochs: int | None) -> None:
    trainer = composed("trainer=default").replace({"trainer.max_epochs": epochs}).trainer
    assert batches_of_training(trainer, LOADED) is None
