"""How the replicas of a stage sum their gradients in the order of their ranks, on which hosts.

Two ways give the same bits. *Direct*: each rank adds one part of the vector and hands it to all
others. *Chain*: partial sums go from rank to rank, each of which adds its own addend, and the sums
come back the same way, chunk after chunk, so that neighbours send each other the whole vector once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from itertools import pairwise
from typing import Literal

Way = Literal["direct", "chain"]

_LEAST_CHUNK_BYTES = 2**16
_LARGEST_CHUNK_BYTES = 2**20
_CHUNKS = 16


def way_of(hosts: Sequence[Hashable]) -> Way:
    """The way that sends less over the busiest host's link to the others.

    Args:
        hosts: of each rank, in their order.

    Returns:
        ``direct`` where both send as much: two ranks, or one host.
    """
    return "chain" if chain_load(hosts) < direct_load(hosts) else "direct"


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


def chunk_bytes(num_bytes: int) -> int:
    """Of the chunks that follow each other through a chain.

    Args:
        num_bytes: of the vector.
    """
    return max(_LEAST_CHUNK_BYTES, min(_LARGEST_CHUNK_BYTES, -(-num_bytes // _CHUNKS)))
