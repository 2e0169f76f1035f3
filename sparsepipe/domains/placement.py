"""Which rank has which domains: pure arithmetic."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from sparsepipe.errors import ConfigError

Roles = Literal["equal", "separate"]
"""Every rank computes the losses; or a rank of its own, as in Tsaris and Hinkle's Multi-DSN."""


@dataclass(frozen=True, slots=True)
class Placement:
    """Domains on ranks, in the order of the domains.

    With no more ranks than domains each rank has as many domains as the others, up to one. With
    more, each domain has replicas, as many as the others up to one, which share its samples.

    Args:
        domains: names, the source first.
        ranks: number of processes.
        roles: ``separate``: the last rank has no domain, but decoder, head and losses of all.
    """

    domains: tuple[str, ...]
    ranks: int
    roles: Roles = "equal"

    def __post_init__(self) -> None:
        if self.encoders < 1:
            raise ConfigError(
                f"{self.ranks} ranks, of which the last one computes the losses, leave none for "
                "the domains",
                remedy="set parallel.devices to at least 2, or parallel.roles=equal",
            )

    @property
    def encoders(self) -> int:
        """How many ranks have domains; they are the first ones."""
        return self.ranks - (self.roles == "separate")

    @property
    def loss_rank(self) -> int | None:
        """The rank that computes the losses; None: all do."""
        return self.ranks - 1 if self.roles == "separate" else None

    def domains_of(self, rank: int) -> tuple[str, ...]:
        """The domains that a rank has."""
        count, encoders = len(self.domains), self.encoders
        if rank >= encoders:
            return ()
        if encoders >= count:
            # The inverse of ranks_of: the last domain that begins at this rank or before it.
            return (self.domains[((rank + 1) * count - 1) // encoders],)
        return self.domains[rank * count // encoders : (rank + 1) * count // encoders]

    def ranks_of(self, domain: str) -> tuple[int, ...]:
        """The ranks that have a domain, which are next to each other."""
        return tuple(rank for rank in range(self.encoders) if domain in self.domains_of(rank))

    def replica(self, rank: int) -> tuple[int, int]:
        """Which of its domains' replicas a rank is, and how many there are."""
        domains = self.domains_of(rank)
        ranks = self.ranks_of(domains[0]) if domains else (rank,)
        return ranks.index(rank), len(ranks)


def sent_numbers(
    placement: Placement, rank: int, *, samples: Sequence[int], code: int, target: int
) -> int:
    """Floating-point numbers that a rank sends to others for the losses of a minibatch.

    Where all ranks compute the losses, each sends both codes and the reconstruction error of its
    samples to all others, and nothing in the backward pass. Where one rank does, the others send it
    codes and what is to be reconstructed, and it sends back the gradients of the codes, and the
    losses.

    Args:
        placement: which ranks have which domains.
        rank: the one that sends.
        samples: of each rank.
        code: numbers of a code.
        target: numbers of what is reconstructed of a sample.
    """
    if placement.loss_rank is None:
        return samples[rank] * (2 * code + 1) * (placement.ranks - 1)
    if rank != placement.loss_rank:
        return samples[rank] * (2 * code + target)
    return sum(samples[:-1]) * 2 * code
