"""The events of a simulated run."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from sparsepipe.schedule import Plan, Span

Cargo = Literal["activation", "gradient"]


@dataclass(frozen=True, slots=True)
class Transfer:
    """A message between two ranks.

    Attributes:
        number: of the minibatch.
        microbatch: part of it, where it has parts.
        start_s: when its first byte leaves.
        end_s: when its last byte has come.
    """

    cargo: Cargo
    source: int
    target: int
    number: int
    microbatch: int | None
    start_s: float
    end_s: float
    num_bytes: float


@dataclass(frozen=True, slots=True)
class Reduction:
    """A sum of gradients over the replicas of a stage.

    Attributes:
        round: number of the update that it is for.
        part: of the gradients, where they are summed in parts; from 0.
        start_s: when all replicas have come to it.
        end_s: when all have the sum.
        num_bytes: of each replica's gradients.
    """

    stage: int
    round: int
    part: int
    start_s: float
    end_s: float
    num_bytes: float


@dataclass(slots=True, kw_only=True)
class Record:
    """A run in time.

    Attributes:
        minibatches: that were run.
        end_s: when the last rank had done its last action.
        busy_s: of each rank, spent in forwards, backwards and updates.
        returns_s: of each minibatch, when its last backward in stage 0 ended.
        spans: what ranks computed, rank by rank and in order; empty where it is not recorded.
        transfers: in the order of their ends; the same.
        reductions: in the order of their ends; the same.
    """

    plan: Plan
    minibatches: int
    end_s: float = 0.0
    busy_s: list[float] = field(default_factory=list)
    returns_s: list[float] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    transfers: list[Transfer] = field(default_factory=list)
    reductions: list[Reduction] = field(default_factory=list)
