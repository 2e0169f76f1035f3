"""Speedups as bars: a group for each number of devices, a bar for each strategy (Fig. 9)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from sparsepipe.plots import style

_LOOKS = (
    # colour, hatch: colour never carries the meaning alone, nor does the order within a group
    (style.GREY, ""),
    (style.ORANGE, ""),
    (style.VERMILION, "//"),
    (style.BLUE, ""),
    (style.GREEN, ".."),
    (style.PURPLE, "xx"),
)
_GROUP_SHARE = 0.86
"""Width of a group of bars, as a share of the distance between two groups."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """A speedup.

    Attributes:
        value: height of the bar.
        frame: height of an empty frame about it: the speedup over another baseline, if any.
    """

    value: float
    frame: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeedupMark:
    """A printed value beside a bar.

    Attributes:
        value: its height.
        derived: not printed itself, but follows from what is.
    """

    value: float
    derived: bool = False


def speedups_figure(
    title: str,
    bars: Mapping[tuple[str, str], Bar],
    marks: Mapping[tuple[str, str], SpeedupMark],
    *,
    groups: Sequence[str],
    strategies: Sequence[str],
    bar_label: str,
    frame_label: str,
    mark_label: str,
) -> Figure:
    """Bars by group and strategy, with their values at their feet.

    Args:
        title: the origin of the figures.
        bars: by group and strategy; a place without one is labelled "none".
        marks: by group and strategy, also without a bar.
        groups: along the horizontal axis.
        strategies: of each group, in the order of their bars; six at most.
        bar_label: what a bar is.
        frame_label: what a frame is.
        mark_label: whose the marks are.
    """
    figure = style.new_figure(width_in=6.4, height_in=4.2)
    axes = figure.subplots()
    width = _GROUP_SHARE / len(strategies)
    handles: list[Patch | Line2D] = []
    for number, (strategy, (colour, hatch)) in enumerate(zip(strategies, _LOOKS, strict=False)):
        places = [i + (number - (len(strategies) - 1) / 2) * width for i in range(len(groups))]
        own = [bars.get((group, strategy)) for group in groups]
        drawn = axes.bar(
            places, [bar.value if bar else 0.0 for bar in own], width, color=colour, hatch=hatch,
            edgecolor="white", linewidth=0.6, zorder=2,
        )  # fmt: skip
        handles.append(Patch(facecolor=colour, hatch=hatch, edgecolor="white", label=strategy))
        for place, bar, shape in zip(places, own, drawn, strict=True):
            axes.annotate(
                f"{bar.value:.2f}" if bar else "none", (shape.get_center()[0], 0), xytext=(0, 4),
                textcoords="offset points", rotation=90, ha="center", va="bottom", fontsize=7.5,
                zorder=5, bbox={"pad": 1, "facecolor": "white", "edgecolor": "none"},
            )  # fmt: skip
            if bar and bar.frame is not None:
                axes.bar(
                    place, bar.frame, width * 0.8, fill=False, edgecolor=style.INK, linewidth=0.8,
                    linestyle=(0, (3, 2)), zorder=3,
                )  # fmt: skip
        for place, group in zip(places, groups, strict=True):
            if mark := marks.get((group, strategy)):
                axes.plot([place], [mark.value], zorder=4, **_look(derived=mark.derived))
    style.tidy(axes)
    axes.grid(visible=False, axis="x")
    axes.axhline(1, color=style.INK, linewidth=0.8, zorder=3)
    axes.set_xticks(range(len(groups)), groups)
    axes.set_title(title, fontsize=style.TITLE_PT, color=style.INK)
    axes.set_ylabel(bar_label, fontsize=style.LABEL_PT, color=style.INK)
    if any(bar.frame is not None for bar in bars.values()):
        handles.append(
            Patch(fill=False, edgecolor=style.INK, linestyle=(0, (3, 2)), label=frame_label)
        )
    for derived, label in ((False, mark_label), (True, f"{mark_label}, derived")):
        if any(mark.derived is derived for mark in marks.values()):
            handles.append(Line2D([], [], label=label, **_look(derived=derived)))
    figure.legend(
        handles=handles, fontsize=style.TICK_PT, frameon=False, loc="outside lower center", ncols=4
    )
    return figure


def _look(*, derived: bool) -> dict[str, Any]:
    return {
        "marker": "D",
        "markersize": 6.0,
        "markeredgecolor": style.INK,
        "markerfacecolor": "white" if derived else style.INK,
        "linestyle": "none",
    }
