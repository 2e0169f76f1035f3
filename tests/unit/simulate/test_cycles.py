"""When a run is said to repeat itself."""

from __future__ import annotations

import pytest

from sparsepipe.cluster import Link
from sparsepipe.schedule import MinibatchSupply
from sparsepipe.simulate.engine import CycleDetector, RunState, repetition
from sparsepipe.simulate.flows import EventQueue, Flows
from sparsepipe.simulate.network import ClusterNetwork
from sparsepipe.simulate.sums import Sums
from sparsepipe.simulate.workload import StageCosts


@pytest.mark.parametrize(
    ("ends_s", "cycle"),
    [
        ([1, 2, 3], 1),
        ([1, 2], None),
        ([0, 1, 3, 4, 6, 7, 9], 2),
        ([0, 5, 6, 8, 9, 11, 12], 2),  # not from the beginning on
        ([0, 1, 2, 3, 3.5], None),
        ([0, 1, 3, 6, 10, 15], None),
        ([5, 5, 5], 1),
    ],
)
def test_when_times_seem_to_repeat(ends_s: list[float], cycle: int | None) -> None:
    assert repetition(ends_s) == cycle


def seen(number: int, place: object, *, time_s: float, end_s: float = 0.5) -> RunState:
    return RunState(number, time_s, (place,), (end_s,), (time_s / 2, time_s))


def test_a_cycle_is_found_when_all_stands_as_before_and_cuts_the_run_short() -> None:
    supply = MinibatchSupply(1000)
    detector = CycleDetector(supply, 2)
    supply.announced = 13
    wanted = []
    for number in range(9):
        if detector.needs_state(number, 0.5 * number):
            wanted.append(number)
            detector.add_state(seen(number, "as ever", time_s=0.5 * number))
    assert wanted == [4, 6], "after three periods, and one later"
    assert detector.cycle is not None
    assert (detector.cycle.minibatches, detector.cycle.seconds) == (2, 1.0)
    assert detector.cycle.busy == (0.5, 1.0)
    assert supply.limit == 14, "what is known of by now, and as even as 1000"


@pytest.mark.parametrize(("in_queue", "later_s"), [(1, 0.0), (0, 1e-4)])
def test_times_that_repeat_are_no_cycle_while_something_else_changes(
    in_queue: int, later_s: float
) -> None:
    """What lies where, or when it ends."""
    supply = MinibatchSupply(1000)
    detector = CycleDetector(supply, 1)
    for number in range(40):
        if detector.needs_state(number, float(number)):
            place, end_s = in_queue * min(number, 20), 0.5 + later_s * min(number, 20)
            detector.add_state(seen(number, place, time_s=float(number), end_s=end_s))
        assert detector.cycle is None or number > 20
    assert detector.cycle is not None
    assert supply.limit == 0


def test_the_phases_of_a_sum_are_distinguished() -> None:
    """Each to each: in both phases the same legs move, and take as long."""
    events, network = EventQueue(), ClusterNetwork.flat(2, Link(bytes_per_s=10.0))
    sums = Sums(
        events,
        Flows(events, network.bytes_per_s),
        network,
        StageCosts(forward_s=(1.0, 1.0), backward_s=(2.0, 2.0), parameter_bytes=80.0),
        range(2),
        algorithm="direct",
        bucket_bytes=None,
        spans=None,
        wake=lambda _: None,
    )
    found: list[tuple[object, list[float]]] = []
    for time_s in (1.0, 5.0):
        events.at(time_s, lambda: found.append(sums.state(0)))
    for rank in range(2):
        sums.reached(rank, 0)
    events.run()
    (first, first_s), (second, second_s) = found
    assert first_s == [4.0, 4.0]
    assert second_s == [8.0, 8.0]
    assert first != second
