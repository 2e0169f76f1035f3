"""A simulated run as lanes for a picture."""

from __future__ import annotations

from itertools import pairwise

from sparsepipe.cluster import Link
from sparsepipe.plots.timeline import is_of_messages
from sparsepipe.schedule import asynchronous, naive
from sparsepipe.schedule import lanes as drawn_lanes
from sparsepipe.schedule import timeline as drawn_timeline
from sparsepipe.simulate.engine import Setting, simulate
from sparsepipe.simulate.lanes import lanes
from sparsepipe.simulate.network import Network
from sparsepipe.simulate.workload import Workload
from tests.support.plans import plan_of


def test_messages_that_take_no_time_have_no_lane() -> None:
    plan = plan_of("2-1")
    schedule = asynchronous(plan, 6)
    workload = Workload.uniform(plan, parameter_bytes=1.0)
    record = simulate(schedule, workload, Setting(network=Network.flat(3)))
    assert lanes(record) == drawn_lanes(schedule, drawn_timeline(schedule))


def test_messages_and_sums_lie_under_the_rank_that_has_them_on_its_way() -> None:
    plan = plan_of("1-1")
    network = Network.flat(2, Link(bytes_per_s=100.0))
    workload = Workload.uniform(plan, output_bytes=100.0)
    record = simulate(naive(plan, 1), workload, Setting(network=network))
    assert lanes(record, names=["a", "b"], unit_s=0.5) == [
        ("a", [("F", 0, None, 0, 2), ("B", 0, None, 12, 16), ("U", 0, None, 16, 16)]),
        ("sends", [("a", 0, None, 2, 4)]),
        ("b", [("F", 0, None, 4, 6), ("B", 0, None, 6, 10), ("U", 0, None, 10, 10)]),
        ("sends", [("g", 0, None, 10, 12)]),
    ]


def test_short_messages_may_be_left_out() -> None:
    plan = plan_of("1-1")
    network = Network.flat(2, Link(bytes_per_s=100.0))
    workload = Workload.uniform(plan, output_bytes=1.0)  # a hundredth of a second
    record = simulate(naive(plan, 1), workload, Setting(network=network))
    assert [name for name, _ in lanes(record)] == ["stage 0", "sends", "stage 1", "sends"]
    assert [name for name, _ in lanes(record, least_s=0.02)] == ["stage 0", "stage 1"]


def test_a_lane_holds_one_thing_at_a_time() -> None:
    plan = plan_of("1-3-1")
    network = Network.flat(5, Link(bytes_per_s=20.0, latency_s=0.1))
    workload = Workload.uniform(plan, output_bytes=30.0, parameter_bytes=20.0)
    record = simulate(asynchronous(plan, 20), workload, Setting(network=network))
    found = lanes(record)
    for _, rows in found:
        for before, after in pairwise(rows):
            assert before[4] <= after[3]
    of_messages = [rows for _, rows in found if is_of_messages(rows)]
    sent = sum(row[0] in "ag" for rows in of_messages for row in rows)
    assert sent == len(record.transfers) == 4 * 20
    summed = sum(row[0] == "S" for rows in of_messages for row in rows)
    assert summed == 3 * len(record.reductions), "under each of the three replicas"
    assert len(found) > 5 + 5, "messages of a rank overlap here"
