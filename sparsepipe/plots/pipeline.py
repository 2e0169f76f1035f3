"""Timelines of a run's pipeline: as expected by its schedule, and as measured."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from sparsepipe.cluster.places import device_name
from sparsepipe.config.schema import Synchronous
from sparsepipe.partition.explanation import rank_times
from sparsepipe.plots import style
from sparsepipe.plots.timeline import lanes, timelines_figure
from sparsepipe.runs.rundir import RunDir
from sparsepipe.schedule import Plan, Span, asynchronous, synchronous_by_name
from sparsepipe.schedule.spans import rank_title
from sparsepipe.simulate.engine import Setting, simulate
from sparsepipe.simulate.network import ClusterNetwork
from sparsepipe.simulate.workload import StageCosts, Workload

_MOST_RANKS = 16  # more are not drawn
_WIDTH_IN = 18.0  # of the time axis, at most
_BACKWARD_TIME = 2.0  # of a backward pass, if that of a forward pass is 1
_MINIBATCHES = 2  # drawn of a synchronous schedule: the second shows that it repeats


def draw_schedule(
    directory: RunDir,
    synchronous: Synchronous | None = None,
    *,
    slowdowns: Mapping[str, float] | None = None,
) -> None:
    """Draws ``timeline.png``: a pipeline's first minibatches on 2 to 16 ranks, as expected.

    Ranks take the times that the plan's search expected for their devices. Without a search, all
    stages take the same time at full speed, and the backward takes twice as long as the forward.
    Messages take no time. Draws nothing if the run has no plan, or another number of ranks.

    Args:
        directory: the run's directory, with its plan.
        synchronous: settings of its schedule; None: the asynchronous schedule.
        slowdowns: factor by which each device is made slower, by its name in plan files.
    """
    if not directory.plan.exists():
        return
    plan = Plan.load(directory.plan)
    if not 1 < plan.without_grids.num_ranks <= _MOST_RANKS:
        return
    workload = Workload.expected(plan)
    searched, times_text = workload is not None, "times as its search expected"
    if workload is None:
        slower = slowdowns or {}
        workload = _stages_alike(plan, slower)
        unlike = any(factor != 1 for factor in slower.values())
        times_text = f"all stages alike{' on devices of different speed' if unlike else ''}"
    plan = workload.plan
    unit = "minibatch" if synchronous is None else "microbatch"
    if synchronous is not None and searched:
        workload = workload.split(synchronous.microbatches, batches=plan.replicas(0))
    count = 3 * plan.num_ranks + 2 if synchronous is None else _MINIBATCHES
    names = [rank_name(plan, rank) for rank in range(plan.num_ranks)]
    figure = timelines_figure(
        {
            f"{_title(plan, synchronous)}, {times_text}": lanes(
                plan, _first_spans(workload, synchronous, count), names=names
            )
        },
        unit=1e-3 if searched else 1.0,
        unit_name="milliseconds" if searched else f"time (forward of one {unit} = 1)",
        max_width_in=_WIDTH_IN,
    )
    style.save_png(figure, directory.path / "timeline.png")


def draw_measured(
    directory: RunDir, spans: Sequence[Span], synchronous: Synchronous | None = None
) -> None:
    """Draws ``timeline_measured.png``: what ranks did and, if a search expected times, the same
    minibatches with these times below.

    ``spans`` are in seconds from 0. Draws nothing for more than 16 ranks.
    """
    plan = Plan.load(directory.plan)
    if plan.num_ranks > _MOST_RANKS:
        return
    names = [rank_name(plan, rank) for rank in range(plan.num_ranks)]
    shown = [span for span in spans if span.kind != "waits"]  # shown by gaps
    panels = {f"{_title(plan, synchronous)}, measured": lanes(plan, shown, names=names)}
    workload = None if plan.has_grids else Workload.expected(plan)
    if workload is not None:
        last = plan.num_stages - 1  # earlier stages are at later minibatches
        forwards = [span for span in spans if span.kind == "F"]
        numbers = {s.number for s in forwards if s.number is not None
                   and plan.stage_of(s.rank) == last}  # fmt: skip
        expected = _expected_spans(workload, synchronous, first=min(numbers), count=len(numbers))
        loads = any(each.get("load") for each in rank_times(plan))
        note = ", loading as part of forwards" if loads else ""
        panels[f"Expected by the plan's search{note}"] = lanes(plan, expected, names=names)
    figure = timelines_figure(panels, unit=1e-3, unit_name="milliseconds", max_width_in=_WIDTH_IN)
    style.save_png(figure, directory.path / "timeline_measured.png")


def rank_name(plan: Plan, rank: int) -> str:
    """A rank's stage, replica and device; the device by its model alone if that occurs once."""
    devices = [device for stage in plan.stages for device in stage.devices]
    models = list(map(device_name, devices))
    alone = models.count(models[rank]) == 1
    return f"{rank_title(plan, rank)}: {models[rank] if alone else devices[rank]}"


def _title(plan: Plan, synchronous: Synchronous | None) -> str:
    kind = "Asynchronous" if synchronous is None else f"Synchronous ({synchronous.schedule})"
    return f"{kind} pipeline {plan.config}"


def _first_spans(
    workload: Workload, synchronous: Synchronous | None, minibatches: int
) -> list[Span]:
    plan = workload.plan
    if synchronous is None:
        schedule = asynchronous(plan, minibatches)
    else:
        parts, name = synchronous.microbatches, synchronous.schedule
        schedule = synchronous_by_name(name, plan, minibatches, microbatches=parts)
    setting = Setting(network=ClusterNetwork.flat(plan.num_ranks))
    return simulate(schedule, workload, setting).spans


def _expected_spans(
    workload: Workload, synchronous: Synchronous | None, *, first: int, count: int
) -> list[Span]:
    """Spans, in seconds from 0, of ``count`` minibatches of a full pipeline, from ``first``."""
    plan = workload.plan
    before = 0 if synchronous else math.lcm(*plan.replicas_of_stages) * plan.num_ranks
    end = before + count
    if synchronous is None:
        made = _first_spans(workload, None, end + before)
    else:
        split = workload.split(synchronous.microbatches, batches=plan.replicas(0))
        made = _first_spans(split, synchronous, end)

    def number(span: Span) -> int:  # for an update, the first minibatch of its round
        assert span.number is not None
        rounds = synchronous is None and span.kind == "U"
        return span.number * (plan.replicas(plan.stage_of(span.rank)) if rounds else 1)

    kept = [(number(span), span) for span in made if before <= number(span) < end]
    begin = min(span.start for _, span in kept)
    return [
        replace(span, number=place - before + first, start=span.start - begin, end=span.end - begin)
        for place, span in kept
    ]


def _stages_alike(plan: Plan, slowdowns: Mapping[str, float]) -> Workload:
    """A workload of stages that differ only by ``slowdowns``; a grid counts as one rank."""
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
    return Workload(plan=plan.without_grids, stages=tuple(stages))
