"""The task ``predict``: predicts the classes of a user's own files, or of the points in them."""

from __future__ import annotations

import glob
import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from sparsepipe.config.finished_run import differences
from sparsepipe.config.run_spec import RunSpec
from sparsepipe.data.files import check_regular, digest_file, digest_values
from sparsepipe.data.formats import SHAPE_SUFFIXES, check_shape_file
from sparsepipe.data.scenes import SceneDataModule
from sparsepipe.data.scenes.formats import READERS, is_scene, members_of
from sparsepipe.data.scenes.sources import scene_names
from sparsepipe.errors import ConfigError, DataError, SparsePipeError
from sparsepipe.runs.checkpoints import best_checkpoint
from sparsepipe.runs.model import (
    BLOCK_VOXELS,
    Model,
    Prediction,
    SceneModel,
    data_of,
    trained_model,
)
from sparsepipe.runs.rundir import RunDir
from sparsepipe.tasks.predict_scenes import predict_scenes
from sparsepipe.tasks.presentation import clouds
from sparsepipe.tasks.result import write_result
from sparsepipe.tasks.task import ResolvedRun, Task
from sparsepipe.utils.arguments import Count
from sparsepipe.utils.files import expanded, write_csv, write_json
from sparsepipe.utils.progress import progress

log = logging.getLogger(__name__)

_LOGGED = 20
_FREE = ("data.batch_size",)
"""Settings that may differ from the training's: how many shapes are computed at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Predict(Task):
    """Predicts the classes of shapes, or of the points of scenes: ``input`` is a file, a folder or
    a pattern.

    ``checkpoint`` is a file or the directory of a run, whose ``best.ckpt`` is preferred to
    ``last.ckpt``. The network and the preparation of its input are those of the training.

    ``conf/task/predict.yaml`` describes the settings.
    """

    alone: ClassVar[bool] = True
    as_trained: ClassVar[bool] = True
    not_identity: ClassVar[tuple[str, ...]] = ("input", *_FREE)

    gallery: int = 24
    block_voxels: Count = BLOCK_VOXELS
    flips: bool = False

    def run(self, run: ResolvedRun) -> None:
        """Predicts the classes of the files; writes them as tables, and draws some files."""
        path = self.checkpoint(run.spec)
        assert run.training is not None  # as prepare has checked
        model = trained_model(path, run.training, device=run.own_device)
        files, _ = find_files(run.spec.input, scenes=isinstance(model, SceneModel))
        log.info("predicting the classes of %s with %s", _files(len(files)), path)
        if isinstance(model, SceneModel):
            settings = {"block_voxels": self.block_voxels, "flips": self.flips}
            count = self.gallery
            predict_scenes(run, model, files, checkpoint=path, gallery=count, settings=settings)
            return
        found, shapes = self._predict(run, model, files)
        errors = [each for each in found.values() if isinstance(each, SparsePipeError)]
        if len(errors) == len(found):
            raise DataError(
                f"{_files(len(found))} cannot be read; the first error: {errors[0].message}",
                remedy=errors[0].remedy,
            )
        rows, lists = _tables(found)
        write_csv(run.directory.predictions, rows)
        known = {"checkpoint": path, "classes": model.classes}
        write_json(run.directory.predictions_json, {**known, **lists})
        if shapes:
            from sparsepipe.plots import style  # imports matplotlib
            from sparsepipe.plots.gallery import gallery_figure

            drawn = {f: e for f, e in found.items() if f in shapes and isinstance(e, Prediction)}
            figure = gallery_figure(
                [shapes[file] for file in drawn],
                None,
                [model.classes.index(each.name) for each in drawn.values()],
                model.classes,
                probabilities=[each.probability for each in drawn.values()],
                files=[str(file) for file in drawn],
            )
            style.save_png(figure, run.directory.gallery)
        counts = {"predicted_files": len(found) - len(errors), "unreadable_files": len(errors)}
        write_result(run, {"evaluated_checkpoint": path.name, **counts})
        _log(run.directory, lists)

    def _predict(
        self, run: ResolvedRun, model: Model, files: Sequence[Path]
    ) -> tuple[dict[Path, Prediction | SparsePipeError], dict[Path, NDArray[np.float64]]]:
        """Returns each file's prediction or error, and voxels [N, 3] of the files to draw."""
        count = max(0, min(self.gallery, len(files)))
        pictured = {files[int(n)] for n in np.linspace(0, len(files) - 1, count).round()}
        shapes: dict[Path, NDArray[np.float64]] = {}
        found: dict[Path, Prediction | SparsePipeError] = {}
        size = int(run.spec.data.get("batch_size", 1))
        with progress("predicting") as advance:
            for first in range(0, len(files), size):
                read: dict[Path, dict[str, Any]] = {}
                for file in files[first : first + size]:
                    try:
                        read[file] = model.preprocess.sample(file)
                    except SparsePipeError as error:
                        found[file] = error
                    advance(len(files))
                # A reader may have reported a signal as an error in the file.
                run.watch.raise_if_stopped()
                found |= dict(zip(read, model.predict_samples(list(read.values())), strict=True))
                for file in pictured & read.keys():
                    (shapes[file],) = clouds(model.preprocess.batch([read[file]])["input"])
        return {file: found[file] for file in files}, shapes

    def checkpoint(self, spec: RunSpec) -> Path:
        """Returns the path of the network's checkpoint file."""
        return best_checkpoint(spec, task="predict")

    def prepare(self, run: ResolvedRun) -> str:
        """Returns a digest of the files' paths and contents, for the run's identity."""
        if run.training is None:
            raise ConfigError(
                f"the training of {run.spec.checkpoint} is unknown",
                remedy="give the directory of its run, or a checkpoint that a run has written",
            )
        scenes = issubclass(data_of(run.training)[1], SceneDataModule)
        found = differences(run.spec.to_dict(), run.training)
        if other := [each for each in found if each.key not in _FREE]:
            raise ConfigError(
                f"files would not be predicted as in the training of {run.spec.checkpoint}: "
                + "; ".join(map(str, other)),
                remedy="leave these settings out of the command, which then takes those of the "
                "training",
            )
        files, others = find_files(run.spec.input, scenes=scenes)
        if others:
            log.info("skipped files of other formats: %s", _counted(others))
        known = []
        with progress("looking at files") as advance:
            for file in files:
                try:
                    for member in members_of(file) if scenes else [file]:
                        (check_regular if scenes else check_shape_file)(member)
                        known.append([str(member.absolute()), digest_file(member)])
                except (OSError, DataError) as error:
                    known.append([str(file.absolute()), str(error)])  # reported as unreadable
                advance(len(files))
        return digest_values(known)


