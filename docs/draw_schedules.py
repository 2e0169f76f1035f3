"""Draws the pictures of docs/schedules.md.

python docs/draw_schedules.py
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from sparsepipe.plots import style
from sparsepipe.plots.timeline import Lane, lanes, timelines_figure
from sparsepipe.schedule import Plan, Schedule, Span, asynchronous, gpipe, naive
from sparsepipe.simulate.engine import Setting, simulate
from sparsepipe.simulate.network import ClusterNetwork
from sparsepipe.simulate.workload import Workload

HERE = Path(__file__).parent / "schedules"

CHAIN = Plan.of(config="1-1-1-1", cuts=[1, 2, 3], num_layers=4)
HYBRID = Plan.of(config="2-1", cuts=[1], num_layers=2)


class Drawing(NamedTuple):
    """One picture.

    Attributes:
        title: title above the picture.
        schedule: the schedule that is drawn.
        until: end of the time axis.
        stages: time of each stage as a multiple of the unit; None: all take equally long.
        unit_name: label of the time axis.
    """

    title: str
    schedule: Schedule
    until: float
    stages: tuple[float, ...] | None = None
    unit_name: str = "time (forward of one minibatch in one stage = 1)"


DRAWINGS = {
    "naive": Drawing("Naive model parallelism", naive(CHAIN, 3), until=27),
    "gpipe": Drawing(
        "Synchronous pipeline of 4 microbatches (GPipe)",
        gpipe(CHAIN, 2, microbatches=4),
        until=27,
        unit_name="time (forward of one microbatch in one stage = 1)",
    ),
    "asynchronous": Drawing("Asynchronous pipeline (1F1B)", asynchronous(CHAIN, 12), until=27),
    "hybrid": Drawing(
        "Asynchronous pipeline with two replicas of the first stage (2-1)",
        asynchronous(HYBRID, 14),
        until=27,
        stages=(2, 1),
        unit_name="time (forward of one minibatch in stage 1 = 1)",
    ),
}


def lanes_of(drawing: Drawing) -> list[Lane]:
    """A drawing of the actions of each rank over time, if messages take none."""
    plan = drawing.schedule.plan
    workload = Workload.uniform(plan, scale=drawing.stages, parameter_bytes=1.0)
    setting = Setting(network=ClusterNetwork.flat(plan.num_ranks))
    return lanes(plan, simulate(drawing.schedule, workload, setting).spans)


def draw(name: str, folder: Path) -> Path:
    """Writes a drawing as PNG; its path."""
    drawing, path = DRAWINGS[name], folder / f"{name}.png"
    figure = timelines_figure(
        {drawing.title: lanes_of(drawing)}, unit_name=drawing.unit_name, until=drawing.until
    )
    style.save_png(figure, path)
    return path


def text(name: str) -> str:
    """A drawing in characters, each unit of time as wide as the longest name of a forward.

    Bars of backwards are filled with ``-``, waiting with ``.``; where an update, which takes
    no time, follows a bar, U stands in place of its border.
    """
    until = DRAWINGS[name].until
    drawn = [
        (title, [span for span in spans if span.start < until or span.start == span.end == until])
        for title, spans in lanes_of(DRAWINGS[name])
    ]
    bars = [span for _, spans in drawn for span in spans if span.end > span.start]
    width = max(math.ceil((len(span.label) + 1) / (span.end - span.start)) for span in bars)
    width = max(width, len(str(round(until))) + 1)
    names = max(len(title) for title, _ in drawn) + 1
    head = "time".ljust(names) + "".join(str(t).ljust(width) for t in range(round(until) + 1))
    shown = round(until * width) + 1
    body = [title.ljust(names) + text_lane(spans, width)[:shown] for title, spans in drawn]
    return "\n".join(line.rstrip() for line in [head, *body]) + "\n"


def text_lane(spans: Sequence[Span], width: int) -> str:
    """A rank's actions in characters, so many for a unit of time."""
    line = ["."] * (max(round(span.end * width) for span in spans) + 1)
    for span in sorted(spans, key=lambda span: span.end == span.start):
        start, end = round(span.start * width), round(span.end * width)
        if end > start:
            inside = end - start - 1
            line[start] = line[end] = "|"
            fill = {"F": " ", "B": "-"}[span.kind]
            line[start + 1 : end] = span.label.ljust(inside, fill)[:inside]
        else:
            line[start] = span.kind
    return "".join(line).removesuffix(".")


if __name__ == "__main__":
    for each in DRAWINGS:
        draw(each, HERE)
