"""Timelines of several workers: a lane for each, a bar for each action, as text or picture.

Messages on their way, if lanes of them are given, lie in thinner lanes.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch, Rectangle
from matplotlib.ticker import MaxNLocator

from sparsepipe.cluster.places import device_name
from sparsepipe.config.schema import Synchronous
from sparsepipe.partition.explanation import rank_times
from sparsepipe.plots import style
from sparsepipe.runs.rundir import RunDir
from sparsepipe.schedule import Plan, Span, asynchronous, synchronous_by_name
from sparsepipe.schedule.timeline import lane_name
from sparsepipe.simulate.engine import Setting, simulate
from sparsepipe.simulate.lanes import lanes as record_lanes
from sparsepipe.simulate.network import Network
from sparsepipe.simulate.record import Record
from sparsepipe.simulate.workload import StageCosts, Workload

Row = tuple[str, int, int | None, float, float]
"""(kind, number, microbatch, start, end): kind is F forward, B backward or U update; or, in a lane
of messages, a activation, g gradient or S sum of gradients; or what a rank did, as was measured,
beside its actions, without a number: l loading, m messages, h hooks, i preparing an input."""

Lane = tuple[str, Sequence[Row]]
"""A worker's name and its rows."""

_FILL = {"F": " ", "B": "-", "U": "=", "a": ">", "g": "<", "S": "+"}


def is_of_messages(rows: Sequence[Row]) -> bool:
    """Whether a lane shows what is on its way; what is computed is in lanes of its own."""
    return bool(rows) and all(row[0] in "agS" for row in rows)


def label(row: Row) -> str:
    """A bar's name, such as F3 or B3.1."""
    kind, number, microbatch, _, _ = row
    return f"{kind}{number}" if microbatch is None else f"{kind}{number}.{microbatch}"


def rows_until(lanes: Iterable[Lane], until: float | None) -> list[tuple[str, list[Row]]]:
    """The lanes without the rows that begin at ``until`` or later.

    A row without duration, such as an update that takes no time, may also lie at ``until``.
    """
    limit = math.inf if until is None else until
    return [
        (name, [row for row in rows if row[3] < limit or row[3] == row[4] == limit])
        for name, rows in lanes
    ]


def timeline_text(lanes: Sequence[Lane], *, unit: float = 1.0, until: float | None = None) -> str:
    """Draws lanes with characters.

    Two stages, two minibatches, for example::

        time    0  1  2  3  4  5  6  7  8  9
        stage 0 |F0|F1|.....|B0---U..|B1---U
        stage 1 ...|F0|B0---UF1|B1---U

    Bars of backwards are filled with ``-``, waiting with ``.``; where an update that takes
    no time follows a bar, U stands in place of its border.

    Args:
        lanes: who does what when.
        unit: time from one tick to the next.
        until: where the drawing ends, if earlier than the last row.
    """
    drawn = rows_until(lanes, until)
    rows = [row for _, found in drawn for row in found]
    bars = [row for row in rows if row[4] > row[3]]
    # Every name fits its bar, and one more character is its border.
    width = max((math.ceil((len(label(r)) + 1) * unit / (r[4] - r[3])) for r in bars), default=1)
    end = min(max((row[4] for row in rows), default=0.0), math.inf if until is None else until)
    ticks = math.ceil(end / unit - 1e-9) + 1
    width = max(width, len(str(ticks - 1)) + 1)
    names = max((len(name) for name, _ in drawn), default=0)
    names = max(names, len("time")) + 1
    head = "time".ljust(names) + "".join(str(t).ljust(width) for t in range(ticks))
    shown = None if until is None else round(until * width / unit) + 1
    body = [
        name.ljust(names) + _lane(found, columns_per_time=width / unit)[:shown]
        for name, found in drawn
    ]
    return "\n".join(line.rstrip() for line in [head, *body]) + "\n"