def find_files(source: str | None, *, scenes: bool = False) -> tuple[list[Path], Counter[str]]:
    """Returns the files of shapes or ``scenes`` that ``source`` names, by path, and numbers of
    others by suffix.

    A folder stands for all files in and below it, except hidden ones, and a pattern for all files
    that match it. A single file is taken whatever its format is; so is the folder of one scene.
    """
    suffixes = tuple(READERS) if scenes else SHAPE_SUFFIXES
    remedy = (
        "set input= to a file, a folder or a pattern such as 'parts/*.stl'; the formats are "
        + ", ".join(suffixes)
    )
    if source is None:
        raise ConfigError("task=predict needs input", remedy=remedy)
    path = expanded(source)
    if path == Path(path.anchor or "/"):  # as input=$PARTS/ is if PARTS is not set
        raise ConfigError(f"input={source} is the whole file system", remedy=remedy)
    if path.exists() and (not path.is_dir() or (scenes and is_scene(path))):
        return [path], Counter()
    if path.is_dir():
        below = [each.relative_to(path) for each in path.rglob("*")]
        paths = [path / each for each in below if not any(p.startswith(".") for p in each.parts)]
    else:
        paths = [Path(each) for each in glob.glob(str(path), recursive=True)]
    others = Counter[str]()
    if scenes:
        found = [path / name for name in scene_names(path)] if path.is_dir() else paths
        found = [each for each in found if is_scene(each)]
    else:
        # Also dangling links, which are reported.
        files = [each for each in paths if not each.is_dir()]
        found = [each for each in files if each.suffix.lower() in suffixes]
        others.update(each.suffix.lower() or each.name for each in {*files} - {*found})
    if not found:
        named = paths or path.is_dir()
        what = f"{path} names no {'scene' if scenes else 'shape file'}"
        what = what if named else f"no file or folder matches {path}"
        but = f", only {_counted(others)}" if others else ""
        raise ConfigError(f"{what}{but}", remedy=remedy)
    return sorted(found), others


def _counted(suffixes: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {suffix}" for suffix, count in sorted(suffixes.items()))


def _files(count: int) -> str:
    return "1 file" if count == 1 else f"{count:,} files"


def _tables(
    found: Mapping[Path, Prediction | SparsePipeError],
) -> tuple[list[dict[str, Any]], dict[str, list[dict[str, Any]]]]:
    """Returns the rows of ``predictions.csv``, and the lists of ``predictions.json`` by key."""
    ranks = ("", "second", "third")
    names = [(rank or "class", f"{rank}_probability".lstrip("_")) for rank in ranks]
    blank = dict.fromkeys([*(name for pair in names for name in pair), "error", "remedy"], "")
    rows, predictions, unreadable = [], [], []
    for file, each in found.items():
        row: dict[str, Any] = {"file": str(file), **blank}
        if isinstance(each, SparsePipeError):
            why = {"error": each.message, "remedy": each.remedy}
            unreadable.append({"file": file, **why})
            rows.append(row | why)
            continue
        ranked = list(each.probabilities.items())[: len(ranks)]
        for pair, values in zip(names, ranked, strict=False):
            row |= dict(zip(pair, values, strict=True))
        rows.append(row)
        first, *others = ({"class": name, "probability": share} for name, share in ranked)
        predictions.append({"file": file, **first, "next": others})
    return rows, {"predictions": predictions, "unreadable": unreadable}


def _log(directory: RunDir, lists: Mapping[str, Sequence[Mapping[str, Any]]]) -> None:
    predicted, unreadable = lists["predictions"], lists["unreadable"]
    for row in predicted[:_LOGGED]:
        first, *others = (
            f"{each['class']} {100 * each['probability']:.1f} %" for each in (row, *row["next"])
        )
        log.info("%s: %s (%s)", row["file"], first, ", ".join(others))
    if len(predicted) > _LOGGED:
        log.info("and %s more", _files(len(predicted) - _LOGGED))
    counts = Counter(row["class"] for row in predicted).most_common()
    log.info("%s: %s", _files(len(predicted)), ", ".join(f"{n} {name}" for name, n in counts))
    if unreadable:
        shown = "\n".join(f"  {row['error']} ({row['remedy']})" for row in unreadable[:_LOGGED])
        log.warning("%s cannot be read:\n%s", _files(len(unreadable)), shown)
    log.info("all are listed in %s", directory.predictions)
    if directory.gallery.exists():
        log.info("picture: %s", directory.gallery)
