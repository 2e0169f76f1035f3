"""How many messages lie at a receiver, by hand."""

from __future__ import annotations

import pytest

from sparsepipe.cluster import Link
from sparsepipe.schedule import asynchronous
from sparsepipe.simulate.engine import Setting, simulate
from sparsepipe.simulate.network import ClusterNetwork, Sends
from sparsepipe.simulate.workload import StageCosts, Workload
from tests.support.plans import plan_of
from tests.support.sending import FREELY

PLAN = plan_of("1-1-1-1")
WORKLOAD = Workload(
    plan=PLAN,
    stages=(
        StageCosts(forward_s=(1.0,), backward_s=(1.0,), output_bytes=5.0),
        StageCosts(forward_s=(10.0,), backward_s=(1.0,)),
        StageCosts(forward_s=(1.0,), backward_s=(1.0,)),
        StageCosts(forward_s=(1.0,), backward_s=(1.0,)),
    ),
)
NETWORK = ClusterNetwork.flat(4, Link(bytes_per_s=10.0))


def departures_s(setting: Setting) -> list[float]:
    """Of the first four activations for stage 1."""
    record = simulate(asynchronous(PLAN, 4), WORKLOAD, setting)
    return [sent.start for sent in record.transfers if (sent.rank, sent.target) == (0, 1)]


def test_as_in_training_one_lies_there_and_the_next_leaves_when_it_is_taken() -> None:
    """Stage 0 makes one a second, each is half a second on its way, and stage 1 takes the first at
    1.5 s, the second at 11.5 s and the third at 21.5 s."""
    assert departures_s(Setting(network=NETWORK)) == pytest.approx([1.0, 2.0, 11.5, 21.5])


@pytest.mark.parametrize(
    ("sends", "expected_s"),
    [
        (FREELY, [1.0, 2.0, 3.0, 4.0]),
        (Sends(inbox=2), [1.0, 2.0, 3.0, 11.5]),
        # Each leaves as it is asked for, the last one after a backward of a second.
        (Sends(inbox=0), [1.0, 11.5, 22.0, 33.5]),
    ],
)
def test_more_room_lets_more_leave(sends: Sends, expected_s: list[float]) -> None:
    assert departures_s(Setting(network=NETWORK, sends=sends)) == pytest.approx(expected_s)
