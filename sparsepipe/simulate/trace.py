"""A simulated run as a trace file that Chrome's tracing page and Perfetto open.

The Trace Event Format, JSON: a process for each rank, with a thread for what it computes and one
for each line on which it sends, a process for each stage's sums, and an arrow from each message to
the action that takes it. No two slices of a thread overlap.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from sparsepipe.schedule import Action, Span
from sparsepipe.simulate.memory import Level
from sparsepipe.simulate.record import Cargo, Record, Transfer

_MICRO = 1e6
_COMPUTES = 0  # number of a rank's first thread
_NAMES = {"F": "forward", "B": "backward", "U": "update"}

Event = dict[str, Any]


def trace_text(
    record: Record,
    *,
    memory: Sequence[Sequence[Level]] = (),
    kind: str = "simulated",
    beside: Sequence[tuple[int, str, float, float]] = (),
) -> str:
    """A trace file.

    Args:
        record: the run.
        memory: of each rank over time.
        kind: how the times came about.
        beside: what else ranks do, as rank, name, begin and end in seconds; a thread of its own.
    """
    lines = _lines(record)
    events = [
        *_names(record, lines),
        # Before messages: an arrow leads into the slice that the file has begun at its time.
        *(_computed(span) for span in record.spans),
        *_sent(record, lines),
        *_summed(record),
        *_kept(memory),
        *_beside(beside),
    ]
    about = {"kind": kind, "config": record.plan.config}
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms", "otherData": about})


def _lines(record: Record) -> dict[tuple[int, Cargo, int], int]:
    """Thread of each line, by source, cargo and target: numbered anew for each source."""
    keys = sorted({(sent.source, sent.cargo, sent.target) for sent in record.transfers})
    numbers: dict[tuple[int, Cargo, int], int] = {}
    of_source: Counter[int] = Counter()
    for key in keys:
        of_source[key[0]] += 1
        numbers[key] = _COMPUTES + of_source[key[0]]
    return numbers


def _names(record: Record, lines: Mapping[tuple[int, Cargo, int], int]) -> Iterator[Event]:
    plan = record.plan
    for rank in range(plan.num_ranks):
        stage = plan.stage_of(rank)
        device = plan.stages[stage].devices[plan.replica_of(rank)]
        yield _named("process_name", rank, 0, f"rank {rank}: stage {stage}, {device}")
        yield _sorted("process_sort_index", rank, 0, rank)
        yield _named("thread_name", rank, _COMPUTES, "computes")
        yield _sorted("thread_sort_index", rank, _COMPUTES, _COMPUTES)
    for (source, cargo, target), thread in lines.items():
        yield _named("thread_name", source, thread, f"{cargo}s to rank {target}")
        yield _sorted("thread_sort_index", source, thread, thread)
    for stage in sorted({reduction.stage for reduction in record.reductions}):
        process = _of_sums(record, stage)
        yield _named("process_name", process, 0, f"stage {stage}: sums of gradients")
        yield _sorted("process_sort_index", process, 0, process)


def _of_sums(record: Record, stage: int) -> int:
    """Number of the process that shows a stage's sums: after all ranks."""
    return record.plan.num_ranks + stage


def _named(what: str, process: int, thread: int, name: str) -> Event:
    return {"ph": "M", "name": what, "pid": process, "tid": thread, "args": {"name": name}}


def _sorted(what: str, process: int, thread: int, place: int) -> Event:
    return {"ph": "M", "name": what, "pid": process, "tid": thread, "args": {"sort_index": place}}


def _computed(span: Span) -> Event:
    return _slice(
        str(span.action),
        _NAMES[span.action.kind],
        place=(span.rank, _COMPUTES),
        time_s=(span.start, span.end),
        details={"number": span.action.number},
    )


def _slice(
    name: str,
    category: str,
    *,
    place: tuple[int, int],
    time_s: tuple[float, float],
    details: Mapping[str, Any],
) -> Event:
    """A slice of a thread, coloured by its category; begin and end are in ``time_s``."""
    return {
        "ph": "X",
        "name": name,
        "cat": category,
        "pid": place[0],
        "tid": place[1],
        "ts": time_s[0] * _MICRO,
        "dur": (time_s[1] - time_s[0]) * _MICRO,
        "args": dict(details),
    }


def _sent(record: Record, lines: Mapping[tuple[int, Cargo, int], int]) -> Iterator[Event]:
    """Messages, and arrows to what takes them."""
    begins_s = {(span.rank, span.action): span.start for span in record.spans}
    for number, sent in enumerate(record.transfers):
        place = sent.source, lines[sent.source, sent.cargo, sent.target]
        takes = _takes(sent)
        yield _slice(
            f"{sent.cargo} {str(takes)[1:]}",
            sent.cargo,
            place=place,
            time_s=(sent.start_s, sent.end_s),
            details={"bytes": sent.num_bytes, "target": sent.target},
        )
        arrow = {"name": sent.cargo, "cat": "message", "id": number}
        yield _at(place, sent.start_s, {"ph": "s", **arrow})
        taken = sent.target, _COMPUTES
        yield _at(taken, begins_s[sent.target, takes], {"ph": "f", "bp": "e", **arrow})


def _takes(sent: Transfer) -> Action:
    """The action that a message is for."""
    return Action("F" if sent.cargo == "activation" else "B", sent.number, sent.microbatch)


def _at(place: tuple[int, int], time_s: float, event: Event) -> Event:
    return {"pid": place[0], "tid": place[1], "ts": time_s * _MICRO, **event}


def _summed(record: Record) -> Iterator[Event]:
    for reduction in record.reductions:
        yield _slice(
            f"sum {reduction.round}.{reduction.part}",
            "all-reduce",
            place=(_of_sums(record, reduction.stage), 0),
            time_s=(reduction.start_s, reduction.end_s),
            details={"bytes": reduction.num_bytes},
        )


def _beside(parts: Sequence[tuple[int, str, float, float]]) -> Iterator[Event]:
    """Slices of the thread behind that of the actions."""
    for rank in sorted({part[0] for part in parts}):
        yield _named("thread_name", rank, _COMPUTES + 1, "beside its actions")
        yield _sorted("thread_sort_index", rank, _COMPUTES + 1, _COMPUTES + 1)
    for rank, name, begin, end in parts:
        yield _slice(name, name, place=(rank, _COMPUTES + 1), time_s=(begin, end), details={})


def _kept(memory: Sequence[Sequence[Level]]) -> Iterator[Event]:
    for rank, levels in enumerate(memory):
        for level in levels:
            counted = {"ph": "C", "name": "memory", "args": {"MiB": level.num_bytes / 2**20}}
            yield _at((rank, _COMPUTES), level.time_s, counted)
