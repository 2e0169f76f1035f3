"""Sums of gradients over a stage's replicas: whole, or in buckets during the backward."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

from sparsepipe.errors import PlanError
from sparsepipe.simulate.flows import Events, Flow, Flows
from sparsepipe.simulate.network import Algorithm, Leg, Network, reduction_legs
from sparsepipe.simulate.workload import StageCosts

Summed = Callable[[int, int, float, float], None]
"""Called with each sum: its round, its part, when it began, and bytes of each replica's part."""


def buckets(parameter_bytes: Sequence[float], bucket_bytes: float) -> list[tuple[int, float]]:
    """How gradients are put together for sums while the backward runs, as DDP does it.

    A bucket takes layers in the order of the backward until it holds so many bytes. DDP has a
    smaller first one only where no size is given.

    Returns:
        Of each bucket the number of its last layer, and its bytes.
    """
    found: list[tuple[int, float]] = []
    held = 0.0
    for number, size in enumerate(parameter_bytes):
        held += size
        if held >= bucket_bytes:
            found.append((number, held))
            held = 0.0
    if held:
        found.append((len(parameter_bytes) - 1, held))
    return found


@dataclass(slots=True)
class _Coming:
    """Replicas that come to a round of sums.

    Attributes:
        ranks: those whose times of arrival are known.
        last_s: of each part, when the last of these comes.
    """

    ranks: set[int]
    last_s: list[float]


class Sums:
    """Sums of one stage, one after another: a part begins when all replicas have come to it.

    Args:
        bucket_bytes: see :func:`buckets`; None: all in one part, with the update.
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
        self._sizes = [costs.parameter_bytes]
        self._early: list[list[float]] | None = None  # seconds into the backward, by rank
        if bucket_bytes is not None:
            parts = _parts(costs, bucket_bytes)
            self._sizes = [size for _, size in parts]
            self._early = _ends_s(costs.layers_backward_s, [last for last, _ in parts])
        self._legs: list[list[list[Flow]]] = []  # of each part and phase
        self._latencies_s: list[float] = []  # of each part
        for size in self._sizes:
            phases, latency_s = reduction_legs(network, ranks, size, algorithm)
            self._legs.append([self._ways(legs) for legs in phases])
            self._latencies_s.append(latency_s)
        self._coming: dict[int, _Coming] = {}  # by round, of those that are not over
        self._round = 0  # under way
        self._part = 0  # the same
        self._moving = False
        self._began_s = 0.0  # when what moves did so
        self._phase = 0  # of what moves; after the last one only the latency is left
        self._left = 0  # legs of that phase that are under way
        self._due_s = 0.0  # when the latency is over

    def _ways(self, legs: Sequence[Leg]) -> list[Flow]:
        way, done = self._flows.way, self._moved
        return [way(leg.ports, leg.num_bytes, done=done, is_predicted=True) for leg in legs]

    def backward_begins(self, rank: int, minibatch: int) -> None:
        """A replica begins a backward: its gradients will come one after another."""
        if self._early is not None:
            begins_s = self._events.now_s
            after_s = self._early[rank - self._ranks.start]
            self._come(rank, minibatch // len(self._ranks), [begins_s + s for s in after_s])

    def reached(self, rank: int, number: int) -> bool:
        """A replica has come to an update; whether the sum is there. If not, it is woken later."""
        if number < self._round:
            return True
        # Also without a minibatch in the last round.
        self._come(rank, number, [self._events.now_s] * len(self._sizes))
        return False

    def _come(self, rank: int, number: int, comes_s: list[float]) -> None:
        """It is known when a replica comes to each part of a round."""
        coming = self._coming.setdefault(number, _Coming(set(), comes_s))
        if rank not in coming.ranks:
            coming.ranks.add(rank)
            coming.last_s = list(map(max, coming.last_s, comes_s))
            self._begin()

    def _begin(self, nothing: None = None) -> None:
        """Begins the next part, if all replicas have come to it; or when they will have."""
        coming = self._coming.get(self._round)
        if self._moving or coming is None or len(coming.ranks) < len(self._ranks):
            return
        now_s, last_s = self._events.now_s, coming.last_s[self._part]
        if last_s > now_s:
            self._events.at(last_s, self._begin, None)
            return
        self._moving, self._began_s, self._phase = True, now_s, 0
        self._move()

    def _move(self) -> None:
        """Begins a phase, or waits for the latency after the last one."""
        phases = self._legs[self._part]
        if self._phase == len(phases):
            self._due_s = self._events.now_s + self._latencies_s[self._part]
            self._events.at(self._due_s, self._done, None)
            return
        legs = phases[self._phase]
        self._left = len(legs)
        for leg in legs:
            self._flows.start(leg)
        # Sharing makes none of them faster, so that this is not too late for those that come to it.
        alone_s = max((leg.end_s for leg in legs if not leg.is_shared), default=None)
        if alone_s is not None:
            self._events.at(alone_s, self._moved_alone, legs)

    def _moved_alone(self, legs: Sequence[Flow]) -> None:
        """All legs of a phase that never shared a port are through."""
        now_s = self._events.now_s
        self._moved(sum(leg.end_s <= now_s and not leg.has_event for leg in legs))

    def _moved(self, number: int = 1) -> None:
        self._left -= number
        if number and not self._left:
            self._phase += 1
            self._move()

    def _done(self, nothing: None) -> None:
        self._moving = False
        self._summed(self._round, self._part, self._began_s, self._sizes[self._part])
        self._part += 1
        if self._part == len(self._sizes):
            del self._coming[self._round]
            self._round, self._part = self._round + 1, 0
            for rank in self._ranks:
                self._wake(rank)
        self._begin()

    def state(self, first: int, horizon_s: float) -> tuple[tuple[object, ...], list[float]]:
        """Which replicas have come to which sum, and when transfers under way will end.

        Arrivals of gradients of a backward under way are left out: its end determines them.
        """
        coming = tuple(
            (number - first, tuple(sorted(each.ranks)))
            for number, each in sorted(self._coming.items())
        )
        place = (self._round - first, self._part, self._moving, coming)
        if not self._moving:
            return place, []
        phases = self._legs[self._part]
        if self._phase == len(phases):
            return (*place, self._phase), [self._due_s]
        legs = [(k, leg) for k, leg in enumerate(phases[self._phase]) if leg.end_s > horizon_s]
        under_way = tuple(k for k, _ in legs)
        return (*place, self._phase, under_way), [leg.end_s for _, leg in legs]


def _parts(costs: StageCosts, bucket_bytes: float) -> list[tuple[int, float]]:
    """The buckets of a stage."""
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
    """Seconds into each rank's backward at which the layers ``ends`` are done."""
    found: dict[tuple[float, ...], list[float]] = {}  # many ranks are alike
    for times_s in layers_s:
        key = tuple(times_s)
        if key not in found:
            sums_s = list(accumulate(key))
            found[key] = [sums_s[end] for end in ends]
    return [found[tuple(times_s)] for times_s in layers_s]
