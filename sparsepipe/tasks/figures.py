"""The pictures of a run, drawn from what it measured.

Shapes: B samples, N points, K classes.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytorch_lightning as pl
import torch
from numpy.typing import NDArray
from torch import Tensor

from sparsepipe.errors import DataError
from sparsepipe.results.tables import write_csv
from sparsepipe.tasks.run import Run

log = logging.getLogger(__name__)


def draw_curves(run: Run) -> None:
    """``learning_curves.png`` from ``metrics.csv``; nothing where nothing was logged."""
    from sparsepipe.results.curves import learning_curves

    if not run.directory.metrics.exists():
        return
    try:
        learning_curves(run.directory.metrics, run.directory.path / "learning_curves.png")
    except DataError as error:
        log.info("no learning curves: %s", error.message)


def draw_test(
    run: Run, module: pl.LightningModule, data: pl.LightningDataModule, *, gallery: int
) -> None:
    """Confusion, per-class accuracies and ``gallery`` predictions, for modules that keep them.

    The counts of the confusion as ``confusion.csv`` as well.
    """
    from sparsepipe.results.confusion import (
        confusion_matrix,
        confusion_rows,
        per_class_accuracy,
    )
    from sparsepipe.results.gallery import prediction_gallery

    counts_KK = getattr(module, "test_confusion", None)
    classes = tuple(getattr(module, "class_names", ()))
    if counts_KK is None or not classes:
        return
    directory = run.directory.path
    write_csv(run.directory.confusion, confusion_rows(counts_KK.numpy(), classes))
    confusion_matrix(counts_KK.numpy(), classes, directory / "confusion.png")
    per_class_accuracy(counts_KK.numpy(), classes, directory / "per_class_accuracy.png")
    shapes: list[NDArray[np.float64]] = []
    found: dict[str, list[Any]] = {"label": [], "prediction": [], "probability": []}
    for batch in gallery_batches(data, count=gallery):
        shapes += clouds(batch["input"])
        prediction = _predict(module, batch)
        for name in found:
            found[name] += prediction[name].tolist()
    if shapes:
        prediction_gallery(
            shapes,
            found["label"],
            found["prediction"],
            classes,
            directory / "predictions.png",
            probabilities=found["probability"],
        )


def gallery_batches(data: pl.LightningDataModule, *, count: int) -> Iterator[dict[str, Any]]:
    """Test shapes spread evenly over the split, hence over its classes.

    In batches no larger than the test's, since more need not fit into memory.
    """
    loader = data.test_dataloader()
    dataset = getattr(loader, "dataset", None)
    if count < 1 or dataset is None or not len(dataset):
        return
    picked = np.unique(np.linspace(0, len(dataset) - 1, count).round().astype(int))
    # What the sampler yields is what the data set takes: an index, or epoch and index.
    example = next(iter(loader.sampler))
    keys = [(0, int(i)) if isinstance(example, tuple) else int(i) for i in picked]
    size = loader.batch_size or 1
    for first in range(0, len(keys), size):
        batch = loader.collate_fn([dataset[key] for key in keys[first : first + size]])
        if not _holds_clouds(batch):
            return
        yield batch


def _holds_clouds(batch: Any) -> bool:
    if not isinstance(batch, dict) or not {"input", "label"} <= batch.keys():
        return False
    x = batch["input"]
    return hasattr(x, "coords") or (isinstance(x, Tensor) and x.dim() == 5)


def clouds(x: Any) -> list[NDArray[np.float64]]:
    """Centres [N, 3] of the occupied voxels of each sample, as the network sees them."""
    if isinstance(x, Tensor):
        return [np.argwhere(grid.sum(dim=0).numpy() > 0).astype(float) for grid in x.cpu()]
    coords_N4 = x.coords.cpu().numpy()
    return [coords_N4[coords_N4[:, 0] == b, 1:].astype(float) for b in range(x.batch_size)]


@torch.no_grad()
def _predict(module: pl.LightningModule, batch: dict[str, Any]) -> dict[str, Tensor]:
    module.eval()
    placed = {key: value.to(module.device) for key, value in batch.items()}
    prediction: dict[str, Tensor] = module.predict_step(placed, 0)
    return prediction
