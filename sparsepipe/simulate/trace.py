"""Writes spans as a trace file, which Chrome's tracing page and Perfetto open.

The file is JSON in the Trace Event Format. It has a process for each rank, with threads for what
the rank computes, for each queue to which it sends, and for its other spans; a process for the sums
of each stage; and an arrow from each message to the action that takes it. Slices of a thread
do not overlap.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

from sparsepipe.schedule import Plan, Span
from sparsepipe.schedule.spans import ACTIONS
from sparsepipe.simulate.memory import Level

_MICRO = 1e6
_CATEGORIES = {**ACTIONS, "sum": "all-reduce"}


class _TraceEvents:
    """Events of a trace; a process or thread gets its name when it is first used."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []
        self.threads: dict[int, dict[str, int]] = defaultdict(dict)  # numbers by name, by process

    def name(self, what: str, process: int, thread: int, text: str, place: int) -> None:
        at = {"ph": "M", "pid": process, "tid": thread}
        self.events.append({**at, "name": f"{what}_name", "args": {"name": text}})
        self.events.append({**at, "name": f"{what}_sort_index", "args": {"sort_index": place}})

    def thread_of(self, process: int, text: str) -> int:
        own = self.threads[process]
        if text not in own:
            own[text] = len(own)
            self.name("thread", process, own[text], text, own[text])
        return own[text]

    def add(
        self, span: Span, process: int, thread: str, title: str, **details: Any
    ) -> dict[str, Any]:
        """Adds ``span`` as a slice; returns its process, thread and start, to attach arrows."""
        at = {"pid": process, "tid": self.thread_of(process, thread), "ts": span.start * _MICRO}
        named = {"ph": "X", "name": title, "cat": _CATEGORIES.get(span.kind, span.kind)}
        lasts = (span.end - span.start) * _MICRO
        self.events.append({**named, **at, "dur": lasts, "args": details})
        return at


def trace_text(
    plan: Plan,
    spans: Iterable[Span],
    *,
    memory: Sequence[Sequence[Level]] = (),
    kind: str = "simulated",
) -> str:
    """The text of a trace file.

    Args:
        plan: the stages and their ranks.
        spans: actions of ranks, messages and sums, with times in seconds.
        memory: levels of memory over time, by rank.
        kind: how times were obtained, such as ``simulated`` or ``measured``.
    """
    found = _TraceEvents()
    for rank in range(plan.num_ranks):
        stage = plan.stage_of(rank)
        device = plan.stages[stage].devices[plan.replica_of(rank)]
        found.name("process", rank, 0, f"rank {rank}: stage {stage}, {device}", rank)
        found.thread_of(rank, "computes")
    spans = list(spans)
    begins: dict[tuple[int, str, int | None, int | None], dict[str, Any]] = {}
    for span in spans:  # before messages, whose arrows end at slices of actions
        if span.is_action:
            at = found.add(span, span.rank, "computes", span.label, number=span.number)
            begins[span.rank, span.kind, span.number, span.microbatch] = at
    for number, span in enumerate(span for span in spans if span.target is not None):
        assert span.target is not None
        title, line = f"{span.kind} {span.label[1:]}", f"{span.kind}s to rank {span.target}"
        at = found.add(span, span.rank, line, title, bytes=span.num_bytes, target=span.target)
        taken_by = "F" if span.kind == "activation" else "B"
        taken = begins[span.target, taken_by, span.number, span.microbatch]
        arrow = {"name": span.kind, "cat": "message", "id": number}
        found.events += [{"ph": "s", **at, **arrow}, {"ph": "f", "bp": "e", **taken, **arrow}]
    for span in spans:
        if span.kind == "sum":
            stage = plan.stage_of(span.rank)
            process = plan.num_ranks + stage
            if process not in found.threads:
                found.name("process", process, 0, f"stage {stage}: sums of gradients", process)
            found.add(span, process, "sums", f"sum {span.label[1:]}", bytes=span.num_bytes)
        elif span.target is None and not span.is_action:
            found.add(span, span.rank, "beside its actions", span.kind)
    for rank, levels in enumerate(memory):
        for level in levels:
            counted = {"ph": "C", "name": "memory", "args": {"MiB": level.num_bytes / 2**20}}
            found.events.append({"pid": rank, "tid": 0, "ts": level.time_s * _MICRO, **counted})
    about = {"kind": kind, "config": plan.config}
    return json.dumps({"traceEvents": found.events, "displayTimeUnit": "ms", "otherData": about})
