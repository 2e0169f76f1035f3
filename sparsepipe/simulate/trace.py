"""A simulated run as a trace file that Chrome's tracing page and Perfetto open.

The Trace Event Format, JSON: a process for each rank with a thread for what it computes and one
for what it sends, a process for each stage's sums, and an arrow from each message's sending to the
action that takes it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from sparsepipe.schedule import Action, Span
from sparsepipe.simulate.memory import Level
from sparsepipe.simulate.record import Record, Transfer

_MICRO = 1e6
_COMPUTES, _SENDS = 0, 1
_NAMES = {"F": "forward", "B": "backward", "U": "update"}


def trace_text(record: Record, *, memory: Mapping[int, tuple[Level, ...]] | None = None) -> str:
    """The file's text.

    Args:
        record: with spans, transfers and reductions.
        memory: of ranks, drawn as a counter.
    """
    events = [
        *_names(record),
        *(_computed(span) for span in record.spans),
        *_sent(record),
        *_summed(record),
        *_kept(memory or {}),
    ]
    told = {"kind": "simulated", "config": record.plan.config}
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms", "otherData": told})


def _names(record: Record) -> Iterator[dict[str, Any]]:
    plan = record.plan
    for rank in range(plan.num_ranks):
        stage = plan.stage_of(rank)
        device = plan.stages[stage].devices[plan.replica_of(rank)]
        yield _name("process_name", rank, 0, f"rank {rank}: stage {stage}, {device}")
        yield _name("thread_name", rank, _COMPUTES, "computes")
        yield _name("thread_name", rank, _SENDS, "sends")
    for stage in sorted({reduction.stage for reduction in record.reductions}):
        yield _name("process_name", plan.num_ranks + stage, 0, f"stage {stage}: sums")


def _name(what: str, process: int, thread: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": process, "tid": thread, "args": {"name": name}}


def _computed(span: Span) -> dict[str, Any]:
    return _complete(
        str(span.action),
        _NAMES[span.action.kind],
        process=span.rank,
        thread=_COMPUTES,
        start_s=span.start,
        end_s=span.end,
        told={"number": span.action.number},
    )


def _complete(
    name: str,
    category: str,
    *,
    process: int,
    thread: int,
    start_s: float,
    end_s: float,
    told: Mapping[str, Any],
) -> dict[str, Any]:
    return {
        "ph": "X",
        "name": name,
        "cat": category,
        "pid": process,
        "tid": thread,
        "ts": start_s * _MICRO,
        "dur": (end_s - start_s) * _MICRO,
        "args": dict(told),
    }


def _sent(record: Record) -> Iterator[dict[str, Any]]:
    """Messages, which may overlap, as asynchronous slices; and arrows to what takes them."""
    begins_s = {(span.rank, span.action): span.start for span in record.spans}
    for number, sent in enumerate(record.transfers):
        takes = Action(
            "F" if sent.cargo == "activation" else "B", sent.number, sent.microbatch
        )
        name = f"{sent.cargo} {sent.number} to rank {sent.target}"
        at = {"cat": sent.cargo, "id": number, "pid": sent.source, "tid": _SENDS}
        told = {"bytes": sent.num_bytes, "target": sent.target}
        yield {"ph": "b", "name": name, "ts": sent.start_s * _MICRO, "args": told, **at}
        yield {"ph": "e", "name": name, "ts": sent.end_s * _MICRO, **at}
        yield from _arrow(sent, number, begins_s[sent.target, takes])


def _arrow(sent: Transfer, number: int, begins_s: float) -> Iterator[dict[str, Any]]:
    flow = {"name": sent.cargo, "cat": "message", "id": number}
    yield {"ph": "s", "pid": sent.source, "tid": _SENDS, "ts": sent.start_s * _MICRO, **flow}
    yield {
        "ph": "f",
        "bp": "e",
        "pid": sent.target,
        "tid": _COMPUTES,
        "ts": begins_s * _MICRO,
        **flow,
    }


def _summed(record: Record) -> Iterator[dict[str, Any]]:
    for reduction in record.reductions:
        yield _complete(
            f"sum {reduction.round}.{reduction.part}",
            "all-reduce",
            process=record.plan.num_ranks + reduction.stage,
            thread=0,
            start_s=reduction.start_s,
            end_s=reduction.end_s,
            told={"bytes": reduction.num_bytes},
        )


def _kept(memory: Mapping[int, tuple[Level, ...]]) -> Iterator[dict[str, Any]]:
    for rank, levels in memory.items():
        for level in levels:
            yield {
                "ph": "C",
                "name": "memory",
                "pid": rank,
                "ts": level.time_s * _MICRO,
                "args": {"MiB": level.num_bytes / 2**20},
            }
