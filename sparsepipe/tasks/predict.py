"""The task ``predict``: predicts the classes of a user's files, or of their points or voxels."""

from __future__ import annotations

import glob
import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from sparsepipe.config.finished_run import Training, differences
from sparsepipe.config.run_spec import RunSpec
from sparsepipe.data.files import check_regular, digest_file, digest_values
from sparsepipe.data.formats import SHAPE_SUFFIXES, check_shape_file
from sparsepipe.data.scenes import SceneDataModule
from sparsepipe.data.scenes.formats import READERS, is_scene, members_of
from sparsepipe.data.scenes.sources import scene_names
from sparsepipe.data.volumes import VolumeDataModule
from sparsepipe.data.volumes.formats import SUFFIXES, stem_of, suffix_of
from sparsepipe.data.volumes.volume_files import case_files
from sparsepipe.errors import ConfigError, DataError, SparsePipeError
from sparsepipe.runs.checkpoints import best_checkpoint
from sparsepipe.runs.model import (
    BLOCK_VOXELS,
    Model,
    Prediction,
    SceneModel,
    VolumeModel,
    data_of,
    trained_model,
)
from sparsepipe.runs.rundir import RunDir
from sparsepipe.runtime.collectives import process_group
from sparsepipe.tasks.labelled_files import LOGGED, spread_over
from sparsepipe.tasks.predict_scenes import predict_scenes
from sparsepipe.tasks.predict_volumes import predict_volumes
from sparsepipe.tasks.presentation import clouds
from sparsepipe.tasks.result import write_result
from sparsepipe.tasks.task import ResolvedRun, Task
from sparsepipe.utils.arguments import Count
from sparsepipe.utils.files import expanded, write_csv, write_json
from sparsepipe.utils.progress import progress

log = logging.getLogger(__name__)

_FREE = ("data.batch_size",)
"""Settings that may differ from the training's: how many shapes are computed at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Predict(Task):
    """Predicts the classes of shapes, of the points of scenes, or of the voxels of volumes:
    ``input`` is a file, a folder or a pattern.

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
    overlap: Annotated[float, Field(ge=0, lt=1)] = 0.5
    probabilities: bool = False

    def run(self, run: ResolvedRun) -> None:
        """Predicts the classes of the files; writes them as tables, and draws some files."""
        path = self.checkpoint(run.spec)
        assert run.training is not None  # as prepare has checked
        model = trained_model(path, run.training, device=run.own_device)
        files, _ = find_files(run.spec.input, kind=_kind(run.training))
        if process_group.rank() == 0:
            log.info("predicting the classes of %s with %s", _files(len(files)), path)
        known: dict[str, Any] = {"checkpoint": path, "gallery": self.gallery}
        settings: dict[str, Any] = {"flips": self.flips}
        if isinstance(model, VolumeModel):
            settings |= {"overlap": self.overlap, "probabilities": self.probabilities}
            predict_volumes(run, model, files, **known, settings=settings)
            return
        if isinstance(model, SceneModel):
            settings |= {"block_voxels": self.block_voxels}
            predict_scenes(run, model, files, **known, settings=settings)
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
        named = {"checkpoint": path, "classes": model.classes}
        write_json(run.directory.predictions_json, {**named, **lists})
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
        pictured = {files[n] for n in spread_over(len(files), most=self.gallery)}
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
        kind = _kind(run.training)
        if run.ranks > 1 and (kind != "volumes" or self.flips):
            raise ConfigError(
                f"parallel asks for {run.ranks} ranks, which can share only volumes, and these "
                "only without task.flips, for which each rank would hold the whole volume",
                remedy="choose parallel=single",
            )
        found = differences(run.spec.to_dict(), run.training)
        if other := [each for each in found if each.key not in _FREE]:
            raise ConfigError(
                f"files would not be predicted as in the training of {run.spec.checkpoint}: "
                + "; ".join(map(str, other)),
                remedy="leave these settings out of the command, which then takes those of the "
                "training",
            )
        files, others = find_files(run.spec.input, kind=kind)
        if others:
            log.info("skipped files of other formats: %s", _counted(others))
        named = run.training.values["data"]["source"].get("channels")
        channels = named if isinstance(named, list) else []  # of generated data, a number
        known = []
        with progress("looking at files") as advance:
            for file in files:
                try:
                    for member in _members(file, kind, channels=channels):
                        (check_shape_file if kind == "shapes" else check_regular)(member)
                        known.append([str(member.absolute()), digest_file(member)])
                except (OSError, DataError) as error:
                    known.append([str(file.absolute()), str(error)])  # reported as unreadable
                advance(len(files))
        return digest_values(known)


