"""The task ``predict``: the classes of somebody's own files, by a trained network."""

from __future__ import annotations

import glob
import logging
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from sparsepipe.config.finished_run import differences
from sparsepipe.config.run_spec import RunSpec
from sparsepipe.data.files import digest_file, digest_values
from sparsepipe.data.formats import SHAPE_SUFFIXES, check_shape_file
from sparsepipe.errors import ConfigError, DataError, SparsePipeError
from sparsepipe.planning.devices import cuda_devices
from sparsepipe.runs.checkpoints import best_checkpoint
from sparsepipe.runs.model import Model, Prediction, load, preprocessing_of
from sparsepipe.runs.rundir import RunDir
from sparsepipe.tasks.presentation import clouds
from sparsepipe.tasks.result import write_result
from sparsepipe.tasks.task import ResolvedRun, Task
from sparsepipe.utils.files import expanded, write_json
from sparsepipe.utils.progress import progress
from sparsepipe.utils.tables import write_csv

log = logging.getLogger(__name__)

_NEXT = ("second", "third")
_LOGGED = 20
_FREE = ("data.batch_size",)
"""Settings that may differ from the training: how many shapes are computed at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Predict(Task):
    """Predicts the classes of files: ``input`` is one, a folder of them or a pattern.

    ``checkpoint`` names a file or a run directory, of which it takes ``best.ckpt`` where there is
    one. The network, and what becomes of a shape before it sees that, are those of the training.

    Attributes:
        gallery: files in ``predictions.png``.
    """

    alone: ClassVar[bool] = True
    as_trained: ClassVar[bool] = True
    not_identity: ClassVar[tuple[str, ...]] = ("input", *_FREE)

    gallery: int = 24

    def run(self, run: ResolvedRun) -> None:
        """Predicts, and writes tables and a picture.

        Raises:
            CheckpointError: the checkpoint is broken.
            DataError: not one of the files can be read.
        """
        path = self.checkpoint(run.spec)
        files, _ = find_files(run.spec.input)
        device = "cpu"
        if run.inventory.accelerator == "cuda":
            (index,) = cuda_devices(run.places, run.inventory, rank=0, nodes=1)
            device = f"cuda:{index}"
        model = load(str(run.spec.checkpoint), device=device)
        log.info("predicting the classes of %s by %s", _files(len(files)), path)
        found, shapes = self._predict(run, model, files)
        errors = [each for each in found.values() if isinstance(each, SparsePipeError)]
        if len(errors) == len(found):
            raise DataError(
                f"not one of {len(found)} files can be read; the first: {errors[0].message}",
                remedy=errors[0].remedy,
            )
        write_csv(run.directory.predictions, [_row(*each) for each in found.items()])
        lists = _lists(found)
        write_json(
            run.directory.predictions_json,
            {"checkpoint": path, "classes": model.classes, **lists},
        )
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
        values = {
            "predicted_files": len(found) - len(errors),
            "unreadable_files": len(errors),
        }
        write_result(run, {"evaluated_checkpoint": path.name, **values})
        _log(run.directory, lists)

    def _predict(
        self, run: ResolvedRun, model: Model, files: Sequence[Path]
    ) -> tuple[dict[Path, Prediction | SparsePipeError], dict[Path, NDArray[np.float64]]]:
        """What became of each file, and occupied voxels [N, 3] of those in the picture."""
        count = max(0, min(self.gallery, len(files)))
        pictured = {files[int(n)] for n in np.linspace(0, len(files) - 1, count).round()}
        shapes: dict[Path, NDArray[np.float64]] = {}
        found: dict[Path, Prediction | SparsePipeError] = {}
        for batch in _read(model, files, size=int(run.spec.data.get("batch_size", 1))):
            run.watch.raise_if_stopped()  # a reader may have taken the signal for its own error
            read = {file: each for file, each in batch.items() if isinstance(each, dict)}
            predicted = model.predict_samples(list(read.values()))
            found |= {file: e for file, e in batch.items() if isinstance(e, SparsePipeError)}
            found |= dict(zip(read, predicted, strict=True))
            for file in pictured & read.keys():
                (shapes[file],) = clouds(model.preprocess.batch([read[file]])["input"])
        return {file: found[file] for file in files}, shapes

    def checkpoint(self, spec: RunSpec) -> Path:
        """The checkpoint file of the network.

        Raises:
            ConfigError: none is named.
            CheckpointError: none exists.
        """
        return best_checkpoint(spec, task="predict")

    def prepare(self, run: ResolvedRun) -> str:
        """A digest of places and contents of the files, since these make the run another one."""
        if run.training is None:
            raise ConfigError(
                f"the training of {run.spec.checkpoint} is unknown",
                remedy="give the directory of its run, or a checkpoint that a run has written",
            )
        preprocessing_of(run.training)
        found = differences(run.spec.to_dict(), run.training)
        if other := [each for each in found if each.key not in _FREE]:
            raise ConfigError(
                f"shapes would be other input than in the training of {run.spec.checkpoint}: "
                + "; ".join(map(str, other)),
                remedy="leave these settings out of the command, which then takes those of the "
                "training",
            )
        files, others = find_files(run.spec.input)
        if others:
            log.info("passed over files of other formats: %s", _counted(others))
        known = []
        with progress("looking at files") as advance:
            for file in files:
                known.append([str(file.absolute()), _digest(file)])
                advance(len(files))
        return digest_values(known)


def find_files(source: str | None) -> tuple[list[Path], Counter[str]]:
    """The files of shapes that ``input`` names, in the order of their paths.

    Of a folder these are all in it and in folders below it, of a pattern all that match it. Hidden
    files and folders are passed over, and files of other formats, of which the number by suffix is
    returned beside. A file that is named alone is taken whatever it is.

    Raises:
        ConfigError: nothing is named, or there are none.
    """
    formats = ", ".join(SHAPE_SUFFIXES)
    if source is None:
        raise ConfigError(
            "task=predict needs input",
            remedy="set input= to a file, a folder or a pattern such as 'parts/*.stl'; "
            f"formats are {formats}",
        )
    path = expanded(source)
    if path.is_dir():
        there = sorted(
            each
            for each in path.rglob("*")
            if not any(part.startswith(".") for part in each.relative_to(path).parts)
        )
    elif path.exists():
        return [path], Counter()
    else:
        there = sorted(map(Path, glob.glob(str(path), recursive=True)))
    files = [each for each in there if not each.is_dir()]  # also links to nothing, to be reported
    taken = [each for each in files if each.suffix.lower() in SHAPE_SUFFIXES]
    others = Counter(each.suffix.lower() or each.name for each in set(files) - set(taken))
    if not taken:
        what = f"no file of a shape in {path}" if there else f"no file or folder {path}"
        raise ConfigError(
            f"there is {what}" + (f", but {_counted(others)}" if others else ""),
            remedy="set input= to a file, a folder or a pattern such as 'parts/*.stl'; "
            f"formats are {formats}",
        )
    return taken, others


def _counted(suffixes: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {suffix}" for suffix, count in sorted(suffixes.items()))


def _files(count: int) -> str:
    return "1 file" if count == 1 else f"{count:,} files"


def _digest(file: Path) -> str:
    try:
        check_shape_file(file)
        return digest_file(file)
    except (OSError, DataError) as error:
        return str(error)  # it is reported as a file that cannot be read


def _read(
    model: Model, files: Sequence[Path], *, size: int
) -> Iterator[dict[Path, dict[str, Any] | SparsePipeError]]:
    with progress("predicting") as advance:
        for first in range(0, len(files), size):
            batch: dict[Path, dict[str, Any] | SparsePipeError] = {}
            for file in files[first : first + size]:
                try:
                    batch[file] = model.preprocess.sample(file)
                except SparsePipeError as error:
                    batch[file] = error
                advance(len(files))
            yield batch


def _row(file: Path, found: Prediction | SparsePipeError) -> dict[str, Any]:
    names = ("class", "probability", *(f"{n}{end}" for n in _NEXT for end in ("", "_probability")))
    row: dict[str, Any] = {"file": str(file), **dict.fromkeys(names, ""), "error": "", "remedy": ""}
    if isinstance(found, SparsePipeError):
        return row | {"error": found.message, "remedy": found.remedy}
    ranked = list(found.probabilities.items())[: 1 + len(_NEXT)]
    return row | dict(zip(names, (value for pair in ranked for value in pair), strict=False))


def _lists(found: Mapping[Path, Prediction | SparsePipeError]) -> dict[str, list[dict[str, Any]]]:
    """The same for programs: ``predictions``, and ``unreadable`` files."""
    predictions, unreadable = [], []
    for file, each in found.items():
        if isinstance(each, SparsePipeError):
            unreadable.append({"file": file, "error": each.message, "remedy": each.remedy})
        else:
            ranked = [{"class": k, "probability": p} for k, p in each.probabilities.items()]
            predictions.append({"file": file, **ranked[0], "next": ranked[1 : 1 + len(_NEXT)]})
    return {"predictions": predictions, "unreadable": unreadable}


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
