"""A loaded model predicts what the test of its training did, for any kind of shape."""

from __future__ import annotations

import csv
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import trimesh
from torch import nn

import sparsepipe
from sparsepipe.config.build import build_data
from sparsepipe.config.finished_run import recorded_settings
from sparsepipe.config.run_spec import RunSpec
from sparsepipe.config.target import Target
from sparsepipe.data.formats.off import read_off
from sparsepipe.errors import CheckpointError, ConfigError, DataError
from sparsepipe.launch.job import run_job
from sparsepipe.runs.model import Model
from sparsepipe.sparse import SparseTensor
from tests.support.command_line import checkpoint, composed

SHAPES = (
    *("data=shapes", "parallel=single", "optim=sgd_onecycle", "data.source.train_per_class=6"),
    *("data.source.classes=[mug,wheel,gear]", "data.source.test_per_class=4", "data.val_share=0.2"),
    *("data.cached_points=512", "data.num_points=256", "data.resolution=12", "data.batch_size=8"),
    *("data.num_workers=0", "data.cache_workers=1", "trainer.max_epochs=2", "task.gallery=0"),
    *("hardware.accelerator=cpu", "seed=3", "model.width=0.0625"),
)
TRAININGS = {
    "sparse": ("model=sparse_vgg11_bn", "data.span=cube", "trainer.precision=bf16-mixed"),
    "dense": (
        *("model=dense_vgg11_bn", "data.point_ratio=0.5", "data.up_axis=y"),
        "trainer.precision=64-true",
    ),
    "surface": (
        *("model=dense_vgg11_bn", "data.representation=dense_surface"),
        "data.augment.enabled=false",
    ),
    "split": ("model=sparse_vgg11_bn", "parallel=pipeline", "hardware.cpu_devices=2"),
}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("loaded"))
        patch.setenv("OMP_NUM_THREADS", "1")
        yield Path.cwd()


@pytest.fixture(scope="module")
def run(place: Path) -> Path:
    return trained("sparse")


def trained(name: str) -> Path:
    return run_job(composed(*SHAPES, *TRAININGS[name])).path


def evaluated(run: Path) -> list[dict[str, str]]:
    measured = ("task=evaluate", "task.gallery=0", "task.timed_batches=0", "task.warmup_batches=0")
    directory = run_job(composed(*measured, f"checkpoint={run}", "hardware.accelerator=cpu")).path
    with (directory / "predictions.csv").open(newline="") as stream:
        return list(csv.DictReader(stream))


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=pytest.mark.full if n == "split" else ()) for n in TRAININGS],
)
def test_files_of_the_test_are_predicted_as_the_test_did(place: Path, name: str) -> None:
    directory = trained(name)
    model, rows = sparsepipe.load(directory), evaluated(directory)
    data = build_data(RunSpec.load(directory / "config.yaml"))
    data.setup("test")
    inputs = data.test_dataloader().dataset
    assert len(rows) == len(inputs) == 12
    for number, row in enumerate(rows):
        read, x = inputs[number], model.preprocess(row["file"])
        if name in ("dense", "surface"):
            assert np.array_equal(x[0], read["input"])
        else:
            assert np.array_equal(x.coords[:, 1:], read["coords"])
        found = model.predict(row["file"])
        assert found.name == row["predicted"]
        assert found.probability == pytest.approx(float(row["probability"]), abs=1e-6)
        if name != "sparse":  # that network is called under autocast
            with torch.inference_mode():
                probabilities_1K = model.module(x).softmax(1)
            assert probabilities_1K.max().item() == pytest.approx(found.probability, abs=1e-6)
    copy = shutil.copy(rows[0]["file"], place / "copy.off")
    differs = not torch.equal(
        dense(model.preprocess(copy)), dense(model.preprocess(rows[0]["file"]))
    )
    assert differs == (name != "surface"), "other points of it are drawn, but of a whole surface"


def dense(x: SparseTensor | torch.Tensor) -> torch.Tensor:
    return x if isinstance(x, torch.Tensor) else x.dense()


