"""How messages and sums go over the network: waiting lines, and which bytes a sum moves."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from sparsepipe.errors import ConfigError
from sparsepipe.schedule.inbox import INBOX_DEPTH
from sparsepipe.schedule.sums import CHUNK_BYTES, way_of
from sparsepipe.simulate.network import Network

Algorithm = Literal["ring", "direct", "chain", "ordered"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sends:
    """How a rank hands messages over. Every pair of ranks has a line for each direction's cargo.

    Args:
        outbox: messages that wait in a line beside the one on its way before the sender waits;
            None: as many as there are. 0: the sender waits until its message has come.
        inbox: messages that lie at the receiver before it asks for them; None: as many as come.
            0: a message begins its way when the receiver waits for it. With both 0, sending is a
            rendezvous.

    Raises:
        ConfigError: a negative number.
    """

    outbox: int | None = None
    inbox: int | None = None

    def __post_init__(self) -> None:
        for name in ("outbox", "inbox"):
            if (value := getattr(self, name)) is not None and value < 0:
                raise ConfigError(
                    f"{name}={value} messages",
                    remedy="give a number from 0 on, or null for no limit",
                )


AS_IN_TRAINING = Sends(inbox=INBOX_DEPTH)
"""A message begins its way when the receiver has taken the one before it. A sender has room for all
that a stage can have under way."""


@dataclass(frozen=True, slots=True)
class Leg:
    """A part of a sum that moves at the same time as others.

    Args:
        ports: that it runs through.
        num_bytes: that it moves.
    """

    ports: tuple[int, ...]
    num_bytes: float


def reduction_legs(
    network: Network, ranks: Sequence[int], num_bytes: float, algorithm: Algorithm
) -> tuple[list[list[Leg]], float]:
    """What a sum over ranks moves: phases one after another, and the seconds of latency in all.

    ``ring`` (Patarasuk and Yuan, 2009; gloo's and NCCL's for large vectors): every rank sends
    2 (m - 1) / m of the vector to the next, in parts of an m-th. ``direct``: every rank sends an
    m-th to each other one, adds what it got, and sends the sum to each other one. ``chain``: every
    two neighbours send each other the vector at the same time, in chunks that follow one another.
    ``ordered``: as the replicas of the pipeline do, ``chain`` or ``direct`` by their hosts and the
    vector's size.

    Args:
        network: that they talk over.
        ranks: who sums, in the order of the ring or chain.
        num_bytes: of the vector.
        algorithm: which of these.

    Raises:
        ConfigError: there is no such algorithm.
    """
    m = len(ranks)
    if m == 1 or not num_bytes:
        return [], 0.0
    if algorithm == "ordered":
        algorithm = way_of([network.hosts[rank] for rank in ranks], num_bytes)
    if algorithm == "ring":
        pairs = _ring(ranks)
        latency_s = 2 * (m - 1) * max(network.latency_s(*pair) for pair in pairs)
        share = 2 * (m - 1) / m * num_bytes
        return [[Leg(network.ports(*pair), share) for pair in pairs]], latency_s
    if algorithm == "direct":
        return _direct(network, ranks, num_bytes)
    if algorithm == "chain":
        return _chain(network, ranks, num_bytes)
    raise ConfigError(
        f"there is no all-reduce called {algorithm!r}",
        remedy="use ring, direct, chain or ordered",
    )


def _direct(
    network: Network, ranks: Sequence[int], num_bytes: float
) -> tuple[list[list[Leg]], float]:
    """Parts to whoever adds them up, then sums to all."""
    by_host: dict[int, list[int]] = {}
    for rank in ranks:
        by_host.setdefault(network.hosts[rank], []).append(rank)
    apart = [network.between.latency_s] if len(by_host) > 1 else []
    inside = [network.inside[h].latency_s for h, mine in by_host.items() if len(mine) > 1]
    phase = _direct_phase(network, by_host, num_bytes / len(ranks))
    return [phase, phase], 2 * max(apart + inside)


def _chain(
    network: Network, ranks: Sequence[int], num_bytes: float
) -> tuple[list[list[Leg]], float]:
    """All neighbours at once, and what the first chunk's way up and down the chain takes beside.

    From the first chunk to the last the busiest port has always something to send. So a sum takes
    its time for the whole vector, and what the way of one chunk takes elsewhere. A rank hands on
    what it got at once: what a hop costs beside bytes and latency, which :func:`way_of` counts, is
    left out.
    """
    ways = [way for pair in pairwise(ranks) for way in (pair, pair[::-1])]
    legs = [Leg(network.ports(*way), num_bytes) for way in ways]
    speeds = network.bytes_per_s
    through = Counter(port for leg in legs for port in leg.ports)
    busiest = max((number / speeds[port] for port, number in through.items()), default=0.0)
    once = sum(1 / min(speeds[port] for port in leg.ports) for leg in legs if leg.ports)
    chunk = min(num_bytes, CHUNK_BYTES)
    return [legs], chunk * (once - busiest) + sum(network.latency_s(*each) for each in ways)


def _direct_phase(
    network: Network, by_host: Mapping[int, Sequence[int]], part_bytes: float
) -> list[Leg]:
    """A part from each rank to each other one; pairs that share all their ports are one leg.

    Args:
        network: that they talk over.
        by_host: the ranks of each host.
        part_bytes: of each part.
    """
    legs: Counter[tuple[int, ...]] = Counter()
    for here, mine in by_host.items():
        for a, b in _ring(mine) if len(mine) > 1 else ():
            legs[network.ports(a, b)] += len(mine) - 1  # all that a sends here, and b gets
        for there, others in by_host.items():
            if here != there:
                legs[network.ports(mine[0], others[0])] += len(mine) * len(others)
    return [Leg(ports, number * part_bytes) for ports, number in legs.items()]


def _ring(ranks: Sequence[int]) -> list[tuple[int, int]]:
    return list(zip(ranks, [*ranks[1:], ranks[0]], strict=True))
