"""Pictures of timelines: a lane for each rank, a bar for each action.

Messages on their way and sums of gradients have thinner lanes below the rank that sends them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch, Rectangle
from matplotlib.ticker import MaxNLocator

from sparsepipe.plots import style
from sparsepipe.schedule import Plan, Span
from sparsepipe.schedule.spans import rank_title

Lane = tuple[str, Sequence[Span]]
"""The label of a lane, and the spans drawn in it."""

FORWARD = "#9CCBE8"  # tints of style's blue and orange: dark text stays legible on both
BACKWARD = "#F3C266"
_IDLE = "#EFEFEF"
_MESSAGES = {  # tints of style's green and purple, and a grey
    "activation": ("#8FD0BB", "activation on its way"),
    "gradient": ("#E5BFD4", "gradient on its way"),
    "sum": ("#C4C4C4", "sum over replicas"),
}
_BESIDE = {
    "loads": ("#8FD0BB", "loading"),
    **dict.fromkeys(("sends", "sums", "moves"), ("#B0B0B0", "sending, summing")),
    **dict.fromkeys(("hooks", "logs", "saves", "validates"), ("#E5BFD4", "hooks, logging")),
}
_NAMED = _MESSAGES | _BESIDE
_FACES = {"F": FORWARD, "B": BACKWARD, "U": style.VERMILION, "input": FORWARD} | {
    kind: colour for kind, (colour, _) in _NAMED.items()
}

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

_CHARACTER_IN = 0.078  # width of a character in a bar
_LANE_IN = 0.44
_THIN = 0.5  # height of a lane of messages, as a share of a lane
_BAR_HEIGHT = 0.78  # as a share of a lane
_MAX_WIDTH_IN = 40.0


def lanes(
    plan: Plan,
    spans: Iterable[Span],
    *,
    ranks: Sequence[int] | None = None,
    names: Sequence[str] | None = None,
    least: float = 0.0,
) -> list[Lane]:
    """The lanes of each rank: one for its actions, then those for its messages and for its sums,
    as many as are needed for spans not to overlap.

    Args:
        plan: the stages and their ranks.
        spans: actions, messages, sums and other spans of ranks.
        ranks: ranks that have lanes; None: all.
        names: names of all ranks; None: their stages and replicas.
        least: messages and sums that take no longer, in the spans' unit of time, are left out.
    """
    computed: list[list[Span]] = [[] for _ in range(plan.num_ranks)]
    sent: list[list[Span]] = [[] for _ in range(plan.num_ranks)]
    summed: list[list[Span]] = [[] for _ in range(plan.num_stages)]
    for span in spans:
        if span.kind not in _MESSAGES:
            computed[span.rank].append(span)
        elif span.end - span.start > least:
            own = summed[plan.stage_of(span.rank)] if span.kind == "sum" else sent[span.rank]
            own.append(span)
    if not any(span.microbatch for own in summed for span in own):  # no sum has several parts
        summed = [[replace(span, microbatch=None) for span in own] for own in summed]
    found: list[Lane] = []
    for rank in range(plan.num_ranks) if ranks is None else ranks:
        found.append((names[rank] if names else rank_title(plan, rank), computed[rank]))
        for name, moved in (("sends", sent[rank]), ("sums", summed[plan.stage_of(rank)])):
            apart: list[list[Span]] = []
            for span in sorted(moved, key=lambda span: span.start):
                lane = next((lane for lane in apart if lane[-1].end <= span.start), None)
                if lane is None:
                    apart.append([span])
                else:
                    lane.append(span)
            found += [(name, lane) for lane in apart]
    return found


def some_ranks(plan: Plan, most: int) -> list[int]:
    """All ranks if at most ``most`` (2 or more), else up to ``most // num_stages`` replicas
    of each stage; with too many stages for that, one replica of ``most`` evenly spaced stages.
    """
    if plan.num_ranks <= most:
        return list(range(plan.num_ranks))
    stages = range(plan.num_stages)
    if plan.num_stages > most:
        stages_seen = [round(k * (plan.num_stages - 1) / (most - 1)) for k in range(most)]
        return [plan.ranks_of(stage).start for stage in stages_seen]
    each = most // plan.num_stages
    return [rank for stage in stages for rank in plan.ranks_of(stage)[:each]]


def timelines_figure(
    panels: Mapping[str, Sequence[Lane]],
    *,
    unit: float = 1.0,
    unit_name: str = "time",
    until: float | None = None,
    max_width_in: float = _MAX_WIDTH_IN,
) -> Figure:
    """Draws timelines below each other with the same scale of time.

    Args:
        panels: the lanes of each panel by its title, as :func:`lanes` returns them.
        unit: the time, in the spans' unit, that the axis shows as 1.
        unit_name: label of the time axis.
        until: time, as the axis shows it, at which the picture ends; None: at the last span's end.
        max_width_in: largest width of the time axis in inches, even if names do not fit bars.
    """
    limit = math.inf if until is None else until * unit
    drawn = {
        title: [
            (name, [s for s in own if s.start < limit or s.start == s.end == limit])
            for name, own in lanes
        ]
        for title, lanes in panels.items()
    }
    # Lanes of messages are thinner.
    heights = {
        title: [_THIN if own and all(s.kind in _MESSAGES for s in own) else 1.0 for _, own in lanes]
        for title, lanes in panels.items()
    }
    spans = [span for lanes in drawn.values() for _, own in lanes for span in own]
    end = until if until is not None else max((span.end / unit for span in spans), default=1.0)
    # Every bar has room for its name, except updates, which are short compared with the others.
    needed = (_text_in(s) * unit / (s.end - s.start) for s in spans if s.kind in "FB"
              and s.end > s.start)  # fmt: skip
    per_unit_in = min(max(needed, default=1.0), max_width_in / (end or 1.0))
    least_in = 8.5 if any(_THIN in each for each in heights.values()) else 4.5  # of the legend
    names_in = 0.085 * max((len(name) for lanes in drawn.values() for name, _ in lanes), default=0)
    heights_in = [_LANE_IN * sum(each) + 1.35 for each in heights.values()]
    figure = style.new_figure(
        width_in=max(end * per_unit_in, least_in) + names_in + 0.5, height_in=sum(heights_in)
    )
    found = figure.subplots(len(panels), 1, squeeze=False, height_ratios=heights_in)[:, 0]
    for axes, (title, own), each in zip(found, drawn.items(), heights.values(), strict=True):
        places = [sum(each[:k]) + (each[k] - 1) / 2 for k in range(len(each))]  # lanes' middles
        for place, height, (_, row) in zip(places, each, own, strict=True):
            _draw_lane(
                axes, row, place=place, height=height, end=end, unit=unit, per_unit_in=per_unit_in
            )
        axes.set_xlim(0, end)
        axes.set_ylim(sum(each) - 0.45, -0.55)  # the first lane on top
        axes.set_yticks(places, [name for name, _ in own], fontsize=style.LABEL_PT, color=style.INK)
        for tick, height in zip(axes.get_yticklabels(), each, strict=True):
            if height == _THIN:
                tick.set(fontsize=7.0, color=style.GREY)
        axes.xaxis.set_major_locator(MaxNLocator(nbins=16, steps=[1, 2, 5, 10], integer=end >= 4))
        axes.set_title(title, loc="left", fontsize=style.TITLE_PT, color=style.INK, pad=26)
        _finish_axes(axes, unit_name)
        _draw_legend(axes, spans)
    return figure


def _finish_axes(axes: Axes, x_label: str) -> None:
    axes.set_facecolor("white")
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(style.GREY)
    axes.tick_params(axis="y", length=0)
    axes.tick_params(axis="x", labelsize=style.TICK_PT, color=style.GREY, labelcolor=style.INK)
    axes.set_xlabel(x_label, fontsize=style.LABEL_PT, color=style.INK)


def _text_in(span: Span) -> float:
    return _CHARACTER_IN * len(span.label) + 0.12


def _draw_lane(
    axes: Axes,
    spans: Sequence[Span],
    *,
    place: float,
    height: float,
    end: float,
    unit: float,
    per_unit_in: float,
) -> None:
    thin, bar_height = height == _THIN, _BAR_HEIGHT * height
    low = place - bar_height / 2
    if not thin:
        axes.add_patch(Rectangle((0, low), end, bar_height, facecolor=_IDLE, edgecolor="none"))
    for span in spans:
        start, stop = span.start / unit, span.end / unit
        if stop == start:  # on the bar's upper edge: it hides no name
            axes.plot([start], [low], **_MARK)
            continue
        named = span.number is not None
        bar = Rectangle(
            (start, low),
            stop - start,
            bar_height,
            facecolor=_FACES[span.kind],
            edgecolor="white",
            linewidth=1.0 if named else 0.0,
            zorder=2,
        )
        axes.add_patch(bar)
        seen = min(stop, end) - start
        if named and seen * per_unit_in >= _text_in(span) - 0.1:
            look = {**_NAME, "fontsize": 7.0} if thin else _NAME
            colour = "white" if span.kind == "U" else style.INK
            axes.text(start + seen / 2, place, span.label, color=colour, **look)


def _draw_legend(axes: Axes, spans: Sequence[Span]) -> None:
    kinds = {span.kind for span in spans}
    takes_time = any(span.kind == "U" and span.end > span.start for span in spans)
    beside = dict.fromkeys(look for kind, look in _NAMED.items() if kind in kinds)
    handles = [
        Patch(facecolor=FORWARD, label="forward"),
        Patch(facecolor=BACKWARD, label="backward"),
        Patch(facecolor=style.VERMILION, label="update")
        if takes_time
        else Line2D([], [], **_POINT, label="update"),
        Patch(facecolor=_IDLE, label="waiting"),
        *(Patch(facecolor=colour, label=name) for colour, name in beside),
    ]
    axes.legend(
        handles=handles,
        loc="lower left",
        bbox_to_anchor=(0.0, 1.0),
        ncols=len(handles),
        frameon=False,
        fontsize=style.TICK_PT,
        labelcolor=style.INK,
        borderaxespad=0.2,
        borderpad=0.1,
        handlelength=1.2,
        handletextpad=0.5,
        columnspacing=1.4,
    )