Kind = Literal["shapes", "scenes", "volumes"]


def _is_shape(path: Path) -> bool:
    return path.suffix.lower() in SHAPE_SUFFIXES and not path.is_dir()  # or a link to nothing


def _is_volume(path: Path) -> bool:
    with suppress(DataError):
        return bool(suffix_of(path))
    return False


_FORMATS: Mapping[Kind, tuple[tuple[str, ...], Callable[[Path], bool]]] = {
    "shapes": (SHAPE_SUFFIXES, _is_shape),
    "scenes": (tuple(READERS), is_scene),
    "volumes": (SUFFIXES, _is_volume),
}
"""The suffixes of each kind of files, and a function that tells whether a path is such a file."""


def _kind(training: Training) -> Kind:
    _, data = data_of(training)
    if issubclass(data, VolumeDataModule):
        return "volumes"
    return "scenes" if issubclass(data, SceneDataModule) else "shapes"


def _members(path: Path, kind: Kind, *, channels: Sequence[str]) -> list[Path]:
    """Returns the files of which a shape, a scene or a case of volumes consists."""
    if kind == "scenes":
        return members_of(path)
    is_first = kind == "volumes" and stem_of(path).endswith("".join(channels[:1]))
    case = case_files(path, channels) if is_first else (path,)
    return sorted(file for each in case for file in (each, *each.rglob("*")) if not file.is_dir())


def find_files(source: str | None, *, kind: Kind = "shapes") -> tuple[list[Path], Counter[str]]:
    """Returns the files of shapes, scenes or volumes that ``source`` names, by path, and numbers of
    others by suffix.

    A folder stands for all files in and below it, except hidden ones, and a pattern for all files
    that match it. A single file is taken whatever its format is; so is the folder of one scene or
    of one zarr array.
    """
    suffixes, is_one = _FORMATS[kind]
    remedy = (
        "set input= to a file, a folder or a pattern such as 'parts/*.stl'; the formats are "
        + ", ".join(suffixes)
    )
    if source is None:
        raise ConfigError("task=predict needs input", remedy=remedy)
    path = expanded(source)
    if path == Path(path.anchor or "/"):  # as input=$PARTS/ is if PARTS is not set
        raise ConfigError(f"input={source} is the whole file system", remedy=remedy)
    if path.exists() and (not path.is_dir() or is_one(path)):
        return [path], Counter()
    if path.is_dir():
        below = [each.relative_to(path) for each in path.rglob("*")]
        paths = [path / each for each in below if not any(p.startswith(".") for p in each.parts)]
    else:
        paths = [Path(each) for each in glob.glob(str(path), recursive=True)]
    if kind == "scenes" and path.is_dir():
        paths = [path / name for name in scene_names(path)]
    found, others = [each for each in paths if is_one(each)], Counter[str]()
    if kind != "scenes":
        inside = {*found}  # a zarr array is a folder of files
        rest = [each for each in paths if not (each.is_dir() or inside & {each, *each.parents})]
        others.update(each.suffix.lower() or each.name for each in rest)
    if not found:
        named = paths or path.is_dir()
        what = f"{path} names no {'shape file' if kind == 'shapes' else kind.removesuffix('s')}"
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
    for row in predicted[:LOGGED]:
        first, *others = (
            f"{each['class']} {100 * each['probability']:.1f} %" for each in (row, *row["next"])
        )
        log.info("%s: %s (%s)", row["file"], first, ", ".join(others))
    if len(predicted) > LOGGED:
        log.info("and %s more", _files(len(predicted) - LOGGED))
    counts = Counter(row["class"] for row in predicted).most_common()
    log.info("%s: %s", _files(len(predicted)), ", ".join(f"{n} {name}" for name, n in counts))
    if unreadable:
        shown = "\n".join(f"  {row['error']} ({row['remedy']})" for row in unreadable[:LOGGED])
        log.warning("%s cannot be read:\n%s", _files(len(unreadable)), shown)
    log.info("all are listed in %s", directory.predictions)
    if directory.gallery.exists():
        log.info("picture: %s", directory.gallery)
