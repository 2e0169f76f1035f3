"""Which rank has which domains: pure arithmetic."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from sparsepipe.errors import ConfigError

Roles = Literal["equal", "separate"]
"""Who computes the losses: every rank, or a separate one as in Tsaris and Hinkle's Multi-DSN."""


@dataclass(frozen=True, slots=True)
class Placement:
    """Assignment of domains to ranks, in the order of the domains.

    With at most as many ranks as domains, the domains are spread evenly over the ranks. With more
    ranks, the ranks are spread evenly over the domains: a domain's replicas share its samples.

    Args:
        domains: names, the source first.
        ranks: number of processes.
        roles: ``separate``: the last rank has no domain, but computes the losses of all.
    """

    domains: tuple[str, ...]
    ranks: int
    roles: Roles = "equal"

    def __post_init__(self) -> None:
        if self.encoders < 1:
            raise ConfigError(
                f"ranks={self.ranks} leaves no rank for the domains, since the last one computes "
                "the losses",
                remedy="set parallel.devices to at least 2, or parallel.roles=equal",
            )

    @property
    def encoders(self) -> int:
        """Number of ranks that have domains; they are the first ones."""
        return self.ranks - (self.roles == "separate")

    @property
    def loss_rank(self) -> int | None:
        """The rank that computes the losses; None: all do."""
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
        """Returns a rank's index among the replicas of its domain, and their number."""
        domains = self.domains_of(rank)
        ranks = self.ranks_of(domains[0]) if domains else (rank,)
        return ranks.index(rank), len(ranks)


def sent_numbers(
    placement: Placement, rank: int, *, samples: Sequence[int], code: int, target: int
) -> int:
    """Returns how many floating-point numbers a rank sends to others for a minibatch's losses.

    Where all ranks compute the losses, each sends both codes and the reconstruction error of its
    samples to all others, and nothing in the backward pass. Where one rank does, the others send it
    codes and the samples to reconstruct, and it sends back the gradients of the codes; the few
    values of the losses are not counted.

    Args:
        placement: which ranks have which domains.
        rank: the rank that sends.
        samples: number of samples of each rank.
        code: number of values of a code.
        target: number of values to reconstruct of a sample.
    """
    if placement.loss_rank is None:
        return samples[rank] * (2 * code + 1) * (placement.ranks - 1)
    if rank != placement.loss_rank:
        return samples[rank] * (2 * code + target)
    return sum(samples[:-1]) * 2 * code
