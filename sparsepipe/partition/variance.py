"""Stages whose costs vary least: the heuristic of Zhang and Sun for equal devices.

Zhang and Sun, "A Parallel Pipeline Design for Training Deep Neural Networks", cut the layers such
that the variance of what stages cost is least. Each of K equal devices is a stage. The mean is
what all layers cost over K, whatever the cuts are, so that the sum of squared deviations from it
is one of single stages, and a dynamic program over (stages left, place) finds the least. The cost
of a stage is that of its layers: transfers do not count. Nor do second runs of layers that depend
on the cuts, as where the memory chooses these layers: the mean would depend on the cuts as well.

Shape suffixes: S stages; I places a model can be cut at.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from sparsepipe.partition.layer_tables import LayerTables
from sparsepipe.partition.memory import MemoryModel, room_bytes
from sparsepipe.partition.problem import Problem
from sparsepipe.partition.recompute.plan import no_more_work
from sparsepipe.partition.recompute.second_runs import SecondRuns
from sparsepipe.partition.spans import Floats, Spans
from sparsepipe.partition.ties import EQUAL
from sparsepipe.partition.work import MOST_LOOKS, Work


def ends_for(problem: Problem, *, stages: int) -> list[int] | None:
    """The places at which stages end, on devices that are all alike, each of which is a stage.

    Args:
        problem: with one kind of device.
        stages: K.

    Returns:
        As :func:`least_variance`; None as well where what one device reads is too little to be cut
        into so many microbatches.

    Raises:
        PlanError: so many stages were counted, none of whose plans fits, that the search stops.
    """
    spans, (kind,) = problem.spans, problem.fleet.kinds
    if problem.synchronous is None:
        room = kind.memory_bytes
        return least_variance(spans, stages=stages, memory=problem.memory, room=room)
    if problem.synchronous.microbatches.least_readers > 1:
        return None  # a single device reads too few samples
    tables = LayerTables(problem, work := Work(MOST_LOOKS))
    runs = SecondRuns(tables, problem.memory)
    spans = replace(spans, compute_s_KI=spans.compute_s_KI + tables.anywhere_I)
    classes = [
        runs.class_of((1,), left=stages - number, stage=number, readers=1)
        for number in range(stages)
    ]
    while not work.is_done:  # stages are ruled out until all of a plan fit
        fits_SII = [np.isfinite(runs.seconds_II(own)) for own in classes]
        ends = least_variance(spans, stages=stages, fits_SII=fits_SII)
        if ends is None:
            return None
        bounds = zip(classes, [0, *ends], ends, strict=False)
        if np.isfinite([runs.count(own, first, end) for own, first, end in bounds]).all():
            return ends
    raise no_more_work()


def least_variance(
    spans: Spans,
    *,
    stages: int,
    memory: MemoryModel | None = None,
    room: float | None = None,
    fits_SII: Sequence[NDArray[np.bool_]] | None = None,
) -> list[int] | None:
    """The places at which stages end, of the cuts with the least variance.

    Variances count as equal where stages that differ by a billionth of their mean make the
    difference; of these cuts those are taken whose first stage ends first, then the second, and
    so on.

    Args:
        spans: of the model on one kind of device.
        stages: K.
        memory: what stages keep; None: memory is no limit.
        room: bytes of each device; None: nobody knows.
        fits_SII: for each stage, whether it fits by its begin and its end, in place of the memory.

    Returns:
        K places, the last of which is behind the last layer; None where no cuts fit the memory,
        or there are fewer layers than stages.
    """
    compute_I = spans.compute_s_KI[0]
    mean_s = float(compute_I[-1]) / stages
    squares_II = (compute_I[None, :] - compute_I[:, None] - mean_s) ** 2
    allowed_II = _may_span(spans)
    rest_SI = np.full((stages + 1, len(compute_I)), np.inf)
    rest_SI[stages, -1] = 0.0
    costs: list[Floats] = [squares_II] * stages
    for stage in reversed(range(stages)):
        if fits_SII is None:
            fits_II = _fits(spans, memory, room, left=stages - stage)
        else:
            fits_II = fits_SII[stage]
        costs[stage] = np.where(allowed_II & fits_II, squares_II, np.inf)
        rest_SI[stage] = (costs[stage] + rest_SI[stage + 1]).min(axis=1)
    least = float(rest_SI[0, 0])
    if not np.isfinite(least):
        return None
    limit = least * (1 + EQUAL) + stages * (EQUAL * mean_s) ** 2
    return _first_ends(costs, rest_SI, limit)


def _first_ends(costs: list[Floats], rest_SI: Floats, limit: float) -> list[int]:
    """From the front, the first place at which a stage may end to keep to a limit."""
    place, spent, ends = 0, 0.0, []
    for stage, cost_II in enumerate(costs):
        within_I = spent + cost_II[place] + rest_SI[stage + 1] <= limit
        end = int(within_I.argmax())
        assert within_I[end], "some plan is the best one"
        spent += float(cost_II[place, end])
        place = end
        ends.append(end)
    return ends


def _may_span(spans: Spans) -> NDArray[np.bool_]:
    """Whether a stage may begin at one place and end at another."""
    if spans.nested_II is not None:
        return spans.nested_II
    return np.triu(np.ones((spans.num_layers + 1,) * 2, dtype=np.bool_), 1)


def _fits(
    spans: Spans, memory: MemoryModel | None, room: float | None, *, left: int
) -> NDArray[np.bool_]:
    """Whether a device holds what a stage keeps, by its begin and its end."""
    if memory is None or room is None:
        return np.ones((spans.num_layers + 1,) * 2, dtype=np.bool_)
    in_flight = memory.in_flight(1, left)
    each = memory.per_parameter_byte(in_flight, replicas=1)
    weights_I = each * spans.parameter_bytes_I
    before_I, after_I = (weights_I + in_flight * part_I for part_I in spans.stored_between())
    kept_II = memory.reserved_bytes + after_I[None, :] - before_I[:, None]
    fits_II: NDArray[np.bool_] = kept_II <= room_bytes(room)
    return fits_II