def _lane(rows: Sequence[Row], *, columns_per_time: float) -> str:
    def place(time: float) -> int:
        return round(time * columns_per_time)

    line = ["."] * (max((place(row[4]) for row in rows), default=0) + 1)
    for row in rows:
        start, end = place(row[3]), place(row[4])
        if end > start:
            inside = end - start - 1
            line[start] = line[end] = "|"
            line[start + 1 : end] = label(row).ljust(inside, _FILL[row[0]])[:inside]
    for row in rows:
        if place(row[4]) == place(row[3]):
            line[place(row[3])] = row[0]
    if line[-1] == ".":
        line.pop()
    return "".join(line)


_FORWARD = "#9CCBE8"  # tints of style's blue and orange: dark text stays legible on both
_BACKWARD = "#F3C266"
_IDLE = "#EFEFEF"
_MESSAGES = {
    "a": ("#8FD0BB", "activation on its way"),  # tints of its green and purple, and a grey
    "g": ("#E5BFD4", "gradient on its way"),
    "S": ("#C4C4C4", "sum over replicas"),
}
_BESIDE = {
    "l": ("#8FD0BB", "loading"),
    "m": ("#B0B0B0", "sending, summing"),
    "h": ("#E5BFD4", "hooks, logging"),
}
_FACES = {
    "F": _FORWARD,
    "B": _BACKWARD,
    "U": style.VERMILION,
    "i": _FORWARD,
    **{kind: colour for kind, (colour, _) in (_MESSAGES | _BESIDE).items()},
}
_PARTS = {"loads": "l", "input": "i", **dict.fromkeys(("sends", "sums", "moves"), "m"),
          **dict.fromkeys(("hooks", "logs", "saves", "validates"), "h")}  # fmt: skip
"""Kinds of rows, by the part of a rank's time that a trace has."""

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
_THIN = 0.5  # of a lane: one of messages
_BAR_HEIGHT = 0.78  # of a lane
_MAX_WIDTH_IN = 40.0


def timeline_picture(
    lanes: Sequence[Lane],
    path: str | os.PathLike[str],
    *,
    title: str,
    unit_name: str = "time",
    until: float | None = None,
    max_width_in: float = _MAX_WIDTH_IN,
) -> None:
    """Writes lanes of bars over time as a PNG.

    Args:
        lanes: name of each worker, and its rows (kind, number, microbatch, start, end); see
            :mod:`sparsepipe.plots.timeline`.
        path: the picture to write; its directories are made.
        title: what is shown.
        unit_name: what the time axis counts.
        until: where the picture ends, if earlier than the last row.
        max_width_in: of the bars in inches, also where some have no room for their names then.

    Raises:
        DataError: the picture cannot be written.
    """
    figure = timeline_figure(
        lanes, title=title, unit_name=unit_name, until=until, max_width_in=max_width_in
    )
    style.save_png(figure, path)


def timeline_figure(
    lanes: Sequence[Lane],
    *,
    title: str,
    unit_name: str = "time",
    until: float | None = None,
    max_width_in: float = _MAX_WIDTH_IN,
) -> Figure:
    """The figure that :func:`timeline_picture` writes."""
    return timelines_figure(
        {title: lanes}, unit_name=unit_name, until=until, max_width_in=max_width_in
    )


