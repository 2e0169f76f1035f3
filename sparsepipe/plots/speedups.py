"""Speedups as bars: a group for each number of devices, a bar for each strategy (Fig. 9)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from matplotlib.axes import Axes
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
_VALUE_PT = 7.5
_PANELS_ACROSS = 2
_ROOM = 1.06
"""Above the highest of all, as a share of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """A speedup.

    Attributes:
        value: height of the bar.
        frame: height of an empty frame about it: the speedup over another baseline; None: none.
    """

    value: float
    frame: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """A printed value beside a bar.

    Attributes:
        value: its height.
        derived: not printed itself, but follows from what is.
    """

    value: float
    derived: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """Bars of one kind; a group and strategy without one is labelled "none".

    Attributes:
        title: the origin of the figures.
        bars: by group and strategy.
    """

    title: str
    bars: Mapping[tuple[str, str], Bar]


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """Panels with the same groups, strategies and marks.

    Attributes:
        groups: along the horizontal axis.
        strategies: of each group, in the order of their bars; six at most.
        panels: at least one.
        marks: by group and strategy, the same in all panels; drawn where there is a place for
            them, also without a bar.
        bar_label: what a bar is.
        frame_label: what a frame is.
        mark_label: whose the marks are.
    """

    groups: Sequence[str]
    strategies: Sequence[str]
    panels: Sequence[Panel]
    marks: Mapping[tuple[str, str], Mark] = field(default_factory=dict)
    bar_label: str = "speedup"
    frame_label: str = "over another baseline"
    mark_label: str = "printed"


def speedups_figure(chart: Chart) -> Figure:
    """The chart's panels, two beside each other, over one legend."""
    assert len(chart.strategies) <= len(_LOOKS), f"{len(chart.strategies)}, {len(_LOOKS)} looks"
    across = min(_PANELS_ACROSS, len(chart.panels))
    down = -(-len(chart.panels) // across)
    figure = style.new_figure(width_in=6.4 * across, height_in=0.9 + 3.3 * down)
    places = figure.subplots(down, across, squeeze=False, sharey=True).ravel()
    for axes, panel in zip(places, chart.panels, strict=False):
        _draw(axes, chart, panel)
    for axes in places[len(chart.panels) :]:
        axes.set_axis_off()
    places[0].set_ylim(0, _ROOM * _highest(chart))
    for row in range(down):
        places[row * across].set_ylabel(chart.bar_label, fontsize=style.LABEL_PT, color=style.INK)
    figure.legend(
        handles=_legend(chart), fontsize=style.TICK_PT, frameon=False,
        loc="outside lower center", ncols=4,
    )  # fmt: skip
    return figure


def _highest(chart: Chart) -> float:
    bars = [bar for panel in chart.panels for bar in panel.bars.values()]
    heights = [bar.value for bar in bars] + [bar.frame or 0.0 for bar in bars]
    return max([*heights, *(mark.value for mark in chart.marks.values()), 1.0])


def _draw(axes: Axes, chart: Chart, panel: Panel) -> None:
    width = _GROUP_SHARE / len(chart.strategies)
    for group_number, group in enumerate(chart.groups):
        for number, strategy in enumerate(chart.strategies):
            place = group_number + (number - (len(chart.strategies) - 1) / 2) * width
            _bar(axes, panel.bars.get((group, strategy)), place, width, _LOOKS[number])
            mark = chart.marks.get((group, strategy))
            if mark is not None:
                axes.plot([place], [mark.value], zorder=4, **_look(derived=mark.derived))
    style.tidy(axes)
    axes.grid(visible=False, axis="x")
    axes.tick_params(axis="x", length=0)
    axes.axhline(1, color=style.INK, linewidth=0.8, zorder=3)
    axes.set_xticks(range(len(chart.groups)), chart.groups)
    axes.set_xlim(-0.5, len(chart.groups) - 0.5)
    axes.set_title(panel.title, fontsize=style.TITLE_PT, color=style.INK)


def _bar(axes: Axes, bar: Bar | None, place: float, width: float, look: tuple[str, str]) -> None:
    """A bar with its value at its foot, where no mark and no frame lies."""
    if bar is None:
        text, colour = "none", style.GREY
    else:
        text, colour = f"{bar.value:.2f}", style.INK
        axes.bar(
            place, bar.value, width, color=look[0], hatch=look[1], edgecolor="white",
            linewidth=0.6, zorder=2,
        )  # fmt: skip
        if bar.frame is not None:
            axes.bar(
                place, bar.frame, width * 0.8, fill=False, edgecolor=style.INK, linewidth=0.8,
                linestyle=(0, (3, 2)), zorder=3,
            )  # fmt: skip
    axes.annotate(
        text, (place, 0), xytext=(0, 4), textcoords="offset points", rotation=90,
        ha="center", va="bottom", fontsize=_VALUE_PT, color=colour, zorder=5,
        bbox={"boxstyle": "round,pad=0.15", "facecolor": "white", "edgecolor": "none"},
    )  # fmt: skip


def _look(*, derived: bool) -> dict[str, Any]:
    return {
        "marker": "D",
        "markersize": 6.0,
        "markeredgecolor": style.INK,
        "markerfacecolor": "white" if derived else style.INK,
        "linestyle": "none",
    }


def _legend(chart: Chart) -> list[Patch | Line2D]:
    """Handles of the elements that the panels contain."""
    handles: list[Patch | Line2D] = [
        Patch(facecolor=colour, hatch=hatch, edgecolor="white", label=strategy)
        for strategy, (colour, hatch) in zip(chart.strategies, _LOOKS, strict=False)
    ]
    bars = [bar for panel in chart.panels for bar in panel.bars.values()]
    if any(bar.frame is not None for bar in bars):
        handles.append(
            Patch(fill=False, edgecolor=style.INK, linestyle=(0, (3, 2)), label=chart.frame_label)
        )
    for derived, label in ((False, chart.mark_label), (True, f"{chart.mark_label}, derived")):
        if any(mark.derived is derived for mark in chart.marks.values()):
            handles.append(Line2D([], [], label=label, **_look(derived=derived)))
    return handles
