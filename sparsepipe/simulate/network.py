"""Which ports a message between two ranks runs through, and how fast these are.

Every host has a network card, every device a connection to the others of its host; each sends
and receives at the same time at the link's bandwidth (full duplex). What several ranks of a host
send to other hosts shares its card. A host's devices are joined by a switch that carries them all
at once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from sparsepipe.cluster import Inventory, Link
from sparsepipe.errors import HardwareError, PlanError
from sparsepipe.schedule import Plan

INSTANT = Link(bytes_per_s=float("inf"))
"""A link that takes no time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """Hosts and the links inside and between them.

    Args:
        hosts: of each rank, by number from 0.
        inside: link between two devices of each host.
        between: link of each host to all others.
    """

    hosts: tuple[int, ...]
    inside: tuple[Link, ...]
    between: Link = field(default=INSTANT)
    bytes_per_s: tuple[float, ...] = field(init=False, repr=False, compare=False)
    """Of each port: two of each rank inside its host, sending first, then two of each host."""

    def __post_init__(self) -> None:
        own = [self.inside[host].bytes_per_s for host in self.hosts for _ in range(2)]
        cards = [self.between.bytes_per_s] * (2 * len(self.inside))
        object.__setattr__(self, "bytes_per_s", (*own, *cards))

    @classmethod
    def flat(cls, num_ranks: int, link: Link = INSTANT) -> Network:
        """Ranks of one host.

        Args:
            num_ranks: how many.
            link: between any two of them.
        """
        return cls(hosts=(0,) * num_ranks, inside=(link,))

    @classmethod
    def of(cls, inventory: Inventory, plan: Plan) -> Network:
        """The links of an inventory.

        Args:
            inventory: the hardware.
            plan: whose devices are named ``host/model/number``.

        Raises:
            PlanError: a device is on no host of the inventory.
            HardwareError: a link over which ranks talk has no bandwidth, or none above 0.
        """
        names = {host.name: number for number, host in enumerate(inventory.hosts)}
        devices = [device for stage in plan.stages for device in stage.devices]
        if strange := [device for device in devices if device.split("/")[0] not in names]:
            raise PlanError(
                f"the plan's {strange[0]} is on no host of the hardware ({', '.join(names)})",
                remedy="choose the hardware that the plan was made for, or search for a new one",
            )
        hosts = tuple(names[device.split("/")[0]] for device in devices)
        talk = _hosts_that_talk(plan, hosts)
        inside = tuple(
            _usable(host.link, f"host {host.name}") if number in talk else INSTANT
            for number, host in enumerate(inventory.hosts)
        )
        if len(set(hosts)) < 2:
            return cls(hosts=hosts, inside=inside)
        between = _usable(inventory.link, "the inventory")
        return cls(hosts=hosts, inside=inside, between=between)

    def ports(self, source: int, target: int) -> tuple[int, ...]:
        """Those that a message from one rank to another runs through."""
        here, there = self.hosts[source], self.hosts[target]
        if here == there:
            found = 2 * source, 2 * target + 1
        else:
            cards = 2 * len(self.hosts)
            found = cards + 2 * here, cards + 2 * there + 1
        speeds = self.bytes_per_s
        return () if speeds[found[0]] == speeds[found[1]] == float("inf") else found

    def latency_s(self, source: int, target: int) -> float:
        """From the last byte that one rank sends to its arrival at another."""
        here, there = self.hosts[source], self.hosts[target]
        return self.inside[here].latency_s if here == there else self.between.latency_s


def _hosts_that_talk(plan: Plan, hosts: Sequence[int]) -> set[int]:
    """Hosts inside which ranks talk: replicas of a stage, or ranks that a minibatch passes between.

    Args:
        plan: the stages and their ranks.
        hosts: of each rank.
    """
    found: set[int] = set()
    for stage in range(plan.num_stages):
        of_stage = Counter(hosts[rank] for rank in plan.ranks_of(stage))
        found.update(host for host, ranks in of_stage.items() if ranks > 1)
    of_stages = [{hosts[rank] for rank in plan.ranks_of(s)} for s in range(plan.num_stages)]
    for stage, (upper, lower) in enumerate(pairwise(of_stages)):
        if upper & lower:
            pairs = plan.peers(stage, stage + 1)
            found.update(hosts[here] for here, there in pairs if hosts[here] == hosts[there])
    return found


def _usable(link: Link | None, where: str) -> Link:
    if link is None:
        raise HardwareError(
            f"the link of {where} has no bandwidth",
            remedy="write link: {bytes_per_s: ...} there, as task=bandwidth measures it",
        )
    if not 0 < link.bytes_per_s < float("inf") or not 0 <= link.latency_s < float("inf"):
        raise HardwareError(
            f"the link of {where} has {link.bytes_per_s} bytes a second and "
            f"{link.latency_s} seconds of latency",
            remedy="give the bandwidth as a number above 0, and the latency as one from 0 on",
        )
    return link
