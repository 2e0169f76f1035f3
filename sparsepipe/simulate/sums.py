"""When the replicas of a stage have summed their gradients: whole, or in buckets meanwhile."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from itertools import accumulate

from sparsepipe.errors import PlanError
from sparsepipe.simulate.events import Events
from sparsepipe.simulate.flows import Flow, Flows
from sparsepipe.simulate.links import Algorithm, Leg, reduction_legs
from sparsepipe.simulate.network import Network
from sparsepipe.simulate.workload import StageCosts

FIRST_BUCKET_BYTES = 2.0**20
"""DDP's first bucket, which is small so that the sums begin early."""

Summed = Callable[[int, int, float, float], None]
"""Told of each sum: its round, its part, when it began, and bytes of each replica's part."""


def buckets(parameter_bytes: Sequence[float], bucket_bytes: float) -> list[tuple[int, float]]:
    """How gradients are put together for sums while the backward runs, as DDP does it.

    A bucket takes layers in the order of the backward until it holds so many bytes; the first
    one takes a MiB at most.

    Args:
        parameter_bytes: of each layer, in the order of the backward.
        bucket_bytes: that fill a bucket.

    Returns:
        Of each bucket the number of its last layer, and its bytes.
    """
    found: list[tuple[int, float]] = []
    held = 0.0
    for number, size in enumerate(parameter_bytes):
        held += size
        if held >= (bucket_bytes if found else min(bucket_bytes, FIRST_BUCKET_BYTES)):
            found.append((number, held))
            held = 0.0
    if held:
        found.append((len(parameter_bytes) - 1, held))
    return found


class Sums:
    """Sums of one stage, one after another: a part begins when all replicas have come to it.

    Args:
        events: in which they end.
        flows: that carry them.
        network: that replicas talk over.
        costs: of the stage.
        ranks: that hold it.
        algorithm: of each sum.
        bucket_bytes: see :func:`buckets`; None: all in one part, with the update. So replicas
            without parameters meet in any case.
        summed: see :data:`Summed`.
        wake: called with a rank whose update may begin.

    Raises:
        PlanError: it is not known what sums in buckets need of the stage's layers.
    """

    def __init__(
        self,
        events: Events,
        flows: Flows,
        network: Network,
        costs: StageCosts,
        ranks: range,
        *,
        algorithm: Algorithm,
        bucket_bytes: float | None,
        summed: Summed,
        wake: Callable[[int], None],
    ) -> None:
        self._events, self._flows, self._ranks = events, flows, ranks
        self._summed, self._wake = summed, wake
        self._sizes = [costs.parameter_bytes] if len(ranks) > 1 else []
        self._early: list[list[float]] | None = None  # seconds into the backward, by rank
        if bucket_bytes is not None and self._sizes and costs.parameter_bytes:
            parts = _parts(costs, bucket_bytes)
            self._sizes = [size for _, size in parts]
            self._early = _ends_s(costs.layers_backward_s, [last for last, _ in parts])
        self._plans = [reduction_legs(network, ranks, size, algorithm) for size in self._sizes]
        self._came: dict[tuple[int, int], set[int]] = defaultdict(set)
        self._round = 0  # under way
        self._part = 0  # the same
        self._moving = False
        self._phases = 0  # that are left of what moves, the one under way among them
        self._legs: list[Flow] = []  # of that phase
        self._due_s = 0.0  # when that is over

    def backward_begins(self, rank: int, minibatch: int) -> None:
        """A replica begins a backward: its gradients come one after another."""
        if self._early is None:
            return
        number = minibatch // len(self._ranks)
        for part, after_s in enumerate(self._early[rank - self._ranks.start]):
            self._events.at(self._events.now_s + after_s, self._has, (rank, number, part))

    def reached(self, rank: int, number: int) -> bool:
        """A replica has come to an update; whether the sum is there. If not, it is woken later."""
        if not self._sizes or number < self._round:
            return True
        for part in range(len(self._sizes)):
            self._come(rank, number, part)  # also without a minibatch in the last round
        self._begin()
        return number < self._round

    def _has(self, what: tuple[int, int, int]) -> None:
        self._come(*what)
        self._begin()

    def _come(self, rank: int, number: int, part: int) -> None:
        if (number, part) >= (self._round, self._part + self._moving):  # else it has begun
            self._came[number, part].add(rank)

    def _begin(self) -> None:
        key = self._round, self._part
        if self._moving or len(self._came[key]) < len(self._ranks):
            return
        del self._came[key]
        self._moving = True
        phases, latency_s = self._plans[self._part]
        self._move(phases, latency_s, self._events.now_s)

    def _move(self, phases: list[list[Leg]], latency_s: float, start_s: float) -> None:
        self._phases, self._legs = len(phases), []
        if not phases:
            self._due_s = self._events.now_s + latency_s
            self._events.at(self._due_s, self._done, start_s)
            return
        legs, left = phases[0], len(phases[0])

        def moved() -> None:
            nonlocal left
            left -= 1
            if not left:
                self._move(phases[1:], latency_s, start_s)

        self._legs = [self._flows.start(leg.ports, leg.num_bytes, moved) for leg in legs]

    def _done(self, start_s: float) -> None:
        self._moving = False
        self._summed(self._round, self._part, start_s, self._sizes[self._part])
        self._part += 1
        if self._part == len(self._sizes):
            self._round, self._part = self._round + 1, 0
            for rank in self._ranks:
                self._wake(rank)
        self._begin()

    def standing(self, first: int) -> tuple[tuple[object, ...], list[float]]:
        """Who has come to which sum, and when what moves will have come.

        Gradients that a backward under way will have are no part of it: when it began says all.

        Args:
            first: the round from which others are counted.
        """
        if not self._sizes:
            return (), []
        came = tuple(
            (number - first, part, tuple(sorted(ranks)))
            for (number, part), ranks in sorted(self._came.items())
            if ranks
        )
        place = (self._round - first, self._part, self._moving, came)
        if not self._moving:
            return place, []
        if not self._phases:  # only the latency is left
            return (*place, 0), [self._due_s]
        left = tuple(k for k, leg in enumerate(self._legs) if not leg.is_done)
        return (*place, self._phases, left), [self._legs[k].end_s for k in left]


