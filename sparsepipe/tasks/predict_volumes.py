"""Labels the voxels of a user's volumes with a trained network, and writes and draws them.

Shapes: C channels, K classes.
"""

from __future__ import annotations

import logging
import math
import shutil
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytorch_lightning as pl
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from sparsepipe.callbacks.shards import WriteShards
from sparsepipe.data.points import FloatArray
from sparsepipe.data.volumes.formats import stem_of, suffix_of, write_volume
from sparsepipe.data.volumes.volume_files import case_files
from sparsepipe.errors import DataError
from sparsepipe.models.cases import slices_of
from sparsepipe.models.windows import logits_of
from sparsepipe.runs.model import VolumeModel
from sparsepipe.runtime.collectives import process_group
from sparsepipe.strategies import SpatialStrategy
from sparsepipe.tasks.labelled_files import Labelled, label_files, names_of
from sparsepipe.tasks.result import write_result
from sparsepipe.tasks.task import ResolvedRun
from sparsepipe.utils.files import writing

log = logging.getLogger(__name__)


def predict_volumes(
    run: ResolvedRun,
    model: VolumeModel,
    files: Sequence[Path],
    *,
    checkpoint: Path,
    gallery: int,
    settings: Mapping[str, Any],
) -> None:
    """Labels the voxels of volumes; writes label volumes, tables and pictures.

    If the run has several ranks, these share each volume, which they compute whole.

    Args:
        run: the run, to whose directory everything is written.
        model: the trained network.
        files: the files of volumes; those of a case's channels are found by their names.
        checkpoint: the network's file, to be recorded.
        gallery: largest number of volumes that are drawn.
        settings: ``overlap``, ``flips`` and ``probabilities`` as for ``model.predict``.
    """
    channels, folder = model.preparation.channels, run.directory.path / ".computed"
    ending = "".join(channels[:1])
    firsts = [file for file in files if stem_of(file).endswith(ending)] or [*files]
    names = names_of(firsts, lambda file: stem_of(file).removesuffix(ending) + suffix_of(file))
    cases = {n: case_files(file, channels) for n, file in zip(names, firsts, strict=True)}
    if (others := {*files}.difference(*cases.values())) and process_group.rank() == 0:
        listed = ", ".join(map(str, sorted(others)))
        log.warning("left out, because no file with %s belongs to them: %s", ending, listed)
    label = partial(_label, run=run, model=model, folder=folder, **settings)
    known = {"checkpoint": checkpoint, "classes": model.classes}
    try:
        rows, counts = label_files(run, cases, label, known=known, gallery=gallery, what="volumes")
    finally:
        if process_group.rank() == 0:
            shutil.rmtree(folder, ignore_errors=True)
    predicted = sum(row.get("voxels", 0) for row in rows)
    values = {"evaluated_checkpoint": checkpoint.name, **counts, "predicted_voxels": predicted}
    write_result(run, values)


def _label(
    name: str,
    members: Sequence[Path],
    drawn: bool,
    *,
    run: ResolvedRun,
    model: VolumeModel,
    folder: Path,
    probabilities: bool,
    **settings: Any,
) -> Labelled:
    """Labels a case on all ranks; writes it, by its name, on rank 0."""
    from sparsepipe.plots import style  # imports matplotlib
    from sparsepipe.plots.volumes import case_figure

    refused: DataError | None = None
    if process_group.rank() == 0:
        shutil.rmtree(folder, ignore_errors=True)  # of another case, or of a run that was killed
        folder.mkdir(exist_ok=True)
        try:
            volume = model.read(members, folder)
        except DataError as error:
            refused = error
    if refused := process_group.broadcast_object(refused):
        raise refused
    if run.ranks > 1:
        compute_on_grid(run, model.module, folder)
    if process_group.rank():
        return Labelled({}, "")
    if run.ranks > 1:
        logits_K = np.load(folder / "shards.npy", mmap_mode="r")[0]
    else:
        logits_K = model.logits(volume, **settings)
    labels, probabilities_K = model.restored(logits_K, volume, probabilities=probabilities)
    written = []
    for kind, values in (("volumes", labels), ("probabilities", probabilities_K)):
        if values is not None:
            written.append(path := run.directory.path / kind / name)
            with writing(path):
                axis = model.preparation.channel_axis
                write_volume(path, values, like=members[0], channel_axis=axis)
    if drawn and labels.ndim > 1:
        written.append(run.directory.path / "pictures" / f"{name}.png")
        grid = volume.prepared
        inside = tuple(map(slice, grid.sizes))  # a whole volume may be padded at its ends
        rows = np.moveaxis(logits_K[:, *inside], 1, 0)
        found = np.array([row_K.argmax(0) for row_K in rows], np.int16)
        slices = slices_of(
            *(volume.input_C[0][inside], np.zeros_like(found), found),
            spacing_mm=[math.nan] * found.ndim if grid.known == "nothing" else grid.spacing,
        )
        directions = grid.axes if grid.known == "place" else ""
        figure = case_figure(slices, model.classes, title=members[0].name, directions=directions)
        style.save_png(figure, written[-1])
    counts = [np.bincount(slab.ravel(), minlength=len(model.classes)) for slab in labels]
    row: dict[str, Any] = {"voxels": labels.size}
    voxel_ml = abs(float(np.linalg.det(volume.given.affine_44))) / 1000
    for each, count in zip(model.classes, np.sum(counts, axis=0).tolist(), strict=True):
        row[f"voxels/{each}"] = count
        if volume.given.known != "nothing" and labels.ndim == 3:
            row[f"ml/{each}"] = count * voxel_ml
    text = ", ".join(f"{row[f'voxels/{each}']:,} voxels of {each}" for each in model.classes)
    return Labelled(row, text, written)


def compute_on_grid(run: ResolvedRun, network: nn.Module, folder: Path) -> None:
    """Computes a volume over the run's grid of ranks, each of which reads and writes its part.

    Rank 0 must have prepared ``input.npy`` in the folder, on a disk that all ranks share; the
    logits [1, K, *sizes] are written to ``shards.npy``. Every rank must call this function.
    """
    trainer = run.trainer([WriteShards(folder / "shards.npy", samples=1)], silent=True)
    assert isinstance(trainer.strategy, SpatialStrategy)
    trainer.strategy.gather_predictions = False
    data = _Volume(np.load(folder / "input.npy", mmap_mode="r"))
    trainer.predict(_Network(network), datamodule=data, return_predictions=False)


class _Network(pl.LightningModule):
    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def predict_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return logits_of(self.network, batch["input"], flips=False)


class _Volume(pl.LightningDataModule, Dataset[dict[str, Any]]):
    """A single sample, of which a rank reads its part."""

    def __init__(self, input_C: FloatArray) -> None:
        super().__init__()
        self.sample_sizes, self._input_C = input_C.shape[1:], input_C
        self._part: Sequence[slice] = [slice(None)] * len(self.sample_sizes)

    def read_part(self, slices: Sequence[slice]) -> None:
        self._part = slices

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"input": np.array(self._input_C[:, *self._part]), "index": index}

    def predict_dataloader(self) -> DataLoader[dict[str, Any]]:
        return DataLoader(self)
