"""Sums of gradients over a stage's replicas: in one part, or in buckets during the backward."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import accumulate

from sparsepipe.errors import PlanError
from sparsepipe.schedule import Span
from sparsepipe.simulate.flows import EventQueue, Flow, Flows
from sparsepipe.simulate.network import Algorithm, ClusterNetwork, reduction_legs
from sparsepipe.simulate.workload import StageCosts


def buckets(parameter_bytes: Sequence[float], bucket_bytes: float) -> list[tuple[int, float]]:
    """For each bucket of gradients, the index of its last entry in ``parameter_bytes`` (by layer,
    last layer first) and its bytes. As in DDP, it grows to at least ``bucket_bytes``.
    """
    found: list[tuple[int, float]] = []
    held = 0.0
    for number, size in enumerate(parameter_bytes):
        held += size
        if held >= bucket_bytes:
            found.append((number, held))
            held = 0.0
    return [*found, (len(parameter_bytes) - 1, held)] if held else found


class Sums:
    """A stage's sums of gradients, part by part, each once all replicas have computed that part.

    Args:
        ranks: ranks of the stage.
        algorithm: how replicas sum, as in :func:`.network.reduction_legs`.
        bucket_bytes: size of a part, as in :func:`buckets`; None: one part before the update.
        spans: list to which spans of finished parts are added; None: they are not recorded.
        wake: called with a rank whose update may begin.
    """

    def __init__(
        self,
        events: EventQueue,
        flows: Flows,
        network: ClusterNetwork,
        costs: StageCosts,
        ranks: range,
        *,
        algorithm: Algorithm,
        bucket_bytes: float | None,
        spans: list[Span] | None,
        wake: Callable[[int], None],
    ) -> None:
        self._events, self._flows, self._ranks = events, flows, ranks
        self._spans, self._wake = spans, wake
        self._sizes = [costs.parameter_bytes]
        self._early: list[list[float]] | None = None  # seconds into the backward, by rank and part
        if bucket_bytes is not None:
            layers_bytes = costs.layers_parameter_bytes
            timed = [len(own_s) for own_s in costs.layers_backward_s]
            if timed != [len(layers_bytes)] * len(ranks) or not math.isclose(
                sum(layers_bytes), costs.parameter_bytes, rel_tol=1e-6
            ):
                raise PlanError(
                    "sums that overlap with the backward pass need the bytes of each layer, which "
                    "add up to parameter_bytes, and the seconds of each layer's backward",
                    remedy="give layers_parameter_bytes and, for each replica, layers_backward_s; "
                    "or leave bucket_bytes out to sum after the backward pass",
                )
            parts = buckets(layers_bytes, bucket_bytes)
            self._sizes = [size for _, size in parts]
            ends = [list(accumulate(own_s)) for own_s in costs.layers_backward_s]
            self._early = [[own_s[last] for last, _ in parts] for own_s in ends]
        self._legs: list[list[list[Flow]]] = []  # of each part and phase
        self._latencies_s: list[float] = []  # of each part
        for size in self._sizes:
            phases, latency_s = reduction_legs(network, ranks, size, algorithm)
            route, done = flows.route, self._moved
            self._legs.append([[route(*leg, done=done) for leg in legs] for legs in phases])
            self._latencies_s.append(latency_s)
        # By unfinished round: replicas that have come, and when the last one reaches each part.
        self._coming: dict[int, tuple[set[int], list[float]]] = {}
        self._round = 0  # under way
        self._part = 0  # of that round
        self._moving = False
        self._began_s = 0.0  # when the part under way began
        self._phase = 0  # of the part under way; after the last phase only the latency is left
        self._left = 0  # legs of that phase that are under way
        self._due_s = 0.0  # when the latency is over

    def backward_begins(self, rank: int, minibatch: int) -> None:
        """Records that ``rank`` begins a backward, which computes gradients part by part."""
        if self._early is not None:
            begins_s = self._events.now_s
            after_s = self._early[rank - self._ranks.start]
            self._come(rank, minibatch // len(self._ranks), [begins_s + s for s in after_s])

    def reached(self, rank: int, number: int) -> bool:
        """Whether round ``number`` is summed; if not, ``rank`` joins the sum, to be woken later."""
        if number < self._round:
            return True
        # A replica without a minibatch in the last round takes part as well.
        self._come(rank, number, [self._events.now_s] * len(self._sizes))
        return False

    def _come(self, rank: int, number: int, comes_s: list[float]) -> None:
        ranks, last_s = self._coming.setdefault(number, (set(), [0.0] * len(comes_s)))
        if rank not in ranks:
            ranks.add(rank)
            last_s[:] = map(max, last_s, comes_s)
            self._begin_part()

    def _begin_part(self) -> None:
        """Begins the next part once all replicas have computed its gradients."""
        ranks, last_s = self._coming.get(self._round, (set(), []))
        if self._moving or len(ranks) < len(self._ranks):
            return
        if last_s[self._part] > self._events.now_s:
            self._events.at(last_s[self._part], self._begin_part)
            return
        self._moving, self._began_s, self._phase = True, self._events.now_s, 0
        self._begin_phase()

    def _begin_phase(self) -> None:
        phases = self._legs[self._part]
        if self._phase == len(phases):
            self._due_s = self._events.now_s + self._latencies_s[self._part]
            self._events.at(self._due_s, self._finish_part)
            return
        self._left = len(phases[self._phase])
        for leg in phases[self._phase]:
            self._flows.start(leg)

    def _moved(self) -> None:
        self._left -= 1
        if not self._left:
            self._phase += 1
            self._begin_phase()

    def _finish_part(self) -> None:
        self._moving = False
        if self._spans is not None:
            size, now_s = self._sizes[self._part], self._events.now_s
            what = self._ranks.start, "sum", self._round, self._part
            self._spans.append(Span(*what, start=self._began_s, end=now_s, num_bytes=size))
        self._part += 1
        if self._part == len(self._sizes):
            del self._coming[self._round]
            self._round, self._part = self._round + 1, 0
            for rank in self._ranks:
                self._wake(rank)
        self._begin_part()

    def state(self, first: int) -> tuple[tuple[object, ...], list[float]]:
        """Which replicas have joined which sum, with rounds counted from ``first``, and when the
        transfers under way will end.

        The times at which a backward completes gradients are omitted: they follow from its end.
        """
        coming = [(n - first, tuple(sorted(ranks))) for n, (ranks, _) in self._coming.items()]
        place = (self._round - first, self._part, self._moving, tuple(sorted(coming)))
        if not self._moving:
            return place, []
        phases = self._legs[self._part]
        if self._phase == len(phases):
            return (*place, self._phase), [self._due_s]
        legs = [(k, leg) for k, leg in enumerate(phases[self._phase]) if not leg.is_done]
        under_way = tuple(k for k, _ in legs)
        return (*place, self._phase, under_way), [leg.end_s for _, leg in legs]