def timelines_figure(
    panels: Mapping[str, Sequence[Lane]],
    *,
    unit_name: str = "time",
    until: float | None = None,
    max_width_in: float = _MAX_WIDTH_IN,
) -> Figure:
    """Timelines below each other, by their titles, at one scale."""
    drawn = {title: rows_until(lanes, until) for title, lanes in panels.items()}
    thin = {title: [is_of_messages(r) for _, r in lanes] for title, lanes in panels.items()}
    rows = [row for lanes in drawn.values() for _, found in lanes for row in found]
    end = until if until is not None else max((row[4] for row in rows), default=1.0)
    computed = [row for row in rows if row[0] in "FB"]  # an update is short beside them
    inches_per_time = min(_scale(computed), max_width_in / (end or 1.0))
    least_in = 8.5 if any(any(each) for each in thin.values()) else 4.5  # for the legend
    names = [name for lanes in drawn.values() for name, _ in lanes]
    heights_in = [_LANE_IN * sum(map(_height, each)) + 1.35 for each in thin.values()]
    figure = style.new_figure(
        width_in=max(end * inches_per_time, least_in)
        + 0.085 * max(map(len, names), default=0)
        + 0.5,
        height_in=sum(heights_in),
    )
    found = figure.subplots(len(panels), 1, squeeze=False, height_ratios=heights_in)[:, 0]
    for axes, (title, lanes), each in zip(found, drawn.items(), thin.values(), strict=True):
        places = _places(each)
        for place, is_thin, (_, own) in zip(places, each, lanes, strict=True):
            _draw_lane(axes, place, own, end=end, inches_per_time=inches_per_time, thin=is_thin)
        _finish(axes, [name for name, _ in lanes], places, each, end=end, unit_name=unit_name)
        axes.set_title(title, loc="left", fontsize=style.TITLE_PT, color=style.INK, pad=26)
        _legend(axes, rows)
    return figure


def _height(thin: bool) -> float:
    return _THIN if thin else 1.0


def _places(thin: Sequence[bool]) -> list[float]:
    """The middle of each lane, from the top, where the first one's is 0 if it is not thin."""
    found, above = [], -0.5
    for each in thin:
        found.append(above + _height(each) / 2)
        above += _height(each)
    return found


def _scale(rows: Sequence[Row]) -> float:
    """Inches for a unit of time, so that every bar has room for its name."""
    return max((_text_in(row) / (row[4] - row[3]) for row in rows if row[4] > row[3]), default=1.0)


def _text_in(row: Row) -> float:
    return _CHARACTER_IN * len(label(row)) + 0.12


def _draw_lane(
    axes: Axes,
    place: float,
    rows: Sequence[Row],
    *,
    end: float,
    inches_per_time: float,
    thin: bool,
) -> None:
    height = _BAR_HEIGHT * _height(thin)
    low = place - height / 2
    if not thin:
        axes.add_patch(Rectangle((0, low), end, height, facecolor=_IDLE, edgecolor="none"))
    for row in rows:
        kind, start, stop = row[0], row[3], row[4]
        if stop == start:
            axes.plot([start], [low], **_MARK)  # on the bar's upper edge: it hides no name
            continue
        corner, width = (start, low), stop - start
        named = kind not in "lmhi"
        bar = _BAR if named else {**_BAR, "linewidth": 0.0}
        axes.add_patch(Rectangle(corner, width, height, facecolor=_FACES[kind], **bar))
        seen = min(stop, end) - start
        if named and seen * inches_per_time >= _text_in(row) - 0.1:
            name = {**_NAME, "fontsize": 7.0} if thin else _NAME
            colour = "white" if kind == "U" else style.INK
            axes.text(start + seen / 2, place, label(row), color=colour, **name)


def _finish(
    axes: Axes,
    names: Sequence[str],
    places: Sequence[float],
    thin: Sequence[bool],
    *,
    end: float,
    unit_name: str,
) -> None:
    axes.set_facecolor("white")
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(style.GREY)
    axes.set_xlim(0, end)
    axes.set_ylim(sum(map(_height, thin)) - 0.45, -0.55)  # the first lane on top
    axes.set_yticks(places, names, fontsize=style.LABEL_PT, color=style.INK)
    for tick, each in zip(axes.get_yticklabels(), thin, strict=True):
        if each:
            tick.set(fontsize=7.0, color=style.GREY)
    axes.tick_params(axis="y", length=0)
    axes.tick_params(axis="x", labelsize=style.TICK_PT, color=style.GREY, labelcolor=style.INK)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=16, steps=[1, 2, 5, 10], integer=end >= 4))
    axes.set_xlabel(unit_name, fontsize=style.LABEL_PT, color=style.INK)


