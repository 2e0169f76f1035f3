"""The trace file, read back as a viewer reads it."""

from __future__ import annotations

import json
from collections import defaultdict
from itertools import pairwise
from typing import Any

import pytest

from sparsepipe.cluster import Link
from sparsepipe.partition.memory import MemoryModel
from sparsepipe.simulate.engine import Record, Setting
from sparsepipe.simulate.memory import memory_over_time
from sparsepipe.simulate.network import ClusterNetwork, Sends
from sparsepipe.simulate.simulation import SCHEDULES, Simulation
from sparsepipe.simulate.trace import trace_text
from sparsepipe.simulate.workload import Workload
from tests.support.plans import plan_of
from tests.support.sending import RENDEZVOUS

ROUNDING_US = 1e-3  # a billionth of a second; times are microseconds in floating point


def recorded(config: str, schedule: str, sends: Sends, *, bytes_per_s: float = 90.0) -> Record:
    plan = plan_of(config)
    workload = Workload.uniform(
        plan, scale=[1.0, 1.7, 0.6, 1.1][: plan.num_stages], output_bytes=30.0, parameter_bytes=50.0
    )
    network = ClusterNetwork.flat(plan.num_ranks, Link(bytes_per_s=bytes_per_s, latency_s=0.05))
    setting = Setting(network=network, sends=sends)
    return Simulation.of(workload, setting, schedule=schedule).record(9)


def events(record: Record) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(trace_text(record.plan, record.all_spans))[
        "traceEvents"
    ]
    return found


CASES = [
    ("1-1-1-1", "asynchronous", Sends()),
    ("1-1-1", "asynchronous", Sends(outbox=1, inbox=1)),
    ("2-1", "asynchronous", Sends()),
    ("1-3-1", "asynchronous", Sends()),
    ("3-2", "asynchronous", Sends()),
    ("4", "asynchronous", Sends()),
    ("1-1-1", "naive", RENDEZVOUS),
    ("1-1-1", "gpipe", Sends()),
    ("2-1", "gpipe", Sends()),
    ("1-1-1", "1f1b", Sends()),
    ("1-1-1", "eager_1f1b", Sends()),
]


@pytest.mark.parametrize(("config", "schedule", "sends"), CASES)
def test_no_rank_does_two_things_at_once(config: str, schedule: str, sends: Sends) -> None:
    """No device, no line and no stage in its sums: slices of a thread do not overlap."""
    threads = defaultdict(list)
    for event in events(recorded(config, schedule, sends)):
        if event["ph"] == "X":
            threads[event["pid"], event["tid"]].append(event)
    assert threads
    for slices in threads.values():
        slices.sort(key=lambda event: (event["ts"], event["ts"] + event["dur"]))
        for before, after in pairwise(slices):
            assert before["ts"] + before["dur"] <= after["ts"] + ROUNDING_US


@pytest.mark.parametrize(("config", "schedule", "sends"), CASES)
def test_every_receive_follows_its_send(config: str, schedule: str, sends: Sends) -> None:
    """An arrow leads from a message, which begins after what made it, to what waits for it."""
    record = recorded(config, schedule, sends)
    found = events(record)
    slices = defaultdict(list)
    for event in found:
        if event["ph"] == "X":
            slices[event["pid"], event["tid"]].append(event)
    begins = {e["id"]: e for e in found if e["ph"] == "s"}
    ends = {e["id"]: e for e in found if e["ph"] == "f"}
    plan = record.plan
    parts = sum(span.kind != "U" for span in record.spans)
    first_and_last = sum(
        (span.kind, plan.stage_of(span.rank)) in (("F", 0), ("B", plan.num_stages - 1))
        for span in record.spans
    )
    assert len(begins) == len(ends) == parts - first_and_last
    assert begins.keys() == ends.keys()
    for number, begin in begins.items():
        end = ends[number]
        (message,) = [
            s
            for s in slices[begin["pid"], begin["tid"]]
            if s["ts"] == begin["ts"] and s["cat"] == begin["name"]
        ]
        cargo, _, part = message["name"].partition(" ")
        kind = {"activation": "F", "gradient": "B"}[cargo]
        (taken,) = [s for s in slices[end["pid"], 0] if s["name"] == kind + part]
        assert end["ts"] == taken["ts"]
        assert message["ts"] + message["dur"] <= taken["ts"] + ROUNDING_US
        (made,) = [s for s in slices[begin["pid"], 0] if s["name"] == kind + part]
        assert made["ts"] + made["dur"] <= message["ts"] + ROUNDING_US
        step = 1 if kind == "F" else -1
        assert plan.stage_of(end["pid"]) == plan.stage_of(begin["pid"]) + step
        shares = 4 / plan.replicas(0) if SCHEDULES[schedule].splits else 1
        assert message["args"] == {"bytes": 30.0 / shares, "target": end["pid"]}


def test_updates_wait_for_the_sum_over_the_replicas() -> None:
    record = recorded("2-1", "asynchronous", Sends())
    found = events(record)
    sums = {e["name"]: e for e in found if e.get("cat") == "all-reduce"}
    assert {e["pid"] for e in sums.values()} == {3}, "stage 0's, after the three ranks"
    updates = [e for e in found if e.get("cat") == "update" and e["pid"] in (0, 1)]
    assert len(updates) == 2 * len(sums) > 0
    for update in updates:
        reduced = sums[f"sum {update['args']['number']}.0"]
        assert reduced["ts"] + reduced["dur"] <= update["ts"] + ROUNDING_US
        assert reduced["args"]["bytes"] == 50.0


def test_names_and_the_memory_of_ranks() -> None:
    plan = plan_of("1-1")
    workload = Workload.uniform(plan, parameter_bytes=2.0**20)
    record = Simulation.of(workload, Setting(network=ClusterNetwork.flat(2))).record(3)
    levels = memory_over_time(record, workload, MemoryModel(optimizer=0.0, gradients=0.0))
    value = json.loads(trace_text(plan, record.all_spans, memory=levels))
    assert value["otherData"]["kind"] == "simulated"
    names = {
        (e["pid"], e["tid"]): e["args"]["name"]
        for e in value["traceEvents"]
        if e["name"] == "thread_name"
    }
    assert names == {
        (0, 0): "computes",
        (1, 0): "computes",
        (0, 1): "activations to rank 1",
        (1, 1): "gradients to rank 0",
    }
    counted = [e for e in value["traceEvents"] if e["ph"] == "C"]
    assert [e["args"]["MiB"] for e in counted if e["pid"] == 0][:5] == [1.0, 1.0, 1.0, 1.0, 2.0]
    assert {e["pid"] for e in counted} == {0, 1}
