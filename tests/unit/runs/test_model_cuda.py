"""A model on a CUDA device predicts what it does on a processor, loaded or by its task."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import trimesh

import sparsepipe
from sparsepipe.launch.job import run_job
from tests.support.command_line import composed

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
TRAINED = (
    *("data=folder", "data.root=parts", "optim=sgd_onecycle", "model.width=0.0625", "seed=3"),
    *("data.cached_points=512", "data.num_points=256", "data.resolution=12", "data.batch_size=4"),
    *("data.num_workers=0", "data.cache_workers=1", "trainer.max_epochs=2", "task.gallery=0"),
    *("hardware.accelerator=cuda", "parallel=single"),
)


@pytest.fixture(scope="module", params=["sparse_vgg11_bn", "dense_vgg11_bn"])
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("predicted"))
        for number in range(8):
            for name, mesh in (
                ("ball", trimesh.creation.icosphere(2)),
                ("box", trimesh.creation.box([1, 1 + number / 8, 1])),
            ):
                Path("parts", name).mkdir(parents=True, exist_ok=True)
                mesh.export(Path("parts", name, f"{number}.stl"))
        yield run_job(composed(*TRAINED, f"model={request.param}")).path


def test_a_model_on_a_device_predicts_as_on_a_processor(run: Path) -> None:
    here, there = sparsepipe.load(run), sparsepipe.load(run, device="cuda")
    for file in sorted(Path("parts").rglob("*.stl")):
        found, expected = there.predict(file), here.predict(file)
        assert found.probability == pytest.approx(expected.probability, abs=5e-3)
        assert found.probabilities == pytest.approx(expected.probabilities, abs=5e-3)
    assert next(there.module.parameters()).device == torch.device("cuda", 0)


def test_the_task_predicts_on_the_device_of_its_inventory(run: Path) -> None:
    command = ("task=predict", f"checkpoint={run}", "input=parts/ball", "task.gallery=2")
    model = sparsepipe.load(run)
    for accelerator in ("cuda", "cpu"):
        directory = run_job(composed(*command, f"hardware.accelerator={accelerator}")).path
        with (directory / "predictions.csv").open(newline="") as stream:
            rows = list(csv.DictReader(stream))
        assert len(rows) == 8
        for row in rows:
            expected = model.predict(row["file"]).probabilities[row["class"]]
            assert float(row["probability"]) == pytest.approx(expected, abs=5e-3)
