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

CHUNK_BYTES = 2**20
"""What goes through a chain together; vectors up to this size go whole. With 4 and 3 ranks and a
link of 125 MB/s, on a loaded machine of two cores, chunks of 64 KiB took two to three times as long
for 16 and 64 MiB; those of 512 KiB to 2 MiB differed by less than one run from the next
(benchmarks/ordered_sum.py --only link --chunk-kib)."""


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
