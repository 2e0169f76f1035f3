"""A training whose replicas sum in a chain over two hosts has the weights of one process."""

from __future__ import annotations

from typing import Any

import pytest

from sparsepipe.cluster import Device, Host, Inventory, Link
from sparsepipe.emulate import announce_hosts, emulated_hosts, enter_host
from sparsepipe.runtime.collectives import process_group
from sparsepipe.runtime.collectives.chain_sum import ChainSum
from sparsepipe.schedule.communication import way_of
from tests.support.asynchronous_cases import Case, check, train
from tests.support.namespace_cases import needs_namespaces
from tests.support.pipeline_cases import make_net
from tests.support.processes import run

HOSTS = ["a", "a", "a", "b", "b"]  # of each rank: the second stage has two on one, one on the other
CASE = Case("1-3-1", net="wide", minibatches=7)  # the last round of the second stage is partial
ROUNDS = 3


def servers() -> Inventory:
    hosts = tuple(
        Host(name=name, devices=(Device(name="CPU", count=HOSTS.count(name)),))
        for name in dict.fromkeys(HOSTS)
    )
    return Inventory(hosts=hosts, link=Link(bytes_per_s=500e6))


def train_on_its_host(rank: int) -> tuple[Any, int]:
    """What a rank has found, and how many sums went through a chain there."""
    enter_host()
    chains = 0
    run_chain = ChainSum.run

    def counted(self: ChainSum) -> None:
        nonlocal chains
        chains += 1
        run_chain(self)

    ChainSum.run = counted  # type: ignore[method-assign]
    process_group.join("gloo", timeout_s=60.0)
    (found,) = train(rank, [CASE])
    process_group.leave()
    return found, chains


def test_the_second_stage_is_one_that_sums_in_a_chain() -> None:
    """As far as its hosts and size tell."""
    first, last = CASE.cuts
    stage = make_net(CASE.net).layers[first:last]
    num_bytes = sum(4 * parameter.numel() for parameter in stage.parameters())
    assert way_of(HOSTS[1:4], num_bytes) == "chain"
    assert way_of(["a"] * 3, num_bytes) == "direct"


@needs_namespaces
@pytest.mark.full
def test_weights_are_those_of_a_replay() -> None:
    with emulated_hosts(servers()) as layout, announce_hosts(layout, HOSTS):
        everyone = run(train_on_its_host, len(HOSTS), join_group=False)
    sums = CASE.epochs * ROUNDS
    assert [chains for _, chains in everyone] == [0, sums, sums, sums, 0]
    check(CASE, [found for found, _ in everyone])