def _parts(costs: StageCosts, bucket_bytes: float) -> list[tuple[int, float]]:
    """The buckets of a stage.

    Raises:
        PlanError: its layers' costs are missing, or are not the stage's.
    """
    sizes, ranks = costs.layers_parameter_bytes, len(costs.backward_s)
    if [len(own_s) for own_s in costs.layers_backward_s] != [len(sizes)] * ranks:
        raise PlanError(
            f"sums of {ranks} replicas that overlap with the backward need the bytes and the "
            f"seconds of each layer; bytes are given of {len(sizes)} layers, seconds of "
            f"{[len(own_s) for own_s in costs.layers_backward_s]}",
            remedy="give layers_parameter_bytes, and layers_backward_s of each replica; or no "
            "bucket_bytes, for sums after the backward",
        )
    if not math.isclose(sum(sizes), costs.parameter_bytes, rel_tol=1e-6):
        raise PlanError(
            f"the layers of a stage have {sum(sizes):g} bytes of parameters, the stage "
            f"{costs.parameter_bytes:g}",
            remedy="let parameter_bytes be the sum of layers_parameter_bytes; or give no "
            "bucket_bytes, for sums after the backward",
        )
    return buckets(sizes, bucket_bytes)


def _ends_s(layers_s: Sequence[Sequence[float]], ends: Sequence[int]) -> list[list[float]]:
    """Of each rank, seconds into the backward at which some layers are through.

    Args:
        layers_s: of each rank and layer.
        ends: numbers of the layers.
    """
    found: dict[tuple[float, ...], list[float]] = {}  # many ranks are alike
    for times_s in layers_s:
        key = tuple(times_s)
        if key not in found:
            sums_s = list(accumulate(key))
            found[key] = [sums_s[end] for end in ends]
    return [found[tuple(times_s)] for times_s in layers_s]
