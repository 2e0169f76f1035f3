"""Random problems, small enough to try all plans."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import combinations, pairwise
from typing import Any

import numpy as np

from sparsepipe.partition.costs.layers import Spans, chain_spans
from sparsepipe.partition.costs.model import PRESETS, cost_model
from sparsepipe.partition.devices import Choice, Counts, DeviceKind, DevicePool
from sparsepipe.partition.memory import MemoryModel, plan_bytes
from sparsepipe.partition.problem import Problem
from sparsepipe.profiling import LayerProfile, Profile

MODELS = (*PRESETS, "4_whole")


def on_one_host(
    spans: Spans, counts: Mapping[str, int], *, model: str = "eq4", speed: float = 1.0, **more: Any
) -> Problem:
    """With so many devices of each model."""
    kinds = tuple(DeviceKind(name=name, host="h", count=n) for name, n in counts.items())
    pool = DevicePool(kinds=kinds, inside={"h": speed}, between=speed)
    return Problem(pool=pool, spans=spans, model=cost_model(model), **more)


def spans_alone(seconds: Sequence[Sequence[float]]) -> Spans:
    """Profile of layers that cost nothing but the given times, by kind of device."""
    none = np.zeros(len(seconds[0]) + 1)
    return Spans(
        compute_s_KI=np.array([[0.0, *np.cumsum(each)] for each in seconds]),
        parameter_bytes_I=none,
        stored_bytes_I=none,
        cut_bytes_I=none,
    )


def profile_of(costs: Iterable[Mapping[str, Any]], **meta: Any) -> Profile:
    """Profile of layers with the given costs; all others are 0."""
    none = dict.fromkeys(("forward_s", "backward_s", "activation_bytes", "parameter_bytes"), 0.0)
    layers = (
        LayerProfile(**{"index": index, "name": str(index), "kind": "layer", **none, **each})
        for index, each in enumerate(costs)
    )
    return Profile(layers=tuple(layers), meta=meta)


def random_problem(seed: int) -> tuple[Problem, list[int]]:
    """Up to 8 layers on up to 5 devices of up to 3 kinds, and an order of the kinds.

    Half of them have whole numbers, so that many plans cost the same; half have a link of their
    own inside each host; half have limits of memory, some of which leave no plan.
    """
    rng = random.Random(seed)
    num_layers, num_kinds = rng.randint(1, 8), rng.randint(1, 3)
    profiles = _profiles(rng, num_layers, num_kinds)
    if seed % 2:
        profiles = [_with_borders(random.Random(f"{seed} {k}"), p) for k, p in enumerate(profiles)]
    spans = chain_spans(profiles)
    limited = rng.random() < 0.5
    memory = MemoryModel(
        stash=rng.random() < 0.7, predicted=seed % 3 == 0, optimizer=rng.choice([0.0, 1.0, 2.0])
    )
    whole_bytes = memory.stage_bytes(
        float(spans.parameter_bytes_I[-1]), float(spans.stored_bytes_I[-1]), replicas=2, left=2
    )
    kinds = _kinds(rng, num_kinds, rng.randint(num_kinds, 5), whole_bytes if limited else None)
    problem = Problem(
        pool=_pool(rng, kinds),
        spans=spans,
        model=cost_model(rng.choice(MODELS)),
        memory=memory if limited else None,
    )
    order = list(range(num_kinds))
    rng.shuffle(order)
    return problem, order


def tight_problem(seed: int) -> tuple[Problem, list[int]]:
    """The same, with limits of just what some random plan keeps on each kind of device."""
    problem, order = random_problem(seed)
    rng = random.Random(f"tight {seed}")
    memory = problem.memory or MemoryModel(reserved_bytes=rng.choice([0.0, 0.1]))
    kept = dict.fromkeys(range(len(problem.pool.kinds)), 0.0)
    plan = _random_plan(rng, problem, order)
    for stage, (bytes_, _) in zip(
        plan, plan_bytes(plan, problem.spans, problem.pool, memory), strict=True
    ):
        for k in (k for k, count in enumerate(stage.counts) if count):
            kept[k] = max(kept[k], bytes_)
    kinds = tuple(replace(kind, memory_bytes=kept[k]) for k, kind in enumerate(problem.pool.kinds))
    return replace(problem, memory=memory, pool=replace(problem.pool, kinds=kinds)), order


def like_problem(seed: int) -> tuple[Problem, list[int]]:
    """The same, with kinds that are like another one but for the host, which may be another."""
    problem, order = random_problem(seed)
    rng = random.Random(f"like {seed}")
    kinds, like = list(problem.pool.kinds), list(range(len(problem.pool.kinds)))
    for k in range(1, len(kinds)):
        if rng.random() < 0.7:
            like[k] = like[rng.randrange(k)]
            model = kinds[like[k]]
            kinds[k] = replace(kinds[k], name=model.name, memory_bytes=model.memory_bytes)
    spans = replace(problem.spans, compute_s_KI=problem.spans.compute_s_KI[like])
    pool = replace(problem.pool, kinds=tuple(kinds))
    return replace(problem, pool=pool, spans=spans), order


def _random_plan(rng: random.Random, problem: Problem, order: list[int]) -> list[Choice]:
    """Cuts anywhere in the layers and in the sorted list of devices."""
    kinds, layers = problem.pool.kinds, problem.spans.num_layers
    devices = [k for k in order for _ in range(kinds[k].count)]
    stages = rng.randint(1, min(layers, len(devices)))
    cuts = [0, *sorted(rng.sample(range(1, layers), stages - 1)), layers]
    ends = [0, *sorted(rng.sample(range(1, len(devices)), stages - 1)), len(devices)]
    return [
        Choice(
            first=cuts[s],
            end=cuts[s + 1],
            counts=tuple(devices[ends[s] : ends[s + 1]].count(k) for k in range(len(kinds))),
        )
        for s in range(stages)
    ]


def _profiles(rng: random.Random, num_layers: int, num_kinds: int) -> list[Profile]:
    whole = rng.random() < 0.5

    def number(most: int) -> float:
        return float(rng.randint(0, most)) if whole else rng.uniform(0, most)

    activations = [number(20) for _ in range(num_layers)]
    parameters = [number(20) * (rng.random() < 0.6) for _ in range(num_layers)]
    return [
        profile_of(
            [
                {
                    "forward_s": number(5),
                    "backward_s": number(9),
                    "activation_bytes": activations[i],
                    "parameter_bytes": parameters[i],
                }
                for i in range(num_layers)
            ],
            input_bytes=3.0,
        )
        for _ in range(num_kinds)
    ]


def _with_borders(rng: random.Random, profile: Profile) -> Profile:
    """What layers keep for the backward, and stages at their ends."""
    names = ("saved_bytes", "begin_bytes", "end_bytes")
    layers = tuple(
        replace(layer, **{name: float(rng.randint(0, 20)) for name in names})
        for layer in profile.layers
    )
    return replace(profile, layers=layers)


def _kinds(
    rng: random.Random, num_kinds: int, devices: int, whole_bytes: float | None
) -> tuple[DeviceKind, ...]:
    counts = [1] * num_kinds
    for _ in range(devices - num_kinds):
        counts[rng.randrange(num_kinds)] += 1
    return tuple(
        DeviceKind(
            name=f"{rng.choice('AB')}{k}",
            host=rng.choice("ab"),
            count=count,
            memory_bytes=None
            if whole_bytes is None or rng.random() < 0.1
            else rng.uniform(0.3, 1.5) * whole_bytes,
        )
        for k, count in enumerate(counts)
    )


def _pool(rng: random.Random, kinds: tuple[DeviceKind, ...]) -> DevicePool:
    hosts = list(dict.fromkeys(kind.host for kind in kinds))
    if rng.random() < 0.5:
        speed = rng.choice([0.5, 1.0, 2.0, 4.0])
        return DevicePool(kinds=kinds, inside=dict.fromkeys(hosts, speed), between=speed)
    inside = {host: rng.choice([1.0, 2.0, 4.0]) for host in hosts}
    return DevicePool(kinds=kinds, inside=inside, between=rng.choice([0.5, 1.0, 2.0]))


def slices(pool: DevicePool, order: Sequence[int]) -> Iterator[list[Counts]]:
    """The sorted list of devices, cut anywhere."""
    devices = [kind for kind in order for _ in range(pool.kinds[kind].count)]
    for stages in range(1, len(devices) + 1):
        for cuts in combinations(range(1, len(devices)), stages - 1):
            bounds = pairwise([0, *cuts, len(devices)])
            yield [tuple(devices[a:b].count(k) for k in range(len(pool.kinds))) for a, b in bounds]
