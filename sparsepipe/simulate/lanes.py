"""A simulated run as lanes of rows: what :mod:`sparsepipe.plots.timeline` draws."""

from __future__ import annotations

from collections.abc import Sequence

from sparsepipe.schedule import Plan
from sparsepipe.schedule.timeline import Row, lane_name
from sparsepipe.simulate.record import Record


def lanes(
    record: Record,
    *,
    ranks: Sequence[int] | None = None,
    names: Sequence[str] | None = None,
    unit_s: float = 1.0,
    least_s: float = 0.0,
) -> list[tuple[str, list[Row]]]:
    """What each rank computes, and under it messages under way.

    The kind of a row is F, B or U of what a rank computes, a for an activation and g for a gradient
    that it sends, S for a sum of gradients that it takes part in.

    Args:
        record: with spans, transfers and reductions.
        ranks: that have lanes; None: all.
        names: of all ranks; None: their stages and replicas.
        unit_s: seconds of the rows' unit of time.
        least_s: messages and sums that take no longer are left out.

    Returns:
        For each rank the lane of what it computes under its name; then, where it sends anything,
        lanes in which no two messages are under way at once, and one of the sums.
    """
    plan = record.plan
    computed, sent, summed = _computed(record, unit_s), _sent(record, unit_s), _sums(record, unit_s)
    found: list[tuple[str, list[Row]]] = []
    for rank in range(plan.num_ranks) if ranks is None else ranks:
        found.append((lane_name(plan, rank) if names is None else names[rank], computed[rank]))
        for name, moved in (("sends", sent[rank]), ("sums", summed[plan.stage_of(rank)])):
            seen = [row for row in moved if row[4] - row[3] > least_s / unit_s]
            found += [(name, lane) for lane in _apart(seen)]
    return found


def some_ranks(plan: Plan, most: int) -> list[int]:
    """Ranks that stand for all where these are more than ``most`` (at least 2).

    Returns:
        All, if there are no more; else the first replicas of each stage, or of stages from the
        first to the last at like distances.
    """
    if plan.num_ranks <= most:
        return list(range(plan.num_ranks))
    stages = range(plan.num_stages)
    if plan.num_stages > most:
        stages_seen = [round(k * (plan.num_stages - 1) / (most - 1)) for k in range(most)]
        return [plan.ranks_of(stage).start for stage in stages_seen]
    each = most // plan.num_stages
    return [rank for stage in stages for rank in plan.ranks_of(stage)[:each]]


def _computed(record: Record, unit_s: float) -> list[list[Row]]:
    found: list[list[Row]] = [[] for _ in range(record.plan.num_ranks)]
    for span in record.spans:
        action, start, end = span.action, span.start / unit_s, span.end / unit_s
        found[span.rank].append((action.kind, action.number, action.microbatch, start, end))
    return found


def _sent(record: Record, unit_s: float) -> list[list[Row]]:
    found: list[list[Row]] = [[] for _ in range(record.plan.num_ranks)]
    for sent in record.transfers:
        kind = "a" if sent.cargo == "activation" else "g"
        start, end = sent.start_s / unit_s, sent.end_s / unit_s
        found[sent.source].append((kind, sent.number, sent.microbatch, start, end))
    return found


def _sums(record: Record, unit_s: float) -> list[list[Row]]:
    found: list[list[Row]] = [[] for _ in range(record.plan.num_stages)]
    in_parts = any(reduction.part for reduction in record.reductions)
    for reduction in record.reductions:
        part = reduction.part if in_parts else None
        start, end = reduction.start_s / unit_s, reduction.end_s / unit_s
        found[reduction.stage].append(("S", reduction.round, part, start, end))
    return found


def _apart(rows: Sequence[Row]) -> list[list[Row]]:
    """The rows in as few lanes as hold them without overlap."""
    found: list[list[Row]] = []
    for row in sorted(rows, key=lambda row: row[3]):
        free = (lane for lane in found if lane[-1][4] <= row[3])
        lane = next(free, None)
        if lane is None:
            found.append([row])
        else:
            lane.append(row)
    return found
