"""What stages may have used when they end: the space that searches for a plan walk through."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np
from numpy.typing import NDArray

from sparsepipe.partition.fleet import Counts, Fleet


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Ways:
    """All stages that end at one node, E of them; arrays are in the order of their sources.

    Attributes:
        sources_E: numbers of the nodes that they begin at.
        counts_EK: their devices of each kind.
        replicas_E: their devices.
        left_E: devices of this stage and of all after it.
        sync_E: bytes/s between their devices.
        cut_E: bytes/s from the stage before.
    """

    sources_E: NDArray[np.intp]
    counts_EK: NDArray[np.intp]
    replicas_E: NDArray[np.intp]
    left_E: NDArray[np.intp]
    sync_E: NDArray[np.float64]
    cut_E: NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """Devices that the stages so far have used.

    Args:
        counts: of each kind.
        host: of the last of these stages, where bandwidths differ; else 0.
    """

    counts: Counts
    host: int


class Lattice:
    """Nodes from no device to all, and the stages that lead from one to another.

    Args:
        fleet: the devices.
        counts: what stages may have used when they end, with nothing and everything; in any
            order.
        adjacent: a stage leads only from one of the counts to the next larger one: the devices
            of each stage are given.
    """

    def __init__(self, fleet: Fleet, counts: Sequence[Counts], *, adjacent: bool = False) -> None:
        self.fleet = fleet
        self.kinds = fleet.kinds
        self._tells_hosts = not fleet.is_uniform
        order = sorted(set(counts), key=lambda c: (sum(c), c))
        self._befores = {
            used: {
                o for o in order[max(0, place - 1) if adjacent else 0 : place] if _below(o, used)
            }
            for place, used in enumerate(order)
        }
        self.nodes = [node for used in order for node in self._nodes(used)]
        self.all_used = order[-1]
        self.ways = [self._ways(node) for node in self.nodes]

    @property
    def last(self) -> list[int]:
        """Numbers of the nodes at which all devices are used."""
        return [n for n, node in enumerate(self.nodes) if node.counts == self.all_used]

    def _nodes(self, used: Counts) -> Iterator[Node]:
        if not any(used) or not self._tells_hosts:
            yield Node(counts=used, host=0)
            return
        hosts = {self.fleet.host_of(_less(used, before)) for before in self._befores[used]}
        yield from (Node(counts=used, host=host) for host in sorted(hosts))

    def _ways(self, node: Node) -> Ways:
        found = []
        befores = self._befores[node.counts]
        for number, source in enumerate(self.nodes):
            if source.counts not in befores:
                continue
            group = _less(node.counts, source.counts)
            host = self.fleet.host_of(group) if self._tells_hosts else 0
            if host == node.host:
                cut = self.fleet.cut_bytes_per_s(source.host, host)
                found.append((number, group, cut))
        groups = np.array([group for _, group, _ in found], dtype=np.intp)
        groups = groups.reshape(len(found), len(self.kinds))
        total = sum(self.all_used)
        return Ways(
            sources_E=np.array([number for number, _, _ in found], dtype=np.intp),
            counts_EK=groups,
            replicas_E=groups.sum(axis=1),
            left_E=np.array(
                [total - sum(self.nodes[number].counts) for number, _, _ in found], dtype=np.intp
            ),
            sync_E=np.array([self.fleet.sync_bytes_per_s(group) for _, group, _ in found]),
            cut_E=np.array([cut for _, _, cut in found]),
        )


def prefixes(fleet: Fleet, order: Sequence[int]) -> list[Counts]:
    """Counts of the first 0 to N devices of a list sorted by kind (Algorithm 1).

    Args:
        fleet: the devices.
        order: numbers of the kinds, those first whose devices come first.
    """
    used = [0] * len(fleet.kinds)
    found = [tuple(used)]
    for kind in order:
        for _ in range(fleet.kinds[kind].count):
            used[kind] += 1
            found.append(tuple(used))
    return found


def subsets(fleet: Fleet) -> list[Counts]:
    """Counts of all subsets of the devices, those of a kind being alike."""
    return list(product(*(range(count + 1) for count in fleet.counts)))


def _below(a: Counts, b: Counts) -> bool:
    return a != b and all(x <= y for x, y in zip(a, b, strict=True))


def _less(a: Counts, b: Counts) -> Counts:
    return tuple(x - y for x, y in zip(a, b, strict=True))
