"""When pictures of a test are made, and of how much at once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import pytorch_lightning as pl
import torch
from matplotlib.figure import Figure
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader

from sparsepipe.models.cases import CaseScores
from sparsepipe.runs.rundir import RunDir
from sparsepipe.tasks import evaluate, presentation, train
from sparsepipe.utils.files import read_csv
from tests.support.processes import run_shared

SHAPES = 30


class Grids(pl.LightningDataModule):
    """One voxel a shape, at (number, 0, 0)."""

    def test_dataloader(self) -> DataLoader[Any]:
        occupied = torch.eye(SHAPES)[:, None, :, None, None].expand(-1, 1, -1, 2, 2)
        shapes: Any = [{"input": occupied[i], "label": i % 2, "index": i} for i in range(SHAPES)]
        return DataLoader(shapes, batch_size=5)


class Reader(pl.LightningModule):
    """Reads a shape's number from its grid; notes how many it is given."""

    class_names = ("even", "odd")
    test_confusion = torch.eye(2, dtype=torch.int64)
    counted = "shapes"

    def __init__(self) -> None:
        super().__init__()
        self.events: list[tuple[str, int]] = []

    def forward(self, x: Tensor) -> Tensor:
        self.events.append(("forward", len(x)))
        return x[:, 0, :, 0, 0].argmax(dim=1)

    def predict_step(self, batch: dict[str, Tensor], batch_idx: int = 0) -> dict[str, Tensor]:
        number = self(batch["input"])
        return {"label": batch["label"], "prediction": number % 2, "probability": number / 100}

    def transfer_batch_to_device(self, batch: Any, device: Any, dataloader_idx: int) -> Any:
        self.events.append(("place", len(batch["label"])))
        return batch


