"""Pictures of shapes with their predicted classes, and of reconstructed samples.

Shape suffixes: N points of a cloud, or samples; C channels of images.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import PurePath

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
"""Most characters of a file name above a shape; longer names are cut in the middle."""
_CELL_IN = 0.8  # side of a reconstruction
_AZIMUTH_DEG, _ELEVATION_DEG = -55.0, 22.0
_RIGHT = LinearSegmentedColormap.from_list("right", ["#A9D3EE", style.BLUE, "#00304D"])
_WRONG = LinearSegmentedColormap.from_list("wrong", ["#F6C9A8", style.VERMILION, "#5E2900"])


Images = NDArray[np.float32]


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
    """Draws a grid of shapes with their true and predicted classes.

    A right prediction is blue with a tick, a wrong one vermilion, framed and with a cross; all are
    blue if the true classes are unknown. Shapes are seen undistorted from the side and a little
    above, with z up; nearer points are darker.

    Args:
        clouds: point coordinates [N, 3] of each shape, for any N and in any unit.
        true: index into ``classes`` of each shape's label; None: the labels are unknown.
        predicted: index into ``classes`` of each shape's prediction; below 0: it is not finite.
        classes: class names.
        probabilities: the probability, from 0 to 1, that the network gave to each prediction.
        files: the path or name of each shape's file; folders are shown only where names are equal.
        columns: largest number of shapes in a row.
    """
    count = len(clouds)
    given = (true, predicted, probabilities, files)
    assert count, "a gallery needs at least one shape"
    assert {len(each) for each in given if each is not None} == {count}, "one of each for a shape"
    columns = min(columns, count)
    rows = math.ceil(count / columns)
    names = None if files is None else _ends(files)
    panel_in = _PANEL_IN[1] + (0.0 if files is None else _NAME_IN)
    figure = style.new_figure(
        width_in=max(columns * _PANEL_IN[0], 5.0), height_in=rows * panel_in + 0.5
    )
    shares = "%: probability of the prediction, by the network" if probabilities else ""
    heading = _heading(true, predicted, shares)
    figure.suptitle(heading, fontsize=style.TITLE_PT, color=style.INK)
    for place in range(count):
        axes = figure.add_subplot(rows, columns, place + 1)
        is_right = true is None or int(true[place]) == int(predicted[place])
        _draw_cloud(axes, clouds[place], is_right=is_right)
        is_finite = predicted[place] >= 0
        title = classes[predicted[place]] if is_finite else style.NOT_FINITE
        if probabilities is not None and is_finite:
            title += f"  {100 * float(probabilities[place]):.0f} %"
        if true is not None:
            title = f"✓ {title}\n" if is_right else f"✗ {classes[true[place]]}\n→ {title}"
        axes.set_title(
            title if names is None else f"{names[place]}\n{title}",
            fontsize=style.TICK_PT,
            color=style.INK if is_right else style.VERMILION,
            fontweight="normal" if is_right else "bold",
            pad=3,
            parse_math=False,
        )
    return figure


def _heading(true: Sequence[int] | None, predicted: Sequence[int], shares: str) -> str:
    count = len(predicted)
    if true is None:
        return f"Predicted classes of {count} shape{'s' if count > 1 else ''}\n{shares}"
    right = sum(int(t) == int(p) for t, p in zip(true, predicted, strict=True))
    marks = filter(None, ("✓ true class    ✗ true class → prediction", shares))
    return f"Test shapes: {right} of {count} recognised\n" + "    ".join(marks)


def _ends(files: Sequence[str]) -> list[str]:
    """Returns the fewest last components of each path that distinguish it from the other paths, as
    they are drawn: long ones lose their middle.
    """
    ends = {
        file: ["/".join(parts[-n:]) for n in range(1, len(parts))]
        for file in files
        if (parts := PurePath(file).parts)
    }
    counts = Counter(end for file, own in ends.items() for end in {*own, file})
    chosen = [next((end for end in ends.get(file, ()) if counts[end] == 1), file) for file in files]
    names, half = map(style.drawable, chosen), (_NAME_LETTERS - 1) // 2
    return [n if len(n) <= _NAME_LETTERS else f"{n[:half]}…{n[-half:]}" for n in names]


def view(
    points_N3: NDArray[np.float64],
    *,
    azimuth_deg: float = _AZIMUTH_DEG,
    elevation_deg: float = _ELEVATION_DEG,
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Projects points onto the picture plane.

    Args:
        points_N3: positions, with z up.
        azimuth_deg: direction in which the viewer is, from x towards y.
        elevation_deg: how far the viewer is above the horizon.

    Returns:
        Positions [N, 2], right and up, and depths [N], which grow away from the viewer, in
        the unit of the points. Vertical lines stay vertical.
    """
    azimuth, elevation = math.radians(azimuth_deg), math.radians(elevation_deg)
    level = math.cos(elevation)
    towards_viewer = np.array(
        [level * math.cos(azimuth), level * math.sin(azimuth), math.sin(elevation)]
    )
    to_the_right = np.array([-math.sin(azimuth), math.cos(azimuth), 0.0])
    up = np.cross(towards_viewer, to_the_right)
    return points_N3 @ np.stack([to_the_right, up], axis=1), -(points_N3 @ towards_viewer)


