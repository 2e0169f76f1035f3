"""How ranks communicate, in training as in a simulation.

The replicas of a stage sum their gradients in the order of their ranks, in one of two ways that
give the same bits. *Direct*: each rank sums one part of the vector and sends the sum to all others.
*Chain*: partial sums go from rank to rank, each rank adds its own addend, and the sums come back
the same way, chunk after chunk, so that neighbours send each other the whole vector once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from itertools import pairwise
from typing import Literal

Way = Literal["direct", "chain"]

CHUNK_BYTES = 2**20
"""Size of the chunks that go through a chain; a vector up to this size is one chunk.

A sum of 64 MiB over hosts of 4 and 3 ranks, joined at 125 MB/s, took 586 to 592 ms with chunks of
512 KiB to 2 MiB, 979 ms with 64 KiB and 634 ms with 4 MiB (benchmarks/ordered_sum.py --only link
--chunk-kib, two idle cores).
"""

HOP_BYTES = 2**17
"""Cost of one more hop, in bytes that the link between hosts would move in the same time, about
1 ms at 125 MB/s: a part must arrive, wake the rank, be added or copied, and be sent again, even
between ranks of one host. With this value chains are chosen above 0.9, 3.8 and 4.5 MiB; they were
measured to be better above about 0.7, 2 and 3 MiB (hosts of 4 and 3, 2 and 1, and 2, 2 and 2 ranks;
benchmarks/ordered_sum.py --only link --mib)."""


def way_of(hosts: Sequence[Hashable], num_bytes: float) -> Way:
    """The faster way to sum a vector, as far as hosts and size determine it.

    A chain sends less between hosts if ranks of the same host are neighbours, but its chunks make
    many hops one after another, which only pays for large vectors: a chain is better above a
    certain size, or never. Speeds of links do not count, so that all ranks and the simulator make
    the same choice without measurements. If both ways take equally long, it is ``direct``.

    Args:
        hosts: the host of each rank, in the order of ranks.
        num_bytes: size of the vector.
    """
    if len(set(hosts)) < 2:
        return "direct"
    return "chain" if chain_cost(hosts, num_bytes) < direct_cost(hosts, num_bytes) else "direct"


def direct_cost(hosts: Sequence[Hashable], num_bytes: float) -> float:
    """Cost of a direct sum in bytes: those the busiest host sends, plus two :data:`HOP_BYTES`."""
    return direct_load(hosts) * num_bytes + 2 * HOP_BYTES


def chain_cost(hosts: Sequence[Hashable], num_bytes: float) -> float:
    """Cost of a sum through a chain in bytes, comparable to :func:`direct_cost`.

    It consists of the bytes that the busiest host sends, of one chunk for each other transfer
    between hosts, up and down the chain, and of the cost of all hops.
    """
    crossings = 2 * sum(here != there for here, there in pairwise(hosts))
    load = chain_load(hosts)
    chunk = min(num_bytes, CHUNK_BYTES)
    hops = 2 * (len(hosts) - 1)
    return load * num_bytes + (crossings - load) * chunk + hops * HOP_BYTES


def direct_load(hosts: Sequence[Hashable]) -> float:
    """Bytes that the busiest host sends (it receives as many), as a multiple of the vector's."""
    m = len(hosts)
    return max(2 * n * (m - n) / m for n in Counter(hosts).values())


def chain_load(hosts: Sequence[Hashable]) -> int:
    """Bytes that the busiest host of a chain sends to others, as a multiple of the vector's."""
    crossing = Counter(
        host for here, there in pairwise(hosts) if here != there for host in (here, there)
    )
    return max(crossing.values(), default=0)


INBOX_DEPTH = 1
"""Largest number of messages of one kind that a rank holds from one peer. The peer sends the next
only once one is used, so that a rank's memory does not depend on how far its peers are ahead."""
