"""The network: the ports that a message between two ranks runs through, and the legs of a sum.

Every host has a network card, and every device a connection to a switch of its host. Both send and
receive at the same time, each at the bandwidth of the link. Ranks of a host share its card.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Literal, NamedTuple

from sparsepipe.cluster import Inventory, Link
from sparsepipe.cluster.inventory import how_to_give_links
from sparsepipe.errors import ConfigError, HardwareError, PlanError
from sparsepipe.schedule import Plan
from sparsepipe.schedule.communication import CHUNK_BYTES, INBOX_DEPTH, way_of
from sparsepipe.utils.arguments import CountFrom0, checked

INSTANT = Link(bytes_per_s=float("inf"))
"""A link that takes no time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterNetwork:
    """Hosts and the links inside and between them.

    Args:
        hosts: by rank, the number of its host, from 0.
        inside: link between two devices of a host, by host.
        between: link between two hosts.
    """

    hosts: tuple[int, ...]
    inside: tuple[Link, ...]
    between: Link = field(default=INSTANT)
    bytes_per_s: tuple[float, ...] = field(init=False, repr=False, compare=False)
    """Bandwidths of the ports: for each rank, those of sending and receiving inside its host; then,
    for each host, those of its network card.
    """

    def __post_init__(self) -> None:
        own = [self.inside[host].bytes_per_s for host in self.hosts for _ in range(2)]
        cards = [self.between.bytes_per_s] * (2 * len(self.inside))
        object.__setattr__(self, "bytes_per_s", (*own, *cards))

    @classmethod
    def flat(cls, num_ranks: int, link: Link = INSTANT) -> ClusterNetwork:
        """The network of one host with ``num_ranks`` ranks and ``link`` between any two of them."""
        return cls(hosts=(0,) * num_ranks, inside=(link,))

    @classmethod
    def of(cls, inventory: Inventory, plan: Plan) -> ClusterNetwork:
        """The network of the devices of ``plan``, with the links of ``inventory``."""
        names = {host.name: number for number, host in enumerate(inventory.hosts)}
        devices = [device for stage in plan.stages for device in stage.devices]
        if strange := [device for device in devices if device.split("/")[0] not in names]:
            raise PlanError(
                f"the plan's {strange[0]} is not on any host of the hardware ({', '.join(names)})",
                remedy="choose the hardware that the plan was made for, or search for a new one",
            )
        hosts = tuple(names[device.split("/")[0]] for device in devices)

        def usable(link: Link | None, where: str) -> Link:
            if link is None or not 0 < link.bytes_per_s < float("inf"):
                raise HardwareError(
                    f"the link of {where} has no bandwidth", remedy=how_to_give_links(inventory)
                )
            return link

        inside = tuple(
            usable(host.link, f"host {host.name}") if hosts.count(number) > 1 else INSTANT
            for number, host in enumerate(inventory.hosts)
        )
        if len(set(hosts)) < 2:
            return cls(hosts=hosts, inside=inside)
        return cls(hosts=hosts, inside=inside, between=usable(inventory.link, "the inventory"))

    def ports(self, source: int, target: int) -> tuple[int, ...]:
        """Numbers of the ports that a message runs through; none if both are infinitely fast."""
        here, there = self.hosts[source], self.hosts[target]
        if here == there:
            found = 2 * source, 2 * target + 1
        else:
            cards = 2 * len(self.hosts)
            found = cards + 2 * here, cards + 2 * there + 1
        speeds = self.bytes_per_s
        return () if speeds[found[0]] == speeds[found[1]] == float("inf") else found

    def latency_s(self, source: int, target: int) -> float:
        """Seconds from the sending of a message's last byte to its arrival."""
        here, there = self.hosts[source], self.hosts[target]
        return self.inside[here].latency_s if here == there else self.between.latency_s


Algorithm = Literal["ring", "direct", "chain", "ordered"]


@checked
@dataclass(frozen=True, slots=True, kw_only=True)
class Sends:
    """Limits of the queues between two ranks, of which each direction and kind of message has one.

    Args:
        outbox: number of messages that may wait, in addition to the one on its way, before their
            sender waits; 0: it waits until its message has arrived; None: no limit.
        inbox: number of messages that may have arrived without being taken; 0: a message starts
            when the receiver waits for it; None: no limit.
    """

    outbox: CountFrom0 | None = None
    inbox: CountFrom0 | None = None


