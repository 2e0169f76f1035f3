"""How ranks communicate, in training as in a simulation.

The replicas of a stage sum their gradients in the order of their ranks, in one of two ways that
give the same bits. *Direct*: each rank adds one part of the vector and hands it to all others.
*Chain*: partial sums go from rank to rank, each of which adds its own addend, and the sums come
back the same way, chunk after chunk, so that neighbours send each other the whole vector once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from itertools import pairwise
from typing import Literal

Way = Literal["direct", "chain"]

CHUNK_BYTES = 2**20
"""Bytes that go through a chain together; vectors up to this size go whole.

A sum of 64 MiB over 4 and 3 ranks, joined at 125 MB/s, took 586 to 592 ms with chunks of 512 KiB to
2 MiB, 979 ms with 64 KiB and 634 ms with 4 MiB (benchmarks/ordered_sum.py --only link --chunk-kib,
two quiet cores).
"""

HOP_BYTES = 2**17
"""Cost of one more hop, as bytes of the link between hosts: a part must come, be seen by a rank
that may have slept, be added to or copied, and set out again, also where both ranks are on one
host. 1 ms of a link of 125 MB/s: with it chains are taken from 0.9, 3.8 and 4.5 MiB on where they
were found to be better from about 0.7, 2 and 3 on (4 and 3, 2 and 1, and 2, 2 and 2 ranks on hosts;
benchmarks/ordered_sum.py --only link --mib)."""


def way_of(hosts: Sequence[Hashable], num_bytes: float) -> Way:
    """The faster way of a sum, as far as hosts and size determine it.

    A chain sends less between hosts where those of a host are neighbours, but its parts make many
    hops one after another, and only large vectors make up for that: there is one size above which
    it is better, or none. Speeds of links are left out, so that all ranks and the simulator
    choose alike without measuring any.

    Args:
        hosts: of each rank, in their order.
        num_bytes: of the vector.

    Returns:
        ``direct`` where both take as long: two ranks, or one host.
    """
    if len(set(hosts)) < 2:
        return "direct"
    return "chain" if chain_cost(hosts, num_bytes) < direct_cost(hosts, num_bytes) else "direct"


def direct_cost(hosts: Sequence[Hashable], num_bytes: float) -> float:
    """Cost of a direct sum, as bytes of a link: the busiest host's, and two hops."""
    return direct_load(hosts) * num_bytes + 2 * HOP_BYTES


def chain_cost(hosts: Sequence[Hashable], num_bytes: float) -> float:
    """Cost of a chain, as bytes of a link between hosts.

    From the first chunk to the last the busiest host's link has always something to send; beside
    that counts a chunk's way up the chain and down again, over links that carry nothing else then.
    """
    crossings = 2 * sum(here != there for here, there in pairwise(hosts))
    load = chain_load(hosts)
    chunk = min(num_bytes, CHUNK_BYTES)
    hops = 2 * (len(hosts) - 1)
    return load * num_bytes + (crossings - load) * chunk + hops * HOP_BYTES


def direct_load(hosts: Sequence[Hashable]) -> float:
    """Vectors that the busiest host sends to others, which is what it gets as well."""
    m = len(hosts)
    return max(2 * n * (m - n) / m for n in Counter(hosts).values())


def chain_load(hosts: Sequence[Hashable]) -> int:
    """Vectors that the busiest host of a chain sends to others, and gets."""
    crossing = Counter(
        host for here, there in pairwise(hosts) if here != there for host in (here, there)
    )
    return max(crossing.values(), default=0)


INBOX_DEPTH = 1
"""Messages of one kind from one rank that lie ready before the receiver takes them. The next one is
not begun until this one is taken, so that a rank's memory does not depend on how far its peers are
ahead."""
