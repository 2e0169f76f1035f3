"""A sparse backend, a data source and a task from outside of the package, by ``_target_``.

The examples of docs/extending.md.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from sparsepipe.config.build import build_data, build_module
from sparsepipe.config.check import check
from sparsepipe.errors import ConfigError
from sparsepipe.launch.job import run_job
from sparsepipe.utils.files import read_json
from tests.support.command_line import composed
from tests.support.guide_cases import write_files


@pytest.fixture(autouse=True)
def importable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path / "examples"))
    for path in write_files("extending", tmp_path / "examples"):
        assert len(path.read_text().splitlines()) <= 30, "examples are short enough to be read"
        monkeypatch.delitem(sys.modules, path.stem, raising=False)


@pytest.fixture
def arrays(tmp_path: Path) -> Path:
    """Points on spheres and in cubes."""
    rng = np.random.default_rng(0)
    for split, count in (("train", 12), ("test", 6)):
        points_SP3 = rng.uniform(-1, 1, (count, 256, 3)).astype(np.float32)
        labels_S = np.arange(count) % 2
        balls_BP3 = points_SP3[labels_S == 0]
        points_SP3[labels_S == 0] = balls_BP3 / np.linalg.norm(balls_BP3, axis=-1, keepdims=True)
        np.save(tmp_path / f"{split}_points.npy", points_SP3)
        np.save(tmp_path / f"{split}_labels.npy", labels_S)
    return tmp_path


def test_a_source_and_a_backend_of_ones_own_train(arrays: Path) -> None:
    spec = composed(
        "data=modelnet40_points", "data.source._target_=data_source.Arrays",
        f"data.root={arrays}", "data.num_points=128", "data.resolution=16", "data.num_workers=0",
        "data.val_share=0.25", "data.batch_size=4", "model=sparse_vgg11_bn", "model.width=0.125",
        "backend._target_=sparse_backend.Float64Backend",
    )  # fmt: skip
    data = build_data(spec)
    data.prepare_data()
    data.setup("fit")
    assert data.classes == ("ball", "box")
    module = build_module(spec, data)
    batch = next(iter(data.train_dataloader()))
    first = module.layers[0]
    assert first.backend.name == "float64"
    logits_BK = module(batch["input"])
    assert logits_BK.shape == (4, 2)
    assert logits_BK.dtype == torch.float32
    logits_BK.sum().backward()
    assert first.kernel.grad is not None


@pytest.mark.usefixtures("workplace")
def test_a_task_of_ones_own_makes_a_run() -> None:
    task = {"_target_": "parameter_count.CountParameters", "trainable": True}
    spec = composed("experiment=tiny").replace(task=task)
    check(spec.to_dict())
    directory = run_job(spec)
    result = read_json(directory.result)
    assert (result["task_name"], result["kind"]) == ("count_parameters", "counted")
    assert result["parameters"] > 0
    wrong = spec.replace({"task.trainabel": True})
    with pytest.raises(ConfigError, match=r"nearest: 'task\.trainable'"):
        check(wrong.to_dict())
