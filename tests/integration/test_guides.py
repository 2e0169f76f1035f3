"""The guides in docs/: what they show is there, composes, runs and says what they say."""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import re
import runpy
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import trimesh
from hydra import compose as hydra_compose
from hydra import initialize_config_dir

from sparsepipe.config import compose
from sparsepipe.config.build import build_data, build_inventory
from sparsepipe.sparse import SparseTensor
from sparsepipe.utils.files import read_json
from tests.support.command_line import Shell
from tests.support.guide_cases import (
    DOCS,
    GUIDES,
    Command,
    commands_of,
    printing_blocks,
    text_of,
    write_files,
)
from tests.support.listening import address_for_others
from tests.support.paths import CONF, run_python

COMMANDS = [(guide, command) for guide in GUIDES for command in commands_of(guide)]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A user's directory: code in it can be imported, until the test is over."""
    before = set(sys.modules)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(tmp_path)):
            del sys.modules[name]


def composed(words: list[str], *, own: bool) -> dict:
    searched = [f"hydra.searchpath=[file://{Path('own').absolute()}]"] if own else []
    with initialize_config_dir(str(compose.config_dir()), version_base="1.3"):
        raw = hydra_compose(compose.CONFIG_NAME, [*searched, *compose.admit(words)])
    return compose.resolve(raw)


@pytest.mark.parametrize(
    ("guide", "command"), COMMANDS, ids=lambda v: v if isinstance(v, str) else " ".join(v.words)
)
def test_commands_compose(
    here: Path, monkeypatch: pytest.MonkeyPatch, guide: str, command: Command
) -> None:
    if any("submitit" in word or "lab_slurm" in word for word in command.words):
        pytest.importorskip("submitit", reason="pip install -e '.[slurm]'")
    if "hydra/launcher=joblib" in command.words:
        pytest.importorskip("joblib", reason="pip install -e '.[joblib]'")
    if {"hydra/sweeper=optuna", "hparams_search=optuna"} & {*command.words}:
        pytest.importorskip("optuna", reason="pip install -e '.[optuna]'")
    monkeypatch.setenv("PARTS", str(here))
    monkeypatch.setenv("MODELNET40", str(here))
    assert command.own or guide != "own_model"
    write_files(guide, here)
    for job in command.jobs:
        composed(job, own=command.own)


def test_every_guide_has_commands() -> None:
    assert {guide for guide, _ in COMMANDS} == set(GUIDES)


@pytest.mark.parametrize("guide", GUIDES)
def test_code_prints_what_stands_below_it(guide: str) -> None:
    for code, promised in printing_blocks(guide):
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(code, guide, "exec"), {})
        assert printed.getvalue() == promised


def test_the_own_network(here: Path) -> None:
    write_files("own_model", here)
    mynets = importlib.import_module("mynets")
    network = mynets.small(num_classes=3, channels=4)
    assert isinstance(network[4], mynets.Residual), "before which the guide cuts"
    coords_N4 = torch.tensor([[0, 1, 1, 1], [0, 1, 1, 2], [1, 5, 0, 3]], dtype=torch.int32)
    x = SparseTensor(torch.ones(3, 1), coords_N4, spatial_shape=[8] * 3)
    logits_BK = network(x)
    assert logits_BK.shape == (2, 3)
    logits_BK.sum().backward()
    assert all(parameter.grad is not None for parameter in network.parameters())


def test_the_own_point_clouds(here: Path) -> None:
    write_files("own_data", here)
    runpy.run_path("make_npz.py")
    settings = ["data=modelnet40_points", "data.root=.", "data.num_workers=0"]
    data = build_data(composed(settings, own=False))
    data.prepare_data()
    data.setup("fit")
    batch = next(iter(data.train_dataloader()))
    assert tuple(data.classes) == ("ball", "box")
    assert set(batch["label"].tolist()) == {0, 1}
    assert batch["input"].batch_size == 32


