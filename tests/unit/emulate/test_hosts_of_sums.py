"""Emulated hosts are hosts for the sums of replicas, too."""

from __future__ import annotations

import threading

from sparsepipe.emulate import emulated_hosts
from sparsepipe.emulate.ranks import _enter
from sparsepipe.runtime.collectives.ordered_sum import _host_number
from tests.support.namespace_cases import cluster, needs_namespaces


def number_in(namespace: str) -> int:
    """The host's number as a rank there finds it."""
    found: list[int] = []

    def enter() -> None:
        _enter(namespace)  # this thread alone
        found.append(_host_number())

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    return found[0]


@needs_namespaces
def test_each_namespace_is_another_host() -> None:
    with emulated_hosts(cluster(2)) as layout:
        a, b = (station.namespace for station in layout.stations)
        found = [number_in(a), number_in(b), _host_number()]
        assert len(set(found)) == 3
        assert number_in(a) == found[0]