AS_IN_TRAINING = Sends(inbox=INBOX_DEPTH)
"""A message starts when the receiver has taken the previous one; senders never wait."""


class Leg(NamedTuple):
    """A transfer within a sum; all transfers of a phase of the sum take place at the same time."""

    ports: tuple[int, ...]
    num_bytes: float


def reduction_legs(
    network: ClusterNetwork, ranks: Sequence[int], num_bytes: float, algorithm: Algorithm
) -> tuple[list[list[Leg]], float]:
    """Returns a sum's transfers, by phase, and its latency in s. Phases follow one another.

    With m ranks, ``ring`` (Patarasuk and Yuan, 2009; gloo and NCCL use it for large vectors): each
    rank sends 2 (m - 1) / m of the vector to the next, in parts of an m-th. ``direct``: each rank
    sends an m-th to each other rank, sums the parts that it receives, and sends the sum to each
    other rank. ``chain``: neighbours send each other the vector in chunks that follow one another.
    ``ordered``, as in pipelines: ``chain`` or ``direct``, as hosts and size determine.
    """
    m = len(ranks)
    if m == 1 or not num_bytes:
        return [], 0.0
    if algorithm == "ordered":
        algorithm = way_of([network.hosts[rank] for rank in ranks], num_bytes)
    if algorithm == "ring":
        pairs = list(zip(ranks, [*ranks[1:], ranks[0]], strict=True))
        latency_s = 2 * (m - 1) * max(network.latency_s(*pair) for pair in pairs)
        share = 2 * (m - 1) / m * num_bytes
        return [[Leg(network.ports(*pair), share) for pair in pairs]], latency_s
    if algorithm == "direct":
        return _direct(network, ranks, num_bytes)
    if algorithm == "chain":
        return _chain(network, ranks, num_bytes)
    raise ConfigError(
        f"unknown all-reduce algorithm {algorithm!r}", remedy="use ring, direct, chain or ordered"
    )


def _direct(
    network: ClusterNetwork, ranks: Sequence[int], num_bytes: float
) -> tuple[list[list[Leg]], float]:
    """Parts go to the ranks that sum them, then sums go to all; legs over the same ports merge."""
    by_host: dict[int, list[int]] = {}
    for rank in ranks:
        by_host.setdefault(network.hosts[rank], []).append(rank)
    parts: Counter[tuple[int, ...]] = Counter()
    for here, mine in by_host.items():
        for a, b in zip(mine, [*mine[1:], mine[0]], strict=True) if len(mine) > 1 else ():
            parts[network.ports(a, b)] += len(mine) - 1  # all that a sends here, and b receives
        for there, others in by_host.items():
            if here != there:
                parts[network.ports(mine[0], others[0])] += len(mine) * len(others)
    phase = [Leg(ports, number * (num_bytes / len(ranks))) for ports, number in parts.items()]
    latencies_s = [network.inside[h].latency_s for h, mine in by_host.items() if len(mine) > 1]
    if len(by_host) > 1:
        latencies_s.append(network.between.latency_s)
    return [phase, phase], 2 * max(latencies_s)


def _chain(
    network: ClusterNetwork, ranks: Sequence[int], num_bytes: float
) -> tuple[list[list[Leg]], float]:
    """Neighbours send at once; the latency includes a chunk's time on all but the busiest port."""
    hops = [hop for pair in pairwise(ranks) for hop in (pair, pair[::-1])]
    legs = [Leg(network.ports(*hop), num_bytes) for hop in hops]
    speeds = network.bytes_per_s
    through = Counter(port for leg in legs for port in leg.ports)
    busiest = max((number / speeds[port] for port, number in through.items()), default=0.0)
    once = sum(1 / min(speeds[port] for port in leg.ports) for leg in legs if leg.ports)
    chunk = min(num_bytes, CHUNK_BYTES)
    return [legs], chunk * (once - busiest) + sum(network.latency_s(*hop) for hop in hops)
