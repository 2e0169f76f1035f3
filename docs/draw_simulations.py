"""Draws the pictures of docs/simulate.md: simulated runs, to scale.

python docs/draw_simulations.py
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from sparsepipe.cluster import Link
from sparsepipe.plots import style
from sparsepipe.plots.timeline import Lane, lanes, timelines_figure
from sparsepipe.schedule import Plan
from sparsepipe.simulate.engine import Record, Setting
from sparsepipe.simulate.network import ClusterNetwork
from sparsepipe.simulate.simulation import Simulation
from sparsepipe.simulate.workload import Workload

HERE = Path(__file__).parent / "simulate"

CHAIN = Plan.of(config="1-1-1-1", cuts=[1, 2, 3], num_layers=4)
HYBRID = Plan.of(config="2-1", cuts=[1], num_layers=2)

MESSAGE_S = 0.2
"""Of an activation or a gradient; a forward takes a second, a backward two."""


class Drawing(NamedTuple):
    """One picture.

    Attributes:
        title: above it.
        plan: the stages.
        minibatches: that are run.
        schedule: its name.
        until: where the picture ends.
        scale: how many times longer each stage takes.
        parameter_bytes: of each stage, where a message has 1.
        parts: microbatches of a minibatch, each with the times of a whole one elsewhere.
    """

    title: str
    plan: Plan
    minibatches: int
    schedule: str = "asynchronous"
    until: float = 27.0
    scale: tuple[float, ...] | None = None
    parameter_bytes: float = 0.0
    parts: int | None = None


DRAWINGS = {
    "naive": Drawing("Fig. 1: naive model parallelism", CHAIN, 2, schedule="naive"),
    "gpipe": Drawing(
        "Fig. 2: synchronous pipeline, 4 microbatches a minibatch (GPipe)",
        CHAIN,
        2,
        schedule="gpipe",
        parts=4,
    ),
    "asynchronous": Drawing("Fig. 3: asynchronous pipeline of 4 stages", CHAIN, 14),
    "hybrid": Drawing(
        "Fig. 4: hybrid, stage 0 takes twice as long and has two replicas",
        HYBRID,
        16,
        scale=(2, 1),
        parameter_bytes=2.0,
    ),
}


def record_of(drawing: Drawing) -> Record:
    """What is drawn."""
    parts = drawing.parts or 1
    workload = Workload.uniform(
        drawing.plan,
        scale=drawing.scale or [float(parts)] * drawing.plan.num_stages,
        output_bytes=float(parts),
        parameter_bytes=drawing.parameter_bytes,
    )
    link = Link(bytes_per_s=1 / MESSAGE_S)
    setting = Setting(network=ClusterNetwork.flat(drawing.plan.num_ranks, link))
    simulation = Simulation.of(
        workload, setting, schedule=drawing.schedule, microbatches=drawing.parts
    )
    return simulation.record(drawing.minibatches)


def lanes_of(drawing: Drawing) -> list[Lane]:
    """A drawing of the actions and messages of each rank over time."""
    return lanes(drawing.plan, record_of(drawing).all_spans)


def draw(name: str, folder: Path) -> Path:
    """Writes a drawing as PNG; its path."""
    drawing, path = DRAWINGS[name], folder / f"{name}.png"
    of = "minibatch" if drawing.parts is None else "microbatch"
    figure = timelines_figure(
        {drawing.title: lanes_of(drawing)},
        unit_name=f"time (forward of one {of} in the last stage = 1, a message = {MESSAGE_S})",
        until=drawing.until,
    )
    style.save_png(figure, path)
    return path


if __name__ == "__main__":
    for each in DRAWINGS:
        draw(each, HERE)
