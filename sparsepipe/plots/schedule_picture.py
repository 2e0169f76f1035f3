"""What the stages of a pipeline do when, drawn from its plan."""

from __future__ import annotations

from sparsepipe.config.schema import Synchronous
from sparsepipe.runs.rundir import RunDir
from sparsepipe.schedule import Plan, asynchronous, lanes, synchronous_by_name, timeline, unit_times

_MOST_RANKS = 16  # more are too many for a picture
_WIDTH_IN = 24.0  # of the bars
_BACKWARD = 2.0  # times as long as the forward


_MINIBATCHES = 3  # of a synchronous schedule


def draw_schedule(directory: RunDir, synchronous: Synchronous | None = None) -> None:
    """``timeline.png`` of a pipeline's first minibatches; nothing of one device, or of too many.

    Stages take the times that the plan's search expected, or as long as one another; of both
    the backward is twice the forward, and messages take no time. Nothing of it is measured.

    Args:
        directory: of a run with a plan.
        synchronous: its schedule, if it is such a one.
    """
    from sparsepipe.plots.timeline import timeline_picture

    if not directory.plan.exists():
        return
    plan = Plan.from_json(directory.plan.read_text(encoding="utf-8"))
    if not 1 < plan.num_ranks <= _MOST_RANKS:
        return
    expected_s = plan.details.get("stage_times_s")
    stages = None
    if expected_s:  # of a minibatch; each of several replicas, which take turns, takes longer
        forwards_s = [time_s / (1 + _BACKWARD) for time_s in expected_s]
        stages = [1e3 * time_s * plan.replicas(stage) for stage, time_s in enumerate(forwards_s)]
    if synchronous is None:
        name, unit = "Asynchronous", "minibatch"
        schedule = asynchronous(plan, 3 * plan.num_ranks + 2)
    else:
        parts = synchronous.microbatches
        name, unit = f"Synchronous ({synchronous.schedule})", "microbatch"
        schedule = synchronous_by_name(synchronous.schedule, plan, _MINIBATCHES, microbatches=parts)
        stages = stages and [time_s / parts for time_s in stages]
    times = unit_times(backward=_BACKWARD, stages=stages)
    told = "times as its search expected" if expected_s else "all stages alike"
    timeline_picture(
        lanes(schedule, timeline(schedule, times)),
        directory.path / "timeline.png",
        title=f"{name} pipeline {plan.config}, {told}",
        unit_name="milliseconds" if expected_s else f"time (forward of one {unit} = 1)",
        max_width_in=_WIDTH_IN,
    )
