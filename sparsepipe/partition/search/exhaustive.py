"""Brute force: every way to split the layers over the devices. For small cases only."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import combinations, product
from math import comb, prod

from sparsepipe.errors import PlanError
from sparsepipe.partition.costs.layers import Spans
from sparsepipe.partition.costs.model import EQUAL, CostModel, plan_times
from sparsepipe.partition.devices import Choice, Counts, DevicePool
from sparsepipe.partition.memory import MemoryModel, fits
from sparsepipe.partition.problem import equal_kinds, together

MOST_PLANS = 200_000
"""The most plans that are tried: about a minute on one core."""


def exhaustive(
    spans: Spans,
    pool: DevicePool,
    model: CostModel,
    memory: MemoryModel | None,
    *,
    groups: Iterable[Sequence[Counts]] | None = None,
    more_s: Callable[[Sequence[Choice]], Sequence[float]] | None = None,
) -> list[Choice] | None:
    """The best of all plans; None if none fits the memory.

    Args:
        spans: costs of a chain of layers.
        pool: the devices, all of which are used.
        model: costs of stages and cuts.
        memory: counts the bytes that a device keeps; None: memory is not limited.
        groups: the divisions to try, with the devices of each stage by kind; None: all.
        more_s: gives seconds to add to each stage of a plan, infinite for one that does not fit.
    """
    if groups is None and (number := how_many(spans.num_layers, pool)) > MOST_PLANS:
        raise PlanError(
            f"exhaustive would try {number:,} plans, but its limit is {MOST_PLANS:,}",
            remedy="use task.search=exact, which finds the same plan",
        )
    likes = equal_kinds(pool, spans) if groups is None else list(range(len(pool.kinds)))
    found: list[tuple[list[Choice], list[float], list[float]]] = []
    least_s = float("inf")
    for plan in plans(spans.num_layers, divisions(pool.counts) if groups is None else groups):
        stages_s, cuts_s = plan_times(plan, spans, pool, model)
        time_s = max(stages_s + cuts_s)
        if more_s is not None and time_s <= least_s * (1 + EQUAL):
            stages_s = [a + b for a, b in zip(stages_s, more_s(plan), strict=True)]
            time_s = max(stages_s + cuts_s)
        finite = time_s < float("inf")
        if finite and time_s <= least_s * (1 + EQUAL) and fits(plan, spans, pool, memory):
            if time_s < least_s:
                least_s = time_s
                found = [e for e in found if max(e[1] + e[2]) <= least_s * (1 + EQUAL)]
            found.append((plan, stages_s, cuts_s))
    if not found:
        return None
    # Among equal bottlenecks, the best by number of stages, second-worst stage, text, hosts.
    fewest = min(len(plan) for plan, _, _ in found)
    short = [(plan, sorted(stages)) for plan, stages, _ in found if len(plan) == fewest]
    second = min(times[-2] if fewest > 1 else 0.0 for _, times in short)
    last = [p for p, times in short if fewest == 1 or times[-2] <= second * (1 + EQUAL)]
    kinds = tuple(pool.kinds[k] for k in sorted(set(likes)))
    keys = []
    for plan in last:
        alike = [replace(stage, counts=together(stage.counts, likes)) for stage in plan]
        hosts = [[-count for count in stage.counts] for stage in plan]
        keys.append(([stage.text(kinds) for stage in alike], hosts))
    return last[keys.index(min(keys))]


def how_many(num_layers: int, pool: DevicePool) -> int:
    """Number of plans that split ``num_layers`` layers over all devices of the pool."""
    most = min(num_layers, pool.num_devices)
    total = 0
    for stages in range(1, most + 1):
        # Ways to distribute the devices of each kind, minus those that leave a stage without any.
        ways = sum(
            (-1) ** (stages - used)
            * comb(stages, used)
            * prod(comb(count + used - 1, count) for count in pool.counts)
            for used in range(1, stages + 1)
        )
        total += comb(num_layers - 1, stages - 1) * ways
    return total


def plans(num_layers: int, groups: Iterable[Sequence[Counts]]) -> Iterator[list[Choice]]:
    """Yields all plans of ``num_layers`` layers for each division of devices in ``groups``."""
    for counts in groups:
        for cuts in combinations(range(1, num_layers), len(counts) - 1):
            bounds = [0, *cuts, num_layers]
            yield [
                Choice(first=bounds[s], end=bounds[s + 1], counts=own)
                for s, own in enumerate(counts)
            ]


def divisions(left: Counts) -> Iterator[list[Counts]]:
    """Yields all ways to distribute ``left`` devices by kind over stages, at least one to each."""
    if not any(left):
        yield []
    for group in product(*(range(count + 1) for count in left)):
        if any(group):
            after = tuple(a - b for a, b in zip(left, group, strict=True))
            yield from ([group, *others] for others in divisions(after))
