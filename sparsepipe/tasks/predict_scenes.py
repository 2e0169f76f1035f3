"""Labels the points of a user's scenes with a trained network, and writes and draws them.

Shape suffixes: P points of a scene, Q points of its file, K classes.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from sparsepipe.data.points import ExactArray, IntArray
from sparsepipe.data.scenes import Scene
from sparsepipe.data.scenes.writing import write_scene
from sparsepipe.errors import DataError
from sparsepipe.models.metrics import ious_of
from sparsepipe.runs.model import PointPredictions, SceneModel, spread
from sparsepipe.tasks.labelled_files import Labelled, label_files, names_of
from sparsepipe.tasks.result import write_result
from sparsepipe.tasks.task import ResolvedRun
from sparsepipe.utils.files import write_csv, write_text_atomic

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class LabelledScene:
    """A scene with its predictions.

    Attributes:
        scene: the scene, whose ``labels_P`` are its true classes, if the file has them.
        positions_Q3: positions of all points of its file, in full precision.
        kept_Q: which of these points are in the scene.
        found: predictions of all points of its file.
        counts_KK: points by true and predicted class; None without true classes.
    """

    scene: Scene
    positions_Q3: ExactArray
    kept_Q: NDArray[np.bool_]
    found: PointPredictions
    counts_KK: IntArray | None


def predict_scenes(
    run: ResolvedRun,
    model: SceneModel,
    files: Sequence[Path],
    *,
    checkpoint: Path,
    gallery: int,
    settings: Mapping[str, Any],
) -> None:
    """Labels the points of the scenes ``files``; writes scenes, tables, pictures and pages.

    Args:
        run: the run, to whose directory everything is written.
        model: the trained network.
        files: files and folders of scenes.
        checkpoint: the network's file, to be recorded.
        gallery: largest number of scenes that are drawn.
        settings: arguments of ``model.predict_scene``.
    """
    total_KK = np.zeros((len(model.classes),) * 2, np.int64)

    def label(name: str, members: Sequence[Path], drawn: bool) -> Labelled:
        nonlocal total_KK
        (file,) = members
        each = _labelled(model, file, settings)
        written = _write(run, model, file, name, each, drawn=drawn)
        total_KK += 0 if each.counts_KK is None else each.counts_KK
        row = {"points": len(each.found.labels_P), **_measures(each.counts_KK)}
        of_file = _class_rows(model.classes, each)
        return Labelled(row=row, text=_text(row, of_file), written=written, classes=of_file)

    names = names_of(files, lambda file: file.stem if file.is_file() else file.name)
    known = {"checkpoint": checkpoint, "classes": model.classes}
    given = {name: [file] for name, file in zip(names, files, strict=True)}
    rows, counts = label_files(run, given, label, known=known, gallery=gallery, what="scenes")
    if total_KK.any():
        _write_confusion(run, model.classes, total_KK)
    values = {
        "evaluated_checkpoint": checkpoint.name,
        **counts,
        "predicted_points": sum(row["points"] for row in rows),
    }
    write_result(run, values | _measures(total_KK if total_KK.any() else None))


def _labelled(model: SceneModel, file: Path, settings: Mapping[str, Any]) -> LabelledScene:
    """Reads a scene and predicts the classes of its points."""
    parsed = model.preprocess.reader.parse(file)
    scene, labels_P = parsed.scene, None
    if scene.labels_P is not None:
        try:
            numbers_V = model.preprocess.reader.class_numbers(parsed.values, source=file)
            labels_P = numbers_V[scene.labels_P]
        except DataError as error:
            log.warning("%s; its labels are not compared", error.message)
    scene = replace(scene, labels_P=labels_P)
    probabilities_PK = model.predict_scene(scene, **settings)
    counts_KK = None
    if labels_P is not None and (labels_P >= 0).any():
        size, is_known_P = len(model.classes), labels_P >= 0
        pairs_P = labels_P[is_known_P] * size + probabilities_PK.argmax(axis=1)[is_known_P]
        counts_KK = np.bincount(pairs_P, minlength=size**2).reshape(size, size)
    return LabelledScene(
        scene=scene,
        positions_Q3=parsed.positions_Q3,
        kept_Q=parsed.kept_Q,
        found=spread(probabilities_PK, parsed.kept_Q),
        counts_KK=counts_KK,
    )


def _write(
    run: ResolvedRun, model: SceneModel, file: Path, name: str, each: LabelledScene, *, drawn: bool
) -> list[Path]:
    """Writes a labelled scene in its formats and, if it is ``drawn``, a picture and a page."""
    from sparsepipe.plots import style  # imports matplotlib
    from sparsepipe.plots.scenes import scene_figure, scene_page

    stem = run.directory.path / "scenes" / name
    found, classes = each.found, model.classes
    labels = model.preprocess.reader.file_labels(len(classes))
    written = write_scene(
        stem,
        file,
        each.positions_Q3,
        labels_Q=found.labels_P,
        probability_Q=found.probabilities_PK.max(axis=1),
        colors_K3=style.class_colors(len(classes)),
        classes=classes,
        file_labels=labels,
    )
    if not drawn:
        return written
    upwards = np.roll([0, 1, 2], 2 - "xyz".index(model.preprocess.voxels.up_axis))
    points_P3 = each.scene.coords_P3[:, upwards].astype(np.float64)
    layers = {"prediction": found.labels_P[each.kept_Q]}
    if each.counts_KK is not None:
        layers["true class"] = np.asarray(each.scene.labels_P)
    title = "   ".join([file.name, *_in_percent(_measures(each.counts_KK))])
    picture, page = (stem.with_name(f"{stem.name}.{kind}") for kind in ("png", "html"))
    style.save_png(scene_figure(points_P3, layers, classes, title=title), picture)
    colors_P3 = each.scene.features.get("color")
    text = scene_page(points_P3, layers, classes, colors_P3=colors_P3, title=title)
    write_text_atomic(page, text)
    return [*written, picture, page]


def _class_rows(classes: Sequence[str], each: LabelledScene) -> list[dict[str, Any]]:
    """Returns a row for each class: its predicted points, their share and mean probability; where
    true classes are known, also its true points, and their accuracy and IoU.
    """
    labels_P = each.found.labels_P[each.kept_Q]
    points_K = np.bincount(labels_P, minlength=len(classes))
    probability_P = each.found.probabilities_PK[each.kept_Q].max(axis=1)
    sums_K = np.bincount(labels_P, weights=probability_P, minlength=len(classes))
    nothing_KK = np.zeros((len(classes), len(classes)), np.int64)
    counts_KK = nothing_KK if each.counts_KK is None else each.counts_KK
    true_K, iou_K = counts_KK.sum(axis=1), ious_of(torch.from_numpy(counts_KK)).tolist()
    return [
        {
            "class": name,
            "points": int(points_K[k]),
            "share": float(points_K[k] / len(labels_P)),
            "probability": float(sums_K[k] / points_K[k]) if points_K[k] else "",
            "true_points": "" if each.counts_KK is None else int(true_K[k]),
            "accuracy": float(counts_KK[k, k] / true_K[k]) if true_K[k] else "",
            "iou": "" if np.isnan(iou_K[k]) else iou_K[k],
        }
        for k, name in enumerate(classes)
    ]


def _measures(counts_KK: IntArray | None) -> dict[str, float]:
    """Returns accuracy and mean IoU of counts by true and predicted class; {} without counts."""
    if counts_KK is None:
        return {}
    mean_iou = float(ious_of(torch.from_numpy(counts_KK)).nanmean())
    return {"accuracy": float(np.trace(counts_KK) / counts_KK.sum()), "mean_iou": mean_iou}


def _in_percent(measures: Mapping[str, float]) -> list[str]:
    return [f"{name.replace('_iou', ' IoU')} {100 * v:.1f} %" for name, v in measures.items()]


def _write_confusion(run: ResolvedRun, classes: Sequence[str], counts_KK: IntArray) -> None:
    from sparsepipe.plots import style
    from sparsepipe.plots.confusion import confusion_figure, confusion_rows

    write_csv(run.directory.confusion, confusion_rows(counts_KK, classes, counted="points"))
    figure = confusion_figure(counts_KK, classes, counted="points")
    style.save_png(figure, run.directory.path / "confusion.png")


def _text(row: Mapping[str, Any], of_file: Sequence[Mapping[str, Any]]) -> str:
    ranked = sorted(of_file, key=lambda each: -each["points"])
    shares = [f"{each['class']} {100 * each['share']:.1f} %" for each in ranked if each["points"]]
    measures = {name: row[name] for name in ("accuracy", "mean_iou") if name in row}
    told = ", ".join([f"{row['points']:,} points", *_in_percent(measures)])
    return f"{told}: {', '.join(shares)}"