def test_the_own_meshes(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_files("own_data", here)
    for name, mesh in (("ball", trimesh.creation.icosphere(1)), ("box", trimesh.creation.box())):
        (here / "parts" / name).mkdir(parents=True)
        for number in range(5):
            mesh.export(here / "parts" / name / f"{name}_{number}.{'stl' if number else 'glb'}")
    monkeypatch.setenv("PARTS", str(here / "parts"))
    settings = ["data=parts", "data.cached_points=512", "data.num_points=256", "data.num_workers=0",
                "data.val_share=0", "data.cache_workers=1"]  # fmt: skip
    data = build_data(composed(settings, own=True))
    data.prepare_data()
    data.setup("fit")
    assert tuple(data.classes) == ("ball", "box")
    assert len(data.train_dataloader().dataset) == 8
    assert len(data.test_dataloader().dataset) == 2


def test_the_inventory_of_the_lab(here: Path) -> None:
    write_files("own_cluster", here)
    inventory = build_inventory(composed(["hardware=lab"], own=True))
    assert [host.name for host in inventory.hosts] == ["server1", "server2"]
    assert [sum(device.count for device in host.devices) for host in inventory.hosts] == [2, 4]
    # As many processes as the guide starts there.
    text = text_of("own_cluster").partition("## Measure")[0]
    assert re.findall(r"--nproc-per-node=(\d)", text) == ["2", "4"]
    assert re.findall(r"--rdzv-conf=rank=(\d)", text) == ["0", "1"]


def test_the_lab_measures_what_it_trains(here: Path) -> None:
    """A training refuses profiles of other batches, or of another number of classes."""
    write_files("own_cluster", here)
    of_lab = [c for c in commands_of("own_cluster") if "hardware=lab" in c.words]
    configs = [composed(c.first_job, own=True) for c in of_lab if "task=bandwidth" not in c.words]
    tasks = {config.task.locate().name for config in configs}
    assert tasks == {"profile", "partition", "simulate", "train"}
    assert all(config.data == configs[0].data for config in configs)
    assert all(config.model == configs[0].model for config in configs)


def test_the_guide_shows_the_job_script() -> None:
    (shown,) = re.findall(r"```bash\n(.*?)```", text_of("own_cluster"), re.DOTALL)
    assert shown in (DOCS / "train.sbatch").read_text()


SHAPES = ("data.source.train_per_class=2", "data.source.test_per_class=1", "data.resolution=16",
          "data.num_points=256", "data.cached_points=512", "data.batch_size=8",
          "data.num_workers=0", "task.gallery=0", "trainer.max_epochs=1",
          "hardware.accelerator=cpu", "hardware.cpu_devices=2")  # fmt: skip


@pytest.mark.full
@pytest.mark.parametrize("model", ["small", "mine"])
def test_own_networks_train_as_a_pipeline(here: Path, shell: Shell, model: str) -> None:
    write_files("own_model", here)
    split = ("parallel=pipeline", "parallel.plan.config=1-1", "parallel.plan.cuts=[4]")
    done = _run(shell, "--config-dir", "own", f"model={model}", *split, *SHAPES)
    result = read_json(done / "result.json")
    assert (result["ranks"], result["plan_config"], result["plan_cuts"]) == (2, "1-1", [4])
    assert 0 <= result["test/accuracy"] <= 1


@pytest.mark.full
def test_own_data_train_on_two_devices(here: Path, shell: Shell) -> None:
    write_files("own_data", here)
    *_, last = commands_of("own_data")
    done = _run(shell, "--config-dir", "own", *last.words)
    result = read_json(done / "result.json")
    assert (result["ranks"], result["epochs"]) == (2, 3)
    assert result["test/accuracy"] > 0.9


def _run(shell: Shell, *words: str) -> Path:
    env = {**shell.environment, "SPARSEPIPE_DATA": str(shell.cwd / "data")}
    done = run_python(shell.cwd, "-m", "sparsepipe", *words, env=env)
    assert done.returncode == 0, done.stderr
    return shell.cwd / done.stdout.splitlines()[-1]


# Stand-ins for SLURM's commands: two nodes with one device each, both on this machine.
_SRUN = """#!/usr/bin/env bash
[[ $1 == --* ]] && shift
pids=()
for node in 0 1; do
    SLURM_NODEID=$node SLURM_PROCID=$node SLURM_LOCALID=0 "$@" & pids+=($!)
done
code=0
for pid in "${pids[@]}"; do wait "$pid" || code=$?; done
exit $code
"""
_SCONTROL = "#!/usr/bin/env bash\necho $FIRST_HOST\necho $FIRST_HOST\n"
_SLURM = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "localhost", "SLURM_NNODES": "2",
          "SLURM_NTASKS": "2", "SLURM_NTASKS_PER_NODE": "1", "SLURM_GPUS_ON_NODE": "1",
          "SLURM_JOB_NAME": "sparsepipe"}  # fmt: skip
_HOSTS = """
_target_: sparsepipe.cluster.Inventory.from_dict
value:
  hosts:
    - {name: a, devices: [{name: core, count: 1, accelerator: cpu}]}
    - {name: b, devices: [{name: core, count: 1, accelerator: cpu}]}
"""


@pytest.mark.full
def test_the_job_script_trains_over_two_nodes(shell: Shell) -> None:
    bin_directory = shell.cwd / "bin"
    bin_directory.mkdir()
    torchrun = f'#!/usr/bin/env bash\nexec {sys.executable} -m torch.distributed.run "$@"\n'
    for name, text in (("srun", _SRUN), ("scontrol", _SCONTROL), ("torchrun", torchrun)):
        (bin_directory / name).write_text(text)
        (bin_directory / name).chmod(0o755)
    (shell.cwd / "conf" / "hardware").mkdir(parents=True)
    (shell.cwd / "conf" / "hardware" / "pair.yaml").write_text(_HOSTS)
    done = subprocess.run(
        ["bash", str(DOCS / "train.sbatch"), "--config-dir", str(CONF),
         f"hydra.searchpath=[file://{shell.cwd / 'conf'}]", "experiment=tiny", "hardware=pair",
         "parallel=dp", "trainer.max_epochs=1"],
        cwd=shell.cwd,
        env={**shell.environment, **_SLURM, "FIRST_HOST": address_for_others(),
             "PATH": f"{bin_directory}:{os.environ['PATH']}"},
        capture_output=True, text=True, timeout=280, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (run,) = shell.runs()
    assert read_json(run / "result.json")["ranks"] == 2
    assert (run / "DONE.json").exists()
