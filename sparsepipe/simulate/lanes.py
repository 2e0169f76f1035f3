"""A simulated run as lanes of rows: what :mod:`sparsepipe.results` draws."""

from __future__ import annotations

from collections.abc import Sequence

from sparsepipe.schedule import Plan
from sparsepipe.simulate.record import Record

Row = tuple[str, int, int | None, float, float]
"""(kind, number, microbatch, start, end): kind is F, B or U of what a rank computes, a for an
activation and g for a gradient that it sends, S for a sum of gradients that it takes part in."""


def lanes(
    record: Record,
    *,
    names: Sequence[str] | None = None,
    unit_s: float = 1.0,
    least_s: float = 0.0,
) -> list[tuple[str, list[Row]]]:
    """What each rank computes, and under it what it has on its way.

    Args:
        record: with spans, transfers and reductions.
        names: of the ranks; None: their stages and replicas.
        unit_s: seconds of the unit in which rows tell the time.
        least_s: messages and sums that take no longer are left out.

    Returns:
        For each rank the lane of what it computes under its name; then, where it sends anything,
        lanes in which no two messages are under way at once, and one of the sums.
    """
    plan = record.plan
    computed: list[list[Row]] = [[] for _ in range(plan.num_ranks)]
    for span in record.spans:
        action, start, end = span.action, span.start / unit_s, span.end / unit_s
        computed[span.rank].append((action.kind, action.number, action.microbatch, start, end))
    found: list[tuple[str, list[Row]]] = []
    for rank, rows in enumerate(computed):
        found.append((_name(plan, rank) if names is None else names[rank], rows))
        for name, moved in (
            ("sends", _sent(record, rank, unit_s)),
            ("sums", _sums(record, plan.stage_of(rank), unit_s)),
        ):
            seen = [row for row in moved if row[4] - row[3] > least_s / unit_s]
            found += [(name, lane) for lane in _apart(seen)]
    return found


def _name(plan: Plan, rank: int) -> str:
    stage = plan.stage_of(rank)
    if plan.replicas(stage) == 1:
        return f"stage {stage}"
    return f"stage {stage}, replica {plan.replica_of(rank)}"


def _sent(record: Record, rank: int, unit_s: float) -> list[Row]:
    return [
        (
            "a" if sent.cargo == "activation" else "g",
            sent.number,
            sent.microbatch,
            sent.start_s / unit_s,
            sent.end_s / unit_s,
        )
        for sent in record.transfers
        if sent.source == rank
    ]


def _sums(record: Record, stage: int, unit_s: float) -> list[Row]:
    in_parts = any(reduction.part for reduction in record.reductions)
    return [
        (
            "S",
            reduction.round,
            reduction.part if in_parts else None,
            reduction.start_s / unit_s,
            reduction.end_s / unit_s,
        )
        for reduction in record.reductions
        if reduction.stage == stage
    ]


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