def _legend(axes: Axes, rows: Sequence[Row]) -> None:
    """Names the colours; those of messages and of what is beside actions where there are any."""
    kinds = {row[0] for row in rows}
    takes_time = any(row[0] == "U" and row[4] > row[3] for row in rows)
    handles = [
        Patch(facecolor=_FORWARD, label="forward"),
        Patch(facecolor=_BACKWARD, label="backward"),
        Patch(facecolor=style.VERMILION, label="update")
        if takes_time
        else Line2D([], [], **_POINT, label="update"),
        Patch(facecolor=_IDLE, label="waiting"),
        *(
            Patch(facecolor=colour, label=name)
            for kind, (colour, name) in (_MESSAGES | _BESIDE).items()
            if kind in kinds
        ),
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


_MOST_RANKS = 16  # more are too many for a picture
_WIDTH_IN = 18.0  # of the bars
_BACKWARD_TIME = 2.0  # times as long as the forward
_MINIBATCHES = 2  # of a synchronous schedule: one, and that it is repeated


def draw_schedule(
    directory: RunDir,
    synchronous: Synchronous | None = None,
    *,
    slowdowns: Mapping[str, float] | None = None,
) -> None:
    """``timeline.png`` of a pipeline's first minibatches; nothing of one device, or of too many.

    Ranks take the times that the plan's search expected of their devices. Without a search stages
    are as long as one another at a device's full speed, and the backward is twice the forward.
    Messages take no time. Nothing of it is measured.

    Args:
        directory: of the run, with its plan.
        synchronous: its schedule; None: the asynchronous one.
        slowdowns: how many times slower devices are made, by their names in plan files.
    """
    if not directory.plan.exists():
        return
    plan = Plan.load(directory.plan)
    if not 1 < plan.without_grids.num_ranks <= _MOST_RANKS:
        return
    workload, searched = _expected_workload(plan, slowdowns or {})
    plan = workload.plan
    if synchronous is None:
        unit = "minibatch"
        schedule = asynchronous(plan, 3 * plan.num_ranks + 2)
    else:
        parts = synchronous.microbatches
        unit = "microbatch"
        schedule = synchronous_by_name(synchronous.schedule, plan, _MINIBATCHES, microbatches=parts)
        workload = workload.split(parts, batches=plan.replicas(0)) if searched else workload
    instant = Setting(network=Network.flat(plan.num_ranks))
    if searched:
        times_text = "times as its search expected"
    elif any(factor != 1 for factor in (slowdowns or {}).values()):
        times_text = "all stages alike on devices of unlike speed"
    else:
        times_text = "all stages alike"
    timeline_picture(
        record_lanes(
            simulate(schedule, workload, instant),
            names=[rank_name(plan, rank) for rank in range(plan.num_ranks)],
            unit_s=1e-3 if searched else 1.0,
        ),
        directory.path / "timeline.png",
        title=f"{_named(plan, synchronous)}, {times_text}",
        unit_name="milliseconds" if searched else f"time (forward of one {unit} = 1)",
        max_width_in=_WIDTH_IN,
    )


def draw_measured(
    directory: RunDir,
    spans: Sequence[Span],
    beside: Sequence[tuple[int, str, float, float]] = (),
    synchronous: Synchronous | None = None,
) -> None:
    """``timeline_measured.png``: what ranks did, and where a search expected times, below it the
    same minibatches by these, at one scale.

    Args:
        directory: of the run, with its plan.
        spans: of each rank in order, seconds from 0.
        beside: what else took ranks' time: rank, what, begin and end.
        synchronous: its schedule; None: the asynchronous one.
    """
    kept = Plan.load(directory.plan)
    if kept.num_ranks > _MOST_RANKS:
        return
    names = [rank_name(kept, rank) for rank in range(kept.num_ranks)]
    measured = _lanes_of(Record(plan=kept, minibatches=0, spans=[*spans]), names)
    for rank, part, start, end in beside:
        if part in _PARTS:  # waits are what is left
            measured[rank][1].append((_PARTS[part], 0, None, 1e3 * start, 1e3 * end))
    panels = {f"{_named(kept, synchronous)}, measured": measured}
    workload, searched = _expected_workload(kept, {})
    if searched and not kept.has_grids:
        last = kept.num_stages - 1  # earlier stages are ahead of it
        own = [span.action for span in spans if kept.stage_of(span.rank) == last]
        numbers = {action.number for action in own if action.kind == "F"}
        first, count = min(numbers), len(numbers)
        expected = _expected_spans(workload, synchronous, first=first, count=count)
        record = Record(plan=kept, minibatches=0, spans=expected)
        loads = any(each.get("load") for each in rank_times(kept))
        note = ", loading as part of forwards" if loads else ""
        panels[f"Expected by the plan's search{note}"] = _lanes_of(record, names)
    figure = timelines_figure(panels, unit_name="milliseconds", max_width_in=_WIDTH_IN)
    style.save_png(figure, directory.path / "timeline_measured.png")


def _named(plan: Plan, synchronous: Synchronous | None) -> str:
    """A pipeline's schedule and numbers of replicas."""
    kind = "Asynchronous" if synchronous is None else f"Synchronous ({synchronous.schedule})"
    return f"{kind} pipeline {plan.config}"


def _lanes_of(record: Record, names: Sequence[str]) -> list[tuple[str, list[Row]]]:
    return record_lanes(record, names=names, unit_s=1e-3)


def _expected_spans(
    workload: Workload, synchronous: Synchronous | None, *, first: int, count: int
) -> list[Span]:
    """Some minibatches of a pipeline that is full, numbered from ``first``; seconds from 0."""
    plan = workload.plan
    before = 0 if synchronous else math.lcm(*plan.replicas_of_stages) * plan.num_ranks
    end = before + count
    if synchronous is None:
        schedule = asynchronous(plan, end + before)
    else:
        parts = synchronous.microbatches
        schedule = synchronous_by_name(synchronous.schedule, plan, end, microbatches=parts)
        workload = workload.split(parts, batches=plan.replicas(0))
    made = simulate(schedule, workload, Setting(network=Network.flat(plan.num_ranks))).spans

    def number(span: Span) -> int:  # of an update, the first minibatch of its round
        rounds = synchronous is None and span.action.kind == "U"
        return span.action.number * (plan.replicas(plan.stage_of(span.rank)) if rounds else 1)

    kept = [(number(span), span) for span in made if before <= number(span) < end]
    begin = min(span.start for _, span in kept)
    return [
        Span(
            span.rank,
            replace(span.action, number=place - before + first),
            span.start - begin,
            span.end - begin,
        )
        for place, span in kept
    ]


def _expected_workload(plan: Plan, slowdowns: Mapping[str, float]) -> tuple[Workload, bool]:
    """What each rank computes, a grid by its first one; and whether a search expected it."""
    if (workload := Workload.expected(plan)) is not None:
        return workload, True
    devices = [device for stage in plan.stages for device in stage.devices]
    stages = []
    for number, stage in enumerate(plan.stages):
        ranks = plan.ranks_of(number) if stage.grid is None else plan.ranks_of(number)[:1]
        factors = [slowdowns.get(devices[rank], 1.0) for rank in ranks]
        costs = StageCosts(
            forward_s=tuple(factors),
            backward_s=tuple(_BACKWARD_TIME * factor for factor in factors),
            parameter_bytes=1.0,  # replicas with something to sum meet at their updates
        )
        stages.append(costs)
    return Workload(plan=plan.without_grids, stages=tuple(stages)), False


def rank_name(plan: Plan, rank: int) -> str:
    """A rank's stage, replica and device; the device by its model, where no other has that."""
    devices = [device for stage in plan.stages for device in stage.devices]
    models = list(map(device_name, devices))
    alone = models.count(models[rank]) == 1
    return f"{lane_name(plan, rank)}: {models[rank] if alone else devices[rank]}"
