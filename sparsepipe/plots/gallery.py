"""Pictures of shapes with their predicted classes, and their true ones where these are known.

Shape suffixes: N points of one cloud.
"""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Sequence
from pathlib import PurePath
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from numpy.typing import ArrayLike, NDArray

from sparsepipe.plots import style

_MAX_POINTS = 3000
_PANEL_IN = (1.9, 2.15)
_NAME_IN = 0.15
_NAME_LETTERS = 26
"""Of a file's name above a shape; those in the middle of longer names are left out."""
_AZIMUTH_DEG, _ELEVATION_DEG = -55.0, 22.0
_RIGHT = LinearSegmentedColormap.from_list("right", ["#A9D3EE", style.BLUE, "#00304D"])
_WRONG = LinearSegmentedColormap.from_list("wrong", ["#F6C9A8", style.VERMILION, "#5E2900"])


def prediction_gallery(
    clouds: Sequence[ArrayLike],
    true: Sequence[int] | None,
    predicted: Sequence[int],
    classes: Sequence[str],
    path: str | os.PathLike[str],
    *,
    probabilities: Sequence[float] | None = None,
    files: Sequence[str] | None = None,
    columns: int = 6,
) -> None:
    """Writes a grid of shapes with true and predicted labels as a PNG.

    A right prediction is blue with a tick, a wrong one vermilion, framed and with a
    cross; where nobody knows the true class, all are blue. Shapes are seen from the side
    and a little above, z up, unit by unit undistorted; nearer points are darker.

    Args:
        clouds: point coordinates [N, 3] of each shape, any N and any unit.
        true: index into ``classes`` of each shape's label; None without labels.
        predicted: index into ``classes`` of each shape's prediction.
        classes: class names.
        path: the picture to write; its directories are made.
        probabilities: the probability the network gave to each prediction.
        files: the file of each shape, or its name; folders are shown where names are alike.
        columns: shapes in a row.

    Raises:
        ValueError: no shapes, unequal lengths, or a cloud that is not [N, 3].
        DataError: the picture cannot be written.
    """
    figure = gallery_figure(
        clouds, true, predicted, classes, probabilities=probabilities, files=files, columns=columns
    )
    style.save_png(figure, path)


def gallery_figure(
    clouds: Sequence[ArrayLike],
    true: Sequence[int] | None,
    predicted: Sequence[int],
    classes: Sequence[str],
    *,
    probabilities: Sequence[float] | None = None,
    files: Sequence[str] | None = None,
    columns: int = 6,
) -> Figure:
    """The figure that :func:`prediction_gallery` writes: one axes per shape."""
    count = len(clouds)
    given: dict[str, Sequence[Any] | None] = {
        "labels": true,
        "predictions": predicted,
        "probabilities": probabilities,
        "files": files,
    }
    lengths = {name: len(each) for name, each in given.items() if each is not None}
    if not count or columns < 1 or set(lengths.values()) != {count}:
        counts = ", ".join(f"{length} {name}" for name, length in lengths.items())
        raise ValueError(f"{count} clouds, {counts} in {columns} columns do not make a gallery")
    columns = min(columns, count)
    rows = math.ceil(count / columns)
    names = None if files is None else _ends(files)
    panel_in = _PANEL_IN[1] + (0.0 if files is None else _NAME_IN)
    figure = style.new_figure(
        width_in=max(columns * _PANEL_IN[0], 5.0), height_in=rows * panel_in + 0.5
    )
    figure.suptitle(
        _heading(true, predicted, has_probabilities=probabilities is not None),
        fontsize=style.TITLE_PT,
        color=style.INK,
    )
    for place in range(count):
        axes = figure.add_subplot(rows, columns, place + 1)
        is_right = true is None or int(true[place]) == int(predicted[place])
        _draw_cloud(axes, clouds[place], is_right=is_right)
        title = _sample_title(
            None if true is None else classes[true[place]],
            classes[predicted[place]],
            None if probabilities is None else probabilities[place],
        )
        axes.set_title(
            title if names is None else f"{_shortened(names[place])}\n{title}",
            fontsize=style.TICK_PT,
            color=style.INK if is_right else style.VERMILION,
            fontweight="normal" if is_right else "bold",
            pad=3,
            parse_math=False,
        )
    return figure


