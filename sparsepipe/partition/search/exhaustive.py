"""Brute force: every way to split the layers over the devices. For small cases only."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import combinations, product
from math import comb, prod

from sparsepipe.errors import PlanError
from sparsepipe.partition.costs.layers import Spans
from sparsepipe.partition.costs.model import EQUAL, CostModel, plan_times
from sparsepipe.partition.devices import Choice, Counts, DevicePool
from sparsepipe.partition.memory.model import MemoryModel, fits
from sparsepipe.partition.problem import equal_kinds, together

MOST_PLANS = 200_000
"""About a minute on one core."""


def exhaustive(
    spans: Spans,
    pool: DevicePool,
    model: CostModel,
    memory: MemoryModel | None,
    *,
    order: Sequence[int] | None = None,
    more_s: Callable[[Sequence[Choice]], Sequence[float]] | None = None,
) -> list[Choice] | None:
    """The best of all plans; None where none fits the memory.

    Args:
        spans: of a chain of layers.
        pool: the devices, all of which are used.
        model: what stages and cuts cost.
        memory: what stages keep; None: no device's memory is a limit.
        order: of the kinds, if stages take devices from a sorted list; None: any devices.
        more_s: seconds that each stage of a plan takes beside, infinite where it does not fit.

    Raises:
        PlanError: there are more plans than anybody would wait for.
    """
    number = how_many(spans.num_layers, pool, sorted_=order is not None)
    if number > MOST_PLANS:
        raise PlanError(
            f"there are {number:,} plans to try, more than {MOST_PLANS:,}",
            remedy="use task.search=exact, which finds the same plan",
        )
    found: list[tuple[list[Choice], list[float], list[float]]] = []
    least_s = float("inf")
    for plan in _plans(spans.num_layers, pool, order):
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
    likes = equal_kinds(pool, spans) if order is None else list(range(len(pool.kinds)))
    return _best(found, pool, likes)


def how_many(num_layers: int, pool: DevicePool, *, sorted_: bool) -> int:
    def divisions(stages: int) -> int:
        if sorted_:
            return comb(pool.num_devices - 1, stages - 1)
        # Ways to hand out the devices of each kind, less those that leave a stage without any.
        return sum(
            (-1) ** (stages - used)
            * comb(stages, used)
            * prod(comb(count + used - 1, count) for count in pool.counts)
            for used in range(1, stages + 1)
        )

    most = min(num_layers, pool.num_devices)
    return sum(comb(num_layers - 1, s - 1) * divisions(s) for s in range(1, most + 1))


def _best(
    found: Sequence[tuple[list[Choice], list[float], list[float]]],
    pool: DevicePool,
    likes: Sequence[int],
) -> list[Choice]:
    """The best of equal bottlenecks: by number of stages, second-worst stage, text, hosts."""
    fewest = min(len(plan) for plan, _, _ in found)
    short = [(plan, sorted(stages)) for plan, stages, _ in found if len(plan) == fewest]
    second = min(times[-2] if fewest > 1 else 0.0 for _, times in short)
    last = [p for p, times in short if fewest == 1 or times[-2] <= second * (1 + EQUAL)]
    kinds = tuple(pool.kinds[k] for k in sorted(set(likes)))

    def key(plan: list[Choice]) -> tuple[list[str], list[list[int]]]:
        alike = [replace(stage, counts=together(stage.counts, likes)) for stage in plan]
        texts = [stage.text(kinds) for stage in alike]
        return texts, [[-count for count in stage.counts] for stage in plan]

    return min(last, key=key)


def _plans(
    num_layers: int, pool: DevicePool, order: Sequence[int] | None
) -> Iterator[list[Choice]]:
    for groups in _divisions(pool) if order is None else _slices(pool, order):
        for cuts in combinations(range(1, num_layers), len(groups) - 1):
            bounds = [0, *cuts, num_layers]
            yield [
                Choice(first=bounds[s], end=bounds[s + 1], counts=group)
                for s, group in enumerate(groups)
            ]


def _slices(pool: DevicePool, order: Sequence[int]) -> Iterator[list[Counts]]:
    """The sorted list of devices, cut anywhere."""
    devices = [kind for kind in order for _ in range(pool.kinds[kind].count)]
    for stages in range(1, len(devices) + 1):
        for cuts in combinations(range(1, len(devices)), stages - 1):
            bounds = [0, *cuts, len(devices)]
            yield [
                tuple(devices[bounds[s] : bounds[s + 1]].count(k) for k in range(len(pool.kinds)))
                for s in range(stages)
            ]


def _divisions(pool: DevicePool) -> Iterator[list[Counts]]:
    """Any devices for the first stage, any of the others for the next."""

    def rest(left: Counts) -> Iterator[list[Counts]]:
        if not any(left):
            yield []
        for group in product(*(range(count + 1) for count in left)):
            if any(group):
                after = tuple(a - b for a, b in zip(left, group, strict=True))
                yield from ([group, *others] for others in rest(after))

    return rest(pool.counts)
