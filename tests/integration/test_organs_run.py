"""Organs as users meet them: generated, trained on and tested with one command."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import nibabel as nib
import numpy as np
import pytest

from sparsepipe.data.volumes.organs import ORGAN_CLASSES
from sparsepipe.utils.files import read_csv, read_json
from tests.support.command_line import rows


def test_the_experiment_tests_all_labelled_tissue(
    job: Callable[..., Path], workplace: Path
) -> None:
    counts = ["data.source.train_cases=3", "data.source.test_cases=2", "data.val_share=0.34"]
    small = ["data.source.spacing=[6,6,6]", "data.patch=[32,32,24]", "model.width=0.125"]
    run = job("experiment=organs", "trainer.max_epochs=2", *counts, *small)
    result, files = read_json(run / "result.json"), sorted(workplace.rglob("labels/test/*.nii.gz"))
    assert [row["epoch"] for row in rows(run)] == ["0", "1"]
    volume_mm3_K = np.zeros(6)
    for file in files:
        image = nib.load(file)
        voxel_mm3 = np.abs(np.linalg.det(image.affine))
        counts_K = np.bincount(np.asarray(image.dataobj).ravel(), minlength=6)
        volume_mm3_K += voxel_mm3 * counts_K
    tested = dict.fromkeys(ORGAN_CLASSES, 0.0)
    for cell in read_csv(run / "confusion.csv", "actual", "predicted", "voxels"):
        tested[cell["actual"]] += int(cell["voxels"]) * 6.0**3
    np.testing.assert_allclose([*tested.values()], volume_mm3_K, rtol=0.1)
    assert 0 <= result["test/mean_dice"] <= 1
    assert 0 <= result["test/mean_iou"] <= 1


@pytest.mark.full
@pytest.mark.timeout(1800)
def test_the_experiment_labels_organs(job: Callable[..., Path], workplace: Path) -> None:
    result = read_json(job("experiment=organs") / "result.json")
    assert result["test/mean_dice"] >= 0.85