def _heading(
    true: Sequence[int] | None, predicted: Sequence[int], *, has_probabilities: bool
) -> str:
    """Two lines: what is shown, and how to read what stands above a shape."""
    shares = "%: probability of the prediction, by the network" if has_probabilities else ""
    if true is None:
        shapes = "1 shape" if len(predicted) == 1 else f"{len(predicted)} shapes"
        return f"Predicted classes of {shapes}\n{shares}"
    right = sum(int(t) == int(p) for t, p in zip(true, predicted, strict=True))
    marks = "✓ true class    ✗ true class → prediction"
    return f"Test shapes: {right} of {len(predicted)} recognised\n" + "    ".join(
        filter(None, (marks, shares))
    )


def _ends(files: Sequence[str]) -> list[str]:
    """The end of each path that no other one has."""
    ends = {
        file: ["/".join(parts[-n:]) for n in range(1, len(parts))]
        for file in files
        if (parts := PurePath(file).parts)
    }
    counts = Counter(end for file, own in ends.items() for end in {*own, file})
    return [next((end for end in ends.get(file, ()) if counts[end] == 1), file) for file in files]


def _shortened(name: str) -> str:
    # Letters that are bytes of no text cannot be drawn.
    name = name.encode("utf-8", "backslashreplace").decode()
    if len(name) <= _NAME_LETTERS:
        return name
    half = (_NAME_LETTERS - 1) // 2
    return f"{name[:half]}…{name[-half:]}"


def view(points_N3: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Projects points onto the picture plane.

    Returns:
        Positions [N, 2], right and up, in the points' own unit, and depths [N] that
        grow away from the viewer. Vertical lines stay vertical.
    """
    azimuth, elevation = math.radians(_AZIMUTH_DEG), math.radians(_ELEVATION_DEG)
    towards_viewer = np.array(
        [
            math.cos(elevation) * math.cos(azimuth),
            math.cos(elevation) * math.sin(azimuth),
            math.sin(elevation),
        ]
    )
    to_the_right = np.array([-math.sin(azimuth), math.cos(azimuth), 0.0])
    up = np.cross(towards_viewer, to_the_right)
    return points_N3 @ np.stack([to_the_right, up], axis=1), -(points_N3 @ towards_viewer)


def _sample_title(true_name: str | None, predicted_name: str, probability: float | None) -> str:
    share = "" if probability is None else f"  {100 * float(probability):.0f} %"
    if true_name is None:
        return f"{predicted_name}{share}"
    if true_name == predicted_name:
        return f"✓ {true_name}{share}\n"
    return f"✗ {true_name}\n→ {predicted_name}{share}"


def _draw_cloud(axes: Axes, cloud: ArrayLike, *, is_right: bool) -> None:
    points_N3 = np.asarray(cloud, dtype=np.float64)
    if points_N3.ndim != 2 or points_N3.shape[1] != 3:
        raise ValueError(f"a cloud has shape [N, 3], not {points_N3.shape}")
    points_N3 = points_N3[np.isfinite(points_N3).all(axis=1)]
    stride = max(1, math.ceil(len(points_N3) / _MAX_POINTS))
    flat_N2, depth_N = view(points_N3[::stride])
    far_first = np.argsort(-depth_N, kind="stable")
    axes.scatter(
        flat_N2[far_first, 0],
        flat_N2[far_first, 1],
        c=-depth_N[far_first],
        cmap=_RIGHT if is_right else _WRONG,
        s=_marker_area(len(flat_N2)),
        linewidths=0,
    )
    if not len(flat_N2):
        axes.text(0.5, 0.5, "no points", transform=axes.transAxes, ha="center", color=style.GREY)
    axes.set_aspect("equal", adjustable="datalim")
    axes.margins(0.06)
    axes.set_xticks([])
    axes.set_yticks([])
    for spine in axes.spines.values():
        spine.set_visible(not is_right)
        spine.set_color(style.VERMILION)
        spine.set_linewidth(1.5)


def _marker_area(count: int) -> float:
    return float(np.clip(4000 / max(count, 1), 1.6, 14.0))