def _draw_cloud(axes: Axes, cloud: ArrayLike, *, is_right: bool) -> None:
    points_N3 = np.asarray(cloud, dtype=np.float64)
    points_N3 = points_N3[np.isfinite(points_N3).all(axis=1)]
    stride = max(1, math.ceil(len(points_N3) / _MAX_POINTS))
    flat_N2, depth_N = view(points_N3[::stride])
    far_first = np.argsort(-depth_N, kind="stable")
    axes.scatter(
        flat_N2[far_first, 0],
        flat_N2[far_first, 1],
        c=-depth_N[far_first],
        cmap=_RIGHT if is_right else _WRONG,
        s=float(np.clip(4000 / max(len(flat_N2), 1), 1.6, 14.0)),
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


def reconstructions_figure(domains: Mapping[str, Mapping[str, Images]]) -> Figure:
    """Draws a row for each domain and a block of columns for each kind of picture.

    Args:
        domains: for each domain, by kind (``input``, or the codes that were decoded), images [N, C,
            H, W] or volumes [N, C, D, H, W], seen along D. One channel is drawn in grey, three as
            colours, and for any other number the mean of the channels.
    """
    kinds = list(next(iter(domains.values())))
    count = max(len(each[kinds[0]]) for each in domains.values())
    figure = style.new_figure(
        width_in=1.2 + len(kinds) * (count * _CELL_IN + 0.2),
        height_in=0.5 + len(domains) * _CELL_IN,
    )
    axes = figure.subplots(len(domains), len(kinds), squeeze=False)
    for row, (name, pictures) in zip(axes, domains.items(), strict=True):
        for place, kind in zip(row, kinds, strict=True):
            images = pictures[kind]
            images = images.max(axis=2) if images.ndim == 5 else images
            has_colours = images.shape[1] == 3
            images = np.moveaxis(images, 1, -1) if has_colours else images.mean(axis=1)
            strip = np.concatenate(np.clip(images, 0, 1), axis=1)
            place.imshow(strip, cmap="gray", vmin=0, vmax=1)
            place.set_xticks([])
            place.set_yticks([])
            for side in place.spines.values():
                side.set_color(style.FAINT)
        row[0].set_ylabel(
            name, rotation=0, ha="right", va="center", fontsize=style.TICK_PT, color=style.INK
        )
    for place, kind in zip(axes[0], kinds, strict=True):
        place.set_title(kind, fontsize=style.LABEL_PT, color=style.INK)
    return figure
