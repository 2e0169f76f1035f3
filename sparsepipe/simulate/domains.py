"""Steps of training of which every rank has some of the domains, in time.

A rank encodes and decodes its samples, sends codes to all others, computes the losses of all codes
when these are there, goes backward, and updates its parameters when gradients have been added up.
Messages take as long as if all ranks sent at once: each gets its share of the ports that it runs
through.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from sparsepipe.schedule import Action, Plan, Span
from sparsepipe.simulate.network import Algorithm, Leg, Network, reduction_legs
from sparsepipe.simulate.record import Record, Reduction, Transfer


@dataclass(frozen=True, slots=True, kw_only=True)
class RankCosts:
    """What a step takes on a rank.

    Args:
        encode_s: seconds until its codes are there, with those of its decoder.
        losses_s: forward and backward of the losses of all codes.
        backward_s: of decoder and encoders.
        update_s: of its parameters.
        sent_bytes: that it sends to each other rank.
    """

    encode_s: float
    losses_s: float
    backward_s: float
    update_s: float
    sent_bytes: float

    @property
    def busy_s(self) -> float:
        return self.encode_s + self.losses_s + self.backward_s + self.update_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Sum:
    """Gradients that some ranks add up at the end of a step."""

    ranks: tuple[int, ...]
    num_bytes: float


@dataclass(frozen=True, slots=True, kw_only=True)
class DomainSteps:
    """A training of domains over ranks.

    Args:
        plan: one stage with a replica for each rank.
        network: that joins them.
        costs: of each rank.
        shared: the sum over all ranks.
        private: sums over the replicas of a domain, which follow it.
        algorithm: of sums.
    """

    plan: Plan
    network: Network
    costs: tuple[RankCosts, ...]
    shared: Sum
    private: tuple[Sum, ...]
    algorithm: Algorithm

    def record(self, minibatches: int) -> Record:
        """The first minibatches."""
        count = len(self.costs)
        record = Record(plan=self.plan, minibatches=minibatches)
        spans: list[list[Span]] = [[] for _ in range(count)]
        ready_s = [0.0] * count
        for number in range(minibatches):
            encoded_s = [at + of.encode_s for at, of in zip(ready_s, self.costs, strict=True)]
            sent = self._sent(number, encoded_s)
            record.transfers += sorted(sent, key=lambda each: each.end_s)
            back_s = []
            for rank, costs in enumerate(self.costs):
                arrived = [each.end_s for each in sent if each.target == rank]
                begins_s = max([encoded_s[rank], *arrived])
                back_s.append(begins_s + costs.losses_s + costs.backward_s)
                spans[rank] += [
                    Span(rank, Action("F", number), ready_s[rank], encoded_s[rank]),
                    Span(rank, Action("B", number), begins_s, back_s[rank]),
                ]
            summed_s = self._summed(record, number, back_s)
            record.returns_s.append(max(back_s))
            ready_s = [at + of.update_s for at, of in zip(summed_s, self.costs, strict=True)]
            for rank in range(count):
                spans[rank].append(Span(rank, Action("U", number), summed_s[rank], ready_s[rank]))
        record.end_s = max(ready_s)
        record.busy_s = [minibatches * costs.busy_s for costs in self.costs]
        record.spans = [span for each in spans for span in each]
        return record

    def minibatch_s(self) -> float:
        """Seconds from one minibatch to the next, when all ranks have come into step."""
        return self.record(3).end_s - self.record(2).end_s

    def _sent(self, number: int, encoded_s: Sequence[float]) -> list[Transfer]:
        network, ranks = self.network, range(len(self.costs))
        ways = [(a, b) for a in ranks for b in ranks if a != b]
        legs = [Leg(network.ports(a, b), self.costs[a].sent_bytes) for a, b in ways]
        loads = _loads_s(network, legs)
        found = []
        for (source, target), leg in zip(ways, legs, strict=True):
            takes_s = max((loads[port] for port in leg.ports), default=0.0)
            end_s = encoded_s[source] + takes_s + network.latency_s(source, target)
            found.append(
                Transfer(
                    cargo="activation",
                    source=source,
                    target=target,
                    number=number,
                    microbatch=None,
                    start_s=encoded_s[source],
                    end_s=end_s,
                    num_bytes=leg.num_bytes,
                )
            )
        return found

    def _summed(self, record: Record, number: int, back_s: Sequence[float]) -> list[float]:
        """When each rank has all sums that it takes part in."""
        end_s = list(back_s)
        for part, each in enumerate((self.shared, *self.private)):
            start_s = max(end_s[rank] for rank in each.ranks)
            takes_s = _sum_s(self.network, each, self.algorithm)
            for rank in each.ranks:
                end_s[rank] = start_s + takes_s
            if takes_s:
                record.reductions.append(
                    Reduction(
                        stage=0,
                        round=number,
                        part=part,
                        start_s=start_s,
                        end_s=start_s + takes_s,
                        num_bytes=each.num_bytes,
                    )
                )
        return end_s


def _sum_s(network: Network, each: Sum, algorithm: Algorithm) -> float:
    phases, latency_s = reduction_legs(network, each.ranks, each.num_bytes, algorithm)
    return latency_s + sum(max(_loads_s(network, legs).values(), default=0.0) for legs in phases)


def _loads_s(network: Network, legs: Iterable[Leg]) -> dict[int, float]:
    """Seconds that each port is busy with all legs."""
    found: Counter[int] = Counter()
    for leg in legs:
        for port in leg.ports:
            found[port] += leg.num_bytes / network.bytes_per_s[port]  # type: ignore[assignment]
    return dict(found)
