"""Simulates the training of a domain separation network whose domains are spread over ranks.

In a step, each rank encodes and decodes its samples, sends the codes to all other ranks, computes
the losses on the codes of all ranks, runs the backward pass, and updates its parameters once the
gradients are summed. Messages take as long as if all ranks sent at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from sparsepipe.schedule import Action, Plan, Span
from sparsepipe.simulate.engine import Record
from sparsepipe.simulate.network import Algorithm, ClusterNetwork, Leg, reduction_legs


@dataclass(frozen=True, slots=True, kw_only=True)
class RankCosts:
    """Costs of one training step on one rank.

    Args:
        encode_s: seconds of the forward pass of encoders and decoder.
        losses_s: seconds of the losses on the codes of all ranks, forward and backward.
        backward_s: seconds of the backward pass of decoder and encoders.
        update_s: seconds of the parameter update.
        sent_bytes: bytes that the rank sends to each other rank.
    """

    encode_s: float
    losses_s: float
    backward_s: float
    update_s: float
    sent_bytes: float

    @property
    def busy_s(self) -> float:
        return self.encode_s + self.losses_s + self.backward_s + self.update_s


class GradientSum(NamedTuple):
    """A sum over ``ranks``, at the end of a step, of gradients with ``num_bytes`` on each rank."""

    ranks: tuple[int, ...]
    num_bytes: float


@dataclass(frozen=True, slots=True, kw_only=True)
class DomainSteps:
    """A simulated training whose domains are spread over ranks.

    Args:
        plan: a plan of one stage with a replica for each rank.
        network: the links between the ranks.
        costs: costs of a step, by rank.
        shared: the sum of the gradients of shared parameters, over all ranks.
        private: the sums of each domain's other gradients over its ranks, which follow ``shared``.
        algorithm: how ranks sum, as in :func:`~sparsepipe.simulate.network.reduction_legs`.
    """

    plan: Plan
    network: ClusterNetwork
    costs: tuple[RankCosts, ...]
    shared: GradientSum
    private: tuple[GradientSum, ...]
    algorithm: Algorithm

    def record(self, minibatches: int) -> Record:
        """Simulates a training of ``minibatches`` minibatches and returns its times."""
        ranks = range(len(self.costs))
        record = Record(plan=self.plan, minibatches=minibatches)
        spans: list[list[Span]] = [[] for _ in ranks]
        ready_s = [0.0 for _ in ranks]
        for number in range(minibatches):
            encoded_s = [at + of.encode_s for at, of in zip(ready_s, self.costs, strict=True)]
            sent = self._sent(number, encoded_s)
            record.transfers += sorted(sent, key=lambda each: each.end)
            back_s = []
            for rank, costs in enumerate(self.costs):
                arrived = [each.end for each in sent if each.target == rank]
                begins_s = max([encoded_s[rank], *arrived])
                back_s.append(begins_s + costs.losses_s + costs.backward_s)
                forward, backward = Action("F", number), Action("B", number)
                spans[rank].append(Span.of(forward, rank, ready_s[rank], encoded_s[rank]))
                spans[rank].append(Span.of(backward, rank, begins_s, back_s[rank]))
            summed_s = self._summed(record, number, back_s)
            record.returns_s.append(max(back_s))
            ready_s = [at + of.update_s for at, of in zip(summed_s, self.costs, strict=True)]
            for rank in ranks:
                update = Action("U", number)
                spans[rank].append(Span.of(update, rank, summed_s[rank], ready_s[rank]))
        record.end_s = max(ready_s)
        record.busy_s = [minibatches * costs.busy_s for costs in self.costs]
        record.spans = [span for each in spans for span in each]
        return record

    def minibatch_s(self) -> float:
        """Seconds from the end of a minibatch to that of the next, from the second minibatch on."""
        return self.record(3).end_s - self.record(2).end_s

    def _sent(self, number: int, encoded_s: Sequence[float]) -> list[Span]:
        """Spans of the messages with codes between all ranks; rank r sends at ``encoded_s[r]``."""
        network, ranks = self.network, range(len(self.costs))
        pairs = [(a, b) for a in ranks for b in ranks if a != b]
        legs = [Leg(network.ports(a, b), self.costs[a].sent_bytes) for a, b in pairs]
        loads = _loads_s(network, legs)
        found = []
        for (source, target), leg in zip(pairs, legs, strict=True):
            takes_s = max((loads[port] for port in leg.ports), default=0.0)
            span = Span(
                source,
                "activation",
                number,
                start=encoded_s[source],
                end=encoded_s[source] + takes_s + network.latency_s(source, target),
                target=target,
                num_bytes=leg.num_bytes,
            )
            found.append(span)
        return found

    def _summed(self, record: Record, number: int, back_s: Sequence[float]) -> list[float]:
        end_s = list(back_s)
        for part, (ranks, size) in enumerate((self.shared, *self.private)):
            start_s = max(end_s[rank] for rank in ranks)
            phases, takes_s = reduction_legs(self.network, ranks, size, self.algorithm)
            takes_s += sum(
                max(_loads_s(self.network, legs).values(), default=0.0) for legs in phases
            )
            for rank in ranks:
                end_s[rank] = start_s + takes_s
            if takes_s:
                end = start_s + takes_s
                span = Span(0, "sum", number, part, start=start_s, end=end, num_bytes=size)
                record.reductions.append(span)
        return end_s


def _loads_s(network: ClusterNetwork, legs: Iterable[Leg]) -> dict[int, float]:
    """Seconds that each port needs for all of its legs, by number of the port."""
    found: dict[int, float] = {}
    for leg in legs:
        for port in leg.ports:
            found[port] = found.get(port, 0.0) + leg.num_bytes / network.bytes_per_s[port]
    return found