def test_the_gallery_is_predicted_in_batches_of_the_test(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: dict[str, Any] = {}

    def gallery(
        shapes: Any, labels: Any, predictions: Any, *_: Any, probabilities: Any, files: Any
    ) -> Figure:
        drawn.update(shapes=shapes, labels=labels, predictions=predictions, files=files)
        drawn["numbers"] = [round(100 * p) for p in probabilities]
        return Figure()

    monkeypatch.setattr("sparsepipe.plots.gallery.gallery_figure", gallery)
    module = Reader()
    run: Any = SimpleNamespace(directory=RunDir(tmp_path))
    presentation.draw_test(run, module, Grids(), gallery=12)
    assert max(count for _, count in module.events) <= 5
    numbers = drawn["numbers"]
    assert len(numbers) == 12
    assert (numbers[0], numbers[-1]) == (0, SHAPES - 1)
    assert drawn["files"] == [str(number) for number in numbers], "of data without files"
    assert drawn["labels"] == drawn["predictions"] == [number % 2 for number in numbers]
    assert [int(np.unique(shape[:, 0]).item()) for shape in drawn["shapes"]] == numbers


class LabelledVoxels(Grids):
    """As many labels as voxels."""

    def test_dataloader(self) -> DataLoader[Any]:
        labels = torch.zeros(SHAPES, 2, 2, dtype=torch.int64)
        shapes: Any = [{**s, "label": labels} for s in super().test_dataloader().dataset]
        return DataLoader(shapes, batch_size=5)


def test_voxels_have_no_gallery_but_a_mean_iou(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("sparsepipe.plots.gallery.gallery_figure", pytest.fail)
    module = Reader()
    module.counted = "voxels"
    run: Any = SimpleNamespace(directory=RunDir(tmp_path))
    values = {"test/accuracy": 0.5, "test/mean_iou": 0.25}
    presentation.draw_test(run, module, LabelledVoxels(), gallery=12)
    assert not module.events
    assert "voxels" in RunDir(tmp_path).confusion.read_text()
    with caplog.at_level("INFO"):
        presentation.log_test(run, module, values)
    assert "test accuracy 50.0 %, mean IoU 25.0 %, 2 voxels" in caplog.text


def scored_cases(first: int) -> CaseScores:
    """Scores of three cases, of which a later one has more right, and the last no foreground."""
    cases = CaseScores()
    for index in range(first, first + 3):
        label = torch.zeros(1, 4, 6, 8, dtype=torch.int64)
        label[:, 1:3, 1:5, 2:6] = index < 5
        guess = label.clone()
        guess[..., index - 6 :] = 0
        batch = {"input": torch.randn(1, 1, 4, 6, 8), "label": label}
        batch |= {"index": torch.tensor([index]), "spacing": torch.tensor([[1.0, 2.0, 0.5]])}
        cases.update(batch, F.one_hot(guess, 2).movedim(-1, 1).float())
    return cases


def test_cases_are_listed_and_drawn_the_worst_first(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    module: Any = Reader()
    module.cases, module.class_names = scored_cases(3), ("background", "organ")
    module.test_cases = module.cases.compute()
    data: Any = LabelledVoxels()
    data.test_names = lambda: {index: f"scan_{index}.nii.gz" for index in range(9)}
    run: Any = SimpleNamespace(directory=RunDir(tmp_path))
    presentation.draw_test(run, module, data, gallery=0)
    rows = read_csv(RunDir(tmp_path).cases)
    assert [row["file"][5] for row in rows] == [*"334455"]
    assert [row["class"] for row in rows] == ["background", "organ"] * 3
    organ = rows[1]
    assert float(organ["mean_dice"]) == float(organ["dice"]) == pytest.approx(6 / 7)
    assert float(organ["iou"]) == 0.75
    assert 0 < float(organ["surface_mm"]) < 1
    assert [rows[5][name] for name in ("mean_dice", "dice", "iou", "surface_mm")] == [""] * 4
    pictures = sorted(path.name for path in (tmp_path / "cases").iterdir())
    assert pictures == ["best_1.png", "worst_1.png", "worst_2.png"]
    with caplog.at_level("INFO"):
        presentation.log_test(run, module, {"test/mean_dice": 0.875})
    assert "mean Dice of a case 87.5 %" in caplog.text
    assert "worst_1.png" in caplog.text


def test_signals_with_labels_of_voxels_have_scores_but_no_slices(tmp_path: Path) -> None:
    module: Any = Reader()
    module.cases = CaseScores()
    label = torch.tensor([[0, 0, 1, 1, 0, -100]])
    batch = {"input": torch.randn(1, 1, 6), "label": label, "index": torch.tensor([0])}
    module.cases.update(
        batch | {"spacing": torch.full((1, 1), torch.nan)},
        torch.eye(2)[0].view(1, 2, 1).expand(1, 2, 6),
    )
    module.test_cases = module.cases.compute()
    data: Any = LabelledVoxels()
    data.test_names = lambda: ["a.npy"]
    presentation.draw_test(SimpleNamespace(directory=RunDir(tmp_path)), module, data, gallery=0)  # type: ignore[arg-type]
    (_, row) = read_csv(RunDir(tmp_path).cases)
    assert (row["dice"], row["surface_mm"]) == ("0.0", "")
    assert not (tmp_path / "cases").exists()


def shown_by(rank: int) -> list[tuple[int, int]]:
    module: Any = Reader()
    module.cases = scored_cases(2 * rank)
    presentation.gather_cases(module)
    return [(each["index"], len(each["slices"])) for each in module.cases.drawn]


def test_the_worst_and_best_cases_are_those_of_all_ranks() -> None:
    for found in run_shared(shown_by, 2):
        assert found == [(0, 3), (1, 3), (3, 3), (4, 3)]


def test_one_batch_at_a_time_is_placed_for_timing() -> None:
    module = Reader()
    trainer: Any = SimpleNamespace(
        strategy=SimpleNamespace(root_device=torch.device("cpu")),
        precision_plugin=SimpleNamespace(predict_step_context=torch.no_grad),
    )
    rate = evaluate.inference_rate(trainer, module, Grids(), warmup=2, timed=3)
    assert rate > 0
    assert module.events == [("place", 5), ("forward", 5)] * 5


@pytest.mark.parametrize("task", ["train", "evaluate"])
def test_a_picture_that_fails_costs_no_result(
    job: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, task: str
) -> None:
    """And no rank waits for a picture: the result is what they make together."""
    settings = ["trainer.max_epochs=1"]
    if task == "evaluate":
        settings += [f"checkpoint={job(*settings)}", "task=evaluate"]

    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("no picture")

    module = train if task == "train" else evaluate
    monkeypatch.setattr(module, "draw_test", fail)
    with pytest.raises(RuntimeError, match="no picture"):
        job(*settings, "name=pictureless")
    (directory,) = Path("outputs/pictureless").glob("[!.]*")
    assert (directory / "result.json").exists()
    assert not (directory / "DONE.json").exists()
