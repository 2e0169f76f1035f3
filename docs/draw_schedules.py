"""Draws the pictures of docs/schedules.md.

python docs/draw_schedules.py
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from sparsepipe.plots.timeline import Row, timeline_picture, timeline_text
from sparsepipe.schedule import (
    Plan,
    Schedule,
    asynchronous,
    gpipe,
    lanes,
    naive,
    timeline,
    unit_times,
)

HERE = Path(__file__).parent / "schedules"

CHAIN = Plan.of(config="1-1-1-1", cuts=[1, 2, 3], num_layers=4)
HYBRID = Plan.of(config="2-1", cuts=[1], num_layers=2)


class Drawing(NamedTuple):
    """One picture.

    Attributes:
        title: above it.
        schedule: what is run.
        until: where it ends.
        stages: how many times longer each stage takes.
        unit_name: what the time axis counts.
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


def rows_of(drawing: Drawing) -> list[tuple[str, list[Row]]]:
    """What each rank does when."""
    spans = timeline(drawing.schedule, unit_times(stages=drawing.stages))
    return lanes(drawing.schedule, spans)


def draw(name: str, folder: Path) -> Path:
    """Writes a drawing as PNG; its path."""
    drawing, path = DRAWINGS[name], folder / f"{name}.png"
    timeline_picture(
        rows_of(drawing),
        path,
        title=drawing.title,
        unit_name=drawing.unit_name,
        until=drawing.until,
    )
    return path


def text(name: str) -> str:
    """A drawing in characters."""
    return timeline_text(rows_of(DRAWINGS[name]), until=DRAWINGS[name].until)


if __name__ == "__main__":
    for each in DRAWINGS:
        draw(each, HERE)
