"""Which rank has which domains: pure arithmetic."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from sparsepipe.errors import ConfigError

Roles = Literal["equal", "separate"]
"""Which rank computes the losses: each, or a separate one as in Tsaris and Hinkle's Multi-DSN."""


@dataclass(frozen=True, slots=True)
class Placement:
    """Assignment of domains to ranks (or grids of ranks), both in order.

    With at most as many ranks as domains, the domains are spread evenly over the ranks. With more,
    the ranks are spread evenly over the domains: a domain's replicas share its samples.

    Args:
        domains: names of the domains, the source first.
        ranks: number of ranks, or of grids.
        roles: ``equal``: each rank computes the losses; ``separate``: the last, without domains.
    """

    domains: tuple[str, ...]
    ranks: int
    roles: Roles = "equal"

    def __post_init__(self) -> None:
        if self.encoders < 1:
            raise ConfigError(
                f"the number of ranks, or grids, is {self.ranks}, which leaves none for domains: "
                "with roles=separate the last one only computes the losses",
                remedy="use at least two devices (or grids), or set parallel.roles=equal",
            )

    @property
    def encoders(self) -> int:
        """Number of ranks that have domains; they come first."""
        return self.ranks - (self.roles == "separate")

    @property
    def loss_rank(self) -> int | None:
        """The rank that computes the losses; None if every rank does."""
        return self.ranks - 1 if self.roles == "separate" else None

    def domains_of(self, rank: int) -> tuple[str, ...]:
        """Returns the domains that a rank has."""
        count, encoders = len(self.domains), self.encoders
        if rank >= encoders:
            return ()
        if encoders >= count:
            # The inverse of ranks_of: the last domain that begins at this rank or before it.
            return (self.domains[((rank + 1) * count - 1) // encoders],)
        return self.domains[rank * count // encoders : (rank + 1) * count // encoders]

    def ranks_of(self, domain: str) -> tuple[int, ...]:
        """Returns the ranks that have a domain, which are consecutive."""
        return tuple(rank for rank in range(self.encoders) if domain in self.domains_of(rank))

    def replica(self, rank: int) -> tuple[int, int]:
        """Returns a rank's index among its domain's replicas, and their number; (0, 1) if alone."""
        domains = self.domains_of(rank)
        ranks = self.ranks_of(domains[0]) if domains else (rank,)
        return ranks.index(rank), len(ranks)


def sent_numbers(
    placement: Placement, rank: int, *, samples: Sequence[int], code: int, target: int
) -> int:
    """Returns how many floating-point numbers a rank sends to others for a minibatch's losses.

    If all ranks compute the losses, each sends the shared and the private code and the
    reconstruction error of its samples to all others, and nothing in the backward pass. If one rank
    does, the others send it codes and the samples to reconstruct, and it sends back the gradients
    of the codes; the few values of the losses are not counted.

    Args:
        placement: which ranks have which domains.
        rank: the rank that sends.
        samples: number of samples of each rank; 0 for one that only computes the losses.
        code: number of values in a code.
        target: number of values in a sample to reconstruct.
    """
    if placement.loss_rank is None:
        return samples[rank] * (2 * code + 1) * (placement.ranks - 1)
    if rank != placement.loss_rank:
        return samples[rank] * (2 * code + target)
    return sum(samples[:-1]) * 2 * code