def test_a_shape_is_the_same_in_every_form(
    run: Path, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Points of a mesh are sampled from the content, so that only the network's view may vary."""
    model = sparsepipe.load(run)
    source = next(place.rglob("test/mug_*.off"))
    mesh = read_off(source)
    own = place / "own"
    own.mkdir(exist_ok=True)
    copy = shutil.copy(source, own / "any.off")
    first = model.predict(copy)
    shutil.copy(source, own / "other.off")
    assert model.predict(str(own / "other.off")) == first, "whatever it is called, and again"
    monkeypatch.setenv("HOME", str(place))
    assert model.predict("~/own/other.off") == first
    assert first.probabilities[first.name] == first.probability == max(first.probabilities.values())
    assert sum(first.probabilities.values()) == pytest.approx(1)
    assert set(first.probabilities) == set(model.classes) == {"gear", "mug", "wheel"}
    for suffix in ("stl", "obj", "ply", "glb"):
        mesh.export(own / f"any.{suffix}")
        other = model.predict(own / f"any.{suffix}")
        assert other.probability == pytest.approx(first.probability, abs=0.1)
    assert model.predict(mesh) == model.predict(trimesh.Scene(mesh))
    points = trimesh.sample.sample_surface(mesh, 700, seed=0)[0]
    of_points = model.predict(points)
    assert of_points == model.predict(torch.from_numpy(points)) == model.predict(points.tolist())
    assert of_points.probability == pytest.approx(first.probability, abs=0.1)
    cloud = trimesh.PointCloud(points)
    assert model.predict(cloud) == model.predict(trimesh.Scene(cloud)) == of_points
    coarse = torch.from_numpy(points).bfloat16()
    assert model.predict(coarse) == model.predict(coarse.float())
    few = model.predict(points[:5])  # which are repeated
    assert 1 / 3 <= few.probability <= 1


def test_the_network_is_a_plain_module(run: Path, place: Path) -> None:
    model = sparsepipe.load(str(run))
    assert type(model.module) is nn.Sequential
    assert not model.module.training
    file = next(place.rglob("test/wheel_*.off"))
    x = model.preprocess(file)
    with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
        logits_1K = model.module(x)
    expected = logits_1K.float().softmax(1)[0].max().item()
    assert model.predict(file).probability == pytest.approx(expected, abs=1e-6)


def test_a_checkpoint_suffices_where_data_and_run_are_gone(run: Path, place: Path) -> None:
    file = next(place.rglob("test/gear_*.off"))
    own = shutil.copy(file, place / "gear.off")
    expected = sparsepipe.load(run).predict(own)
    other = place / "moved" / "checkpoints" / "best.ckpt"
    other.parent.mkdir(parents=True)
    shutil.copy(run / "checkpoints" / "best.ckpt", other)
    (place / "moved" / "config.yaml").write_text("lr: 0.1\n")  # of another program
    assert sparsepipe.load(other).predict(own) == expected
    content = checkpoint(run, "best")
    content["sparsepipe"]["config"]["data"]["root"] = "/nowhere"
    torch.save(content, place / "moved.ckpt")
    assert sparsepipe.load(place / "moved.ckpt").predict(own) == expected


MARK = "{_target_: pathlib.Path.touch, self: {_target_: pathlib.Path, _args_: [made]}}"
ROOT = {"_target_": "sparsepipe.data.files.require_root", "root": "."}  # a path, for what writes
READERS = (sparsepipe.load, lambda given: composed("task=evaluate", f"checkpoint={given}"))


@pytest.fixture
def of_others(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A checkpoint's content, to be changed, and a reader with a secret."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MARKER", "secret")
    monkeypatch.setenv("HOME", "/secret")
    return checkpoint(run, "best")


@pytest.mark.parametrize(
    ("group", "key", "value"),
    [
        ("model", "_target_", "torch.nn.functional.torch.os.system"),
        ("model", "width", f"${{oc.create:{MARK}}}"),
        ("model", "width", "\\\\${oc.env:MARKER}"),
        ("model", "dropout", [(0, {"_target_": "pathlib.Path.touch"})]),
        ("model", "dropout", {"_target_": "sparsepipe.data.shapes.generate_shapes", "root": ROOT}),
        ("model", "width._target_", "os.getcwd"),
        ("data", "root", "$MARKER/data"),
        ("data", "split", "~/data.csv"),
        ("trainer", "precision", "${oc.env:MARKER}"),
    ],
)
def test_a_checkpoint_of_others_is_read_as_values(
    of_others: dict[str, Any], group: str, key: str, value: object
) -> None:
    of_others["sparsepipe"]["config"][group][key] = value
    torch.save(of_others, "own.ckpt")
    for read in READERS:
        with pytest.raises(ConfigError, match=r"own\.ckpt (names|records)") as refused:
            read("own.ckpt")
        assert "secret" not in str(refused.value)
    assert os.listdir() == ["own.ckpt"]


def test_texts_of_a_run_are_not_resolved(run: Path, of_others: dict[str, Any]) -> None:
    """Neither settings nor classes, whose names come from folders."""
    text = f"${{oc.create:{MARK}}} \\${{oc.env:MARKER}}"
    assert Target("builtins.dict", {"a": [text]}).build(b=[text]) == {"a": [text], "b": [text]}
    shutil.copytree(run, "copy")
    of_others["sparsepipe"]["classes"][0] = text
    torch.save(of_others, "copy/checkpoints/best.ckpt")
    assert sparsepipe.load("copy").classes[0] == text
    config = Path("copy/config.yaml")
    config.write_text(config.read_text().replace("width: 0.0625", "width: '\\${oc.env:MARKER}'"))
    for read in READERS:
        with pytest.raises(ConfigError) as refused:
            read("copy")
        assert "secret" not in str(refused.value)
    assert not Path("made").exists()


def test_a_checkpoint_records_paths_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MARKER", "/there")
    spec = composed("data=folder", "data.root=$MARKER/parts")
    recorded = recorded_settings(spec.to_dict())
    assert recorded["data"]["root"] == "/there/parts"
    assert recorded["trainer"] == {"precision": "32-true", "matmul_precision": None}


def test_what_cannot_be_loaded_or_predicted_is_explained(run: Path, place: Path) -> None:
    with pytest.raises(CheckpointError, match="no checkpoint at"):
        sparsepipe.load(place / "missing")
    with pytest.raises(CheckpointError, match="no checkpoint at") as caught:
        sparsepipe.load(run.parent)
    assert str(run.parent) in caught.value.remedy.partition("such as ")[2], "the newest run"
    for device in ("cuda:99", "cuda:x", "cuda:-1", "cpu:1", "tpu", torch.device("cuda", 99)):
        with pytest.raises(ConfigError, match=f"device '{device}' not found"):
            sparsepipe.load(run, device=device)
    torch.save(checkpoint(run, "best")["state_dict"], place / "weights.pt")
    with pytest.raises(ConfigError, match="was trained is unknown"):
        sparsepipe.load(place / "weights.pt")
    model: Model = sparsepipe.load(run, device=torch.device("cpu"))
    assert model.predict_samples([]) == []
    for shape in (np.zeros((4, 2)), np.full((4, 3), np.nan), np.zeros((0, 3)), None, ["a", "b"]):
        with pytest.raises(DataError, match="holds no shape"):
            model.predict(shape)
    with pytest.raises(DataError, match="No such file"):
        model.predict("missing.stl")
    with torch.no_grad():
        next(model.module.parameters()).fill_(torch.nan)
    with pytest.raises(CheckpointError, match="not finite"):
        model.predict(np.eye(3))
    images = run_job(
        composed(
            *("data=digits", "model=cnn_5x5", "trainer.max_epochs=1", "hardware.accelerator=cpu"),
            *("trainer.limit_train_batches=1", "task.test=false", "data.num_workers=0"),
        )
    ).path
    with pytest.raises(ConfigError, match="whose voxels have labels can be predicted"):
        sparsepipe.load(images)


def test_importing_the_package_imports_no_torch() -> None:
    code = (
        "import sys, sparsepipe; assert 'load' in dir(sparsepipe); "
        "print('torch' in sys.modules, sparsepipe.__version__)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", sparsepipe.__version__]
    with pytest.raises(AttributeError, match="has no attribute 'loads'"):
        sparsepipe.loads  # noqa: B018
