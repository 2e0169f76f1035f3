"""Pictures and pages of scenes whose points are coloured by class.

Shape suffixes: P points, K classes.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
import numpy as np
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from numpy.typing import NDArray

from sparsepipe.plots import style
from sparsepipe.plots.gallery import view

_MOST_DRAWN, _MOST_ON_PAGE = 60_000, 200_000
"""Most points of a picture and of a page; of larger scenes, evenly spread points are shown."""
_AZIMUTHS_DEG, _ELEVATION_DEG = (-55.0, 125.0), 50.0
_HIDDEN = "ceiling"
"""Class that pictures leave out and pages hide at first, since it covers the rest of a room."""

Layers = Mapping[str, NDArray[np.int64]]
"""Class numbers [P] by what they are, such as ``prediction``; negative ones are unknown."""


def scene_figure(
    points_P3: NDArray[np.float64], layers: Layers, classes: Sequence[str], *, title: str
) -> Figure:
    """Draws a scene from two opposite sides, a row for each layer, with z up.

    Args:
        points_P3: finite positions in any unit.
        layers: the classes of the points, at least one layer.
        classes: names of the K classes.
        title: heading of the picture.
    """
    figure = style.new_figure(width_in=11.0, height_in=0.6 + 3.6 * len(layers))
    figure.suptitle(style.drawable(title), fontsize=style.TITLE_PT, color=style.INK)
    axes = figure.subplots(
        len(layers), len(_AZIMUTHS_DEG), squeeze=False, sharex="col", sharey="col"
    )
    colors_K3 = style.class_colors(len(classes)) / 255
    shown, hidden = set[int](), classes.index(_HIDDEN) if _HIDDEN in classes else -1
    for row, (name, labels_P) in zip(axes, layers.items(), strict=True):
        rows = _spread(np.flatnonzero((labels_P != hidden) & (labels_P >= 0)), _MOST_DRAWN)
        shown |= {*labels_P[rows].tolist()}
        for place, azimuth_deg in zip(row, _AZIMUTHS_DEG, strict=True):
            flat_n2, depth_n = view(
                points_P3[rows], azimuth_deg=azimuth_deg, elevation_deg=_ELEVATION_DEG
            )
            order = np.argsort(-depth_n, kind="stable")
            area = float(np.clip(60_000 / max(len(rows), 1), 1.5, 9.0))
            colors = colors_K3[labels_P[rows][order]]
            place.scatter(*flat_n2[order].T, c=colors, s=area, linewidths=0)
            place.set_aspect("equal")
            place.set_axis_off()
        row[0].set_title(name, fontsize=style.LABEL_PT, color=style.INK, loc="left")
    marks = [
        Line2D([], [], marker="o", linestyle="", color=tuple(colors_K3[k]), label=classes[k])
        for k in sorted(shown)
    ]
    if hidden >= 0:
        marks.append(Line2D([], [], linestyle="", label=f"{_HIDDEN} left out"))
    if marks:
        figure.legend(
            handles=marks, loc="outside right upper", fontsize=style.TICK_PT, frameon=False
        )
    return figure


def scene_page(
    points_P3: NDArray[np.float64],
    layers: Layers,
    classes: Sequence[str],
    *,
    colors_P3: NDArray[np.float32] | None = None,
    title: str,
) -> str:
    """Returns a scene as an HTML page that turns it, without any other file or a network.

    Args:
        points_P3: finite positions in any unit, with z up.
        layers: the classes of the points, at least one layer.
        classes: names of the K classes.
        colors_P3: the points' own colours in [0, 1]; None: unknown.
        title: title of the page.
    """
    rows = _spread(np.arange(len(points_P3)), _MOST_ON_PAGE)
    near_n3 = points_P3[rows] - points_P3[rows].min(axis=0)
    side = float(near_n3.max()) or 1.0
    columns: dict[str, NDArray[Any]] = {"places": np.rint(near_n3 / side * 65535).astype("<u2")}
    columns |= {
        f"layer:{name}": np.where(labels_P < 0, 255, labels_P.clip(max=254))[rows].astype(np.uint8)
        for name, labels_P in layers.items()
    }
    if colors_P3 is not None:
        columns["color"] = np.rint(colors_P3[rows].clip(0, 1) * 255).astype(np.uint8)
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader(__package__, ""),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
    )
    return environment.get_template("scene.html.j2").render(
        title=title,
        extent=(near_n3.max(axis=0) / side).tolist(),
        columns={n: base64.b64encode(v.tobytes()).decode("ascii") for n, v in columns.items()},
        classes=list(classes),
        colors=style.class_colors(len(classes)).tolist(),
        hidden=[name == _HIDDEN for name in classes],
        told=f"{len(rows):,} of {len(points_P3):,} points" if len(rows) < len(points_P3) else "",
    )


def _spread(rows: NDArray[np.int64], most: int) -> NDArray[np.int64]:
    return rows if len(rows) <= most else rows[np.linspace(0, len(rows) - 1, most).astype(int)]
