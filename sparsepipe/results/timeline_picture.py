"""What several workers do over time, as a picture: a lane for each, a bar for each action."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch, Rectangle
from matplotlib.ticker import MaxNLocator

from sparsepipe.results import style
from sparsepipe.results.timeline import Lane, Row, label, rows_until

_FORWARD = "#9CCBE8"  # tints of the house's blue and orange: dark text stays legible on both
_BACKWARD = "#F3C266"
_IDLE = "#EFEFEF"
_FACES = {"F": _FORWARD, "B": _BACKWARD, "U": style.VERMILION}
_TEXTS = {"F": style.INK, "B": style.INK, "U": "white"}

_BAR: dict[str, Any] = {"edgecolor": "white", "linewidth": 1.0, "zorder": 2}
_NAME: dict[str, Any] = {"ha": "center", "va": "center_baseline", "fontsize": 8.5, "zorder": 3}
_POINT: dict[str, Any] = {"marker": "v", "color": style.VERMILION, "linestyle": "none"}
_MARK: dict[str, Any] = {
    **_POINT,
    "markersize": 6.5,
    "markeredgecolor": "white",
    "markeredgewidth": 0.6,
    "clip_on": False,
    "zorder": 4,
}

_CHARACTER_IN = 0.078  # of a bar's text
_LANE_IN = 0.44
_BAR_HEIGHT = 0.78  # of a lane
_MAX_WIDTH_IN = 40.0


def timeline_picture(
    lanes: Sequence[Lane],
    path: str | os.PathLike[str],
    *,
    title: str,
    unit_name: str = "time",
    until: float | None = None,
) -> None:
    """Writes lanes of bars over time as a PNG.

    Args:
        lanes: name of each worker, and its rows (kind, number, microbatch, start, end); see
            :mod:`sparsepipe.results.timeline`.
        path: the picture to write; its directories are made.
        title: what is shown.
        unit_name: what the time axis counts.
        until: where the picture ends, if earlier than the last row.

    Raises:
        DataError: the picture cannot be written.
    """
    style.save_png(timeline_figure(lanes, title=title, unit_name=unit_name, until=until), path)


def timeline_figure(
    lanes: Sequence[Lane], *, title: str, unit_name: str = "time", until: float | None = None
) -> Figure:
    """The figure that :func:`timeline_picture` writes."""
    drawn = rows_until(lanes, until)
    rows = [row for _, found in drawn for row in found]
    end = until if until is not None else max((row[4] for row in rows), default=1.0)
    inches_per_time = _scale(rows, end)
    figure = style.new_figure(
        width_in=max(end * inches_per_time, 4.5)
        + 0.085 * max((len(name) for name, _ in drawn), default=0)
        + 0.5,
        height_in=_LANE_IN * len(drawn) + 1.35,
    )
    axes = figure.subplots()
    for place, (_, found) in enumerate(drawn):
        _draw_lane(axes, place, found, end=end, inches_per_time=inches_per_time)
    _finish(axes, [name for name, _ in drawn], end=end, unit_name=unit_name)
    axes.set_title(title, loc="left", fontsize=style.TITLE_PT, color=style.INK, pad=26)
    _legend(axes)
    return figure


def _scale(rows: Sequence[Row], end: float) -> float:
    """Inches for a unit of time, so that every bar has room for its name, if that can be."""
    wanted = max((_text_in(row) / (row[4] - row[3]) for row in rows if row[4] > row[3]), default=1)
    return min(wanted, _MAX_WIDTH_IN / end)


def _text_in(row: Row) -> float:
    return _CHARACTER_IN * len(label(row)) + 0.12


def _draw_lane(
    axes: Axes, place: int, rows: Sequence[Row], *, end: float, inches_per_time: float
) -> None:
    low = place - _BAR_HEIGHT / 2
    axes.add_patch(Rectangle((0, low), end, _BAR_HEIGHT, facecolor=_IDLE, edgecolor="none"))
    for row in rows:
        kind, start, stop = row[0], row[3], row[4]
        if stop == start:
            axes.plot([start], [low], **_MARK)  # on the bar's upper edge: it hides no name
            continue
        corner, width = (start, low), stop - start
        axes.add_patch(Rectangle(corner, width, _BAR_HEIGHT, facecolor=_FACES[kind], **_BAR))
        seen = min(stop, end) - start
        if seen * inches_per_time >= _text_in(row) - 0.1:
            axes.text(start + seen / 2, place, label(row), color=_TEXTS[kind], **_NAME)


def _finish(axes: Axes, names: Sequence[str], *, end: float, unit_name: str) -> None:
    axes.set_facecolor("white")
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(style.GREY)
    axes.set_xlim(0, end)
    axes.set_ylim(len(names) - 0.45, -0.55)  # the first lane on top
    axes.set_yticks(range(len(names)), names, fontsize=style.LABEL_PT, color=style.INK)
    axes.tick_params(axis="y", length=0)
    axes.tick_params(axis="x", labelsize=style.TICK_PT, color=style.GREY, labelcolor=style.INK)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=16, steps=[1, 2, 5, 10], integer=True))
    axes.set_xlabel(unit_name, fontsize=style.LABEL_PT, color=style.INK)


def _legend(axes: Axes) -> None:
    handles = [
        Patch(facecolor=_FORWARD, label="forward"),
        Patch(facecolor=_BACKWARD, label="backward"),
        Line2D([], [], **_POINT, label="update"),
        Patch(facecolor=_IDLE, label="waiting"),
    ]
    axes.legend(
        handles=handles,
        loc="lower left",
        bbox_to_anchor=(0.0, 1.0),
        ncols=4,
        frameon=False,
        fontsize=style.TICK_PT,
        labelcolor=style.INK,
        borderaxespad=0.2,
        borderpad=0.1,
        handlelength=1.2,
        handletextpad=0.5,
        columnspacing=1.4,
    )
