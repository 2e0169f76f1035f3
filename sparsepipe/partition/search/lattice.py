"""The search space of plans: a node is a set of devices used so far; stages lead between nodes.

Shape suffixes: E stages that end at one node; K kinds of devices; H hosts; U sets of devices that
stages so far may have used; B those sets among them with which a node's stages begin.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from math import prod

import numpy as np
from numpy.typing import NDArray

from sparsepipe.partition.costs.layers import Ints
from sparsepipe.partition.devices import SEVERAL, Counts, DevicePool


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Transitions:
    """All stages that end at one node, E of them; arrays are in the order of their sources.

    Attributes:
        sources_E: indices of the nodes at which the stages begin.
        counts_EK: numbers of devices of each stage, by kind.
        replicas_E: number of devices of each stage.
        left_E: number of devices of each stage and all later ones together.
        sync_E: bytes/s of all-reduce between the devices of each stage.
        cut_E: bytes/s of the transfer from the stage before.
    """

    sources_E: NDArray[np.intp]
    counts_EK: NDArray[np.intp]
    replicas_E: NDArray[np.intp]
    left_E: NDArray[np.intp]
    sync_E: NDArray[np.float64]
    cut_E: NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class LatticeNode:
    """The devices that the stages so far have used.

    Args:
        counts: number of these devices of each kind.
        host: :meth:`.DevicePool.host_of` the last stage if bandwidths differ, otherwise 0.
        stage: number of stages so far, but at most ``distinct_stages``.
    """

    counts: Counts
    host: int
    stage: int


class Lattice:
    """Sets of used devices (nodes), from none to all, and the stages that lead between them.

    Args:
        pool: the devices.
        counts: the sets of devices, by kind, that may be used when a stage ends, from none to all.
        adjacent: whether a stage leads only from one of ``counts`` to the next larger one, so that
            the devices of each stage are given.
        distinct_stages: number of stages, from the first, that are distinguished from each other
            and from later ones.

    Attributes:
        last: indices of the nodes at which all devices are used.
    """

    def __init__(
        self,
        pool: DevicePool,
        counts: Sequence[Counts],
        *,
        adjacent: bool = False,
        distinct_stages: int = 0,
    ) -> None:
        self.pool, self.kinds = pool, pool.kinds
        self._distinct_stages = distinct_stages
        on_KH = [[kind.host == host for host in pool.inside] for kind in pool.kinds]
        self._hosts_KH = np.array(on_KH, dtype=np.intp)
        order = sorted(set(counts), key=lambda c: (sum(c), c))
        self.all_used = order[-1]
        self._used_UK = np.array(order, dtype=np.intp)
        self.nodes: list[LatticeNode] = []
        self.ways: list[Transitions] = []
        self._first_U: list[int] = []  # the first node of each set of devices, and the end
        for place, used in enumerate(order):
            self._first_U.append(len(self.nodes))
            self._add(used, np.arange(max(0, place - 1) if adjacent else 0, place))
        self._first_U.append(len(self.nodes))
        self.last = [n for n, node in enumerate(self.nodes) if node.counts == self.all_used]

    def _add(self, used: Counts, earlier_U: Ints) -> None:
        """Adds the nodes that have used ``used``, and the stages to them from ``earlier_U``."""
        groups_UK = np.array(used, dtype=np.intp) - self._used_UK[earlier_U]
        below_U = (groups_UK >= 0).all(axis=1)
        befores_B, groups_BK = earlier_U[below_U], groups_UK[below_U]
        begins_B = [range(self._first_U[used], self._first_U[used + 1]) for used in befores_B]
        hosts_B: Ints = np.zeros(len(groups_BK), dtype=np.intp)
        if not self.pool.is_uniform:  # as DevicePool.host_of
            on_BH = groups_BK @ self._hosts_KH > 0
            hosts_B = np.where(on_BH.sum(axis=1) == 1, on_BH.argmax(axis=1), SEVERAL)
        distinct = self._distinct_stages
        for host in sorted(set(hosts_B.tolist())) or [0]:
            here = np.flatnonzero(hosts_B == host)
            after = {
                node: min(self.nodes[node].stage + 1, distinct)
                for place in here
                for node in (begins_B[place] if distinct else ())
            }
            for stage in sorted(set(after.values())) or [0]:
                sources = [
                    [node for node in begins_B[place] if after.get(node, stage) == stage]
                    for place in here
                ]
                self.nodes.append(LatticeNode(counts=used, host=host, stage=stage))
                self.ways.append(self._ways(host, sources, groups_BK[here]))

    def _ways(self, host: int, sources_B: list[list[int]], groups_BK: Ints) -> Transitions:
        """The stages on ``host`` with devices ``groups_BK``, one for each node in ``sources_B``."""
        sources_E = np.array([number for nodes in sources_B for number in nodes], dtype=np.intp)
        counts_EK = np.repeat(groups_BK, [len(nodes) for nodes in sources_B], axis=0)
        replicas_E = counts_EK.sum(axis=1)
        used_E = np.array([sum(self.nodes[n].counts) for n in sources_E], dtype=np.intp)
        cut_of = {
            before: self.pool.cut_bytes_per_s(before, host)
            for before in (SEVERAL, *range(len(self.pool.inside)))
        }
        # The slowest link between the devices of each stage, as DevicePool.sync_bytes_per_s.
        on_EH = counts_EK @ self._hosts_KH
        inside_H = np.array(list(self.pool.inside.values()))
        inside_E = np.where(on_EH > 1, inside_H, np.inf).min(axis=1, initial=np.inf)
        several_E = (on_EH > 0).sum(axis=1) > 1
        return Transitions(
            sources_E=sources_E,
            counts_EK=counts_EK,
            replicas_E=replicas_E,
            left_E=sum(self.all_used) - used_E,
            sync_E=np.where(several_E, np.minimum(inside_E, self.pool.between), inside_E),
            cut_E=np.array([cut_of[self.nodes[n].host] for n in sources_E], dtype=np.float64),
        )


def prefixes(pool: DevicePool, order: Sequence[int]) -> list[Counts]:
    """Counts by kind of the first 0, 1, ... N devices, with kinds in ``order`` (Algorithm 1)."""
    used = [0] * len(pool.kinds)
    found = [tuple(used)]
    for kind in order:
        for _ in range(pool.kinds[kind].count):
            used[kind] += 1
            found.append(tuple(used))
    return found


def subsets(pool: DevicePool) -> list[Counts]:
    """Counts by kind of all subsets of the devices; devices of one kind are interchangeable."""
    return list(product(*(range(count + 1) for count in pool.counts)))


def stages_between_subsets(pool: DevicePool) -> int:
    """Number of stages in a lattice of all subsets; an upper bound if bandwidths differ.

    Each stage then counts once for each host of the stage before, and once more for several hosts.
    """
    hosts = len({kind.host for kind in pool.kinds})
    from_any = prod(count + 1 for count in pool.counts)
    pairs = prod((count + 1) * (count + 2) // 2 for count in pool.counts) - from_any
    return pairs if pool.is_uniform else pairs * (hosts + 1)
