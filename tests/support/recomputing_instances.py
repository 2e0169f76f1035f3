"""Random problems with layers to recompute, small enough to try all plans and all choices."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import Any

from sparsepipe.partition.activation_checkpointing.stage_memory import StageCost
from sparsepipe.partition.costs.layers import chain_spans
from sparsepipe.partition.costs.model import PRESETS, cost_model, plan_times
from sparsepipe.partition.devices import Choice, DeviceKind, DevicePool
from sparsepipe.partition.memory import MemoryModel, Microbatches
from sparsepipe.partition.problem import Problem, SynchronousStages
from sparsepipe.partition.search import exhaustive as brute
from sparsepipe.profiling import Profile
from tests.support.instances import profile_of, slices

SLACK = 1 + 1e-9
"""What may be kept beyond a limit, for being added up in another order."""


def every_choice(length: int) -> Iterator[tuple[range, ...]]:
    """All sets of spans that do not overlap."""

    def rest(first: int) -> Iterator[tuple[range, ...]]:
        if first == length:
            yield ()
            return
        yield from rest(first + 1)
        for end in range(first + 1, length + 1):
            yield from ((range(first, end), *others) for others in rest(end))

    yield from rest(0)


def random_recomputing(seed: int, setting: Any) -> tuple[Problem, list[int]]:
    """Up to 5 layers on up to 4 devices of up to 2 kinds, and an order of the kinds.

    Limits of memory are such that some plans need recomputation, and some problems have no plan.
    """
    rng = random.Random(seed)
    layers, num_kinds = rng.randint(2, 5), rng.randint(1, 2)
    profiles = _profiles(rng, layers, num_kinds)
    microbatches = Microbatches(
        schedule=rng.choice(["gpipe", "1f1b", "eager_1f1b"]),
        count=rng.choice([1, 2, 4, 7]),
        batch_size=rng.choice([None, 3, 8]),
    )
    hosts = [rng.choice("ab") for _ in range(num_kinds)]
    speeds = {host: rng.choice([2.0, 20.0]) for host in hosts}
    saved = sum(layer.saved_bytes or 0.0 for layer in profiles[0].layers)
    kinds = tuple(
        DeviceKind(
            name=f"K{number}",
            host=hosts[number],
            count=rng.randint(1, 2),
            memory_bytes=rng.uniform(0.3, 2.0) * saved,
        )
        for number in range(num_kinds)
    )
    problem = Problem(
        pool=DevicePool(kinds=kinds, inside=speeds, between=rng.choice([1.0, 10.0])),
        spans=chain_spans(profiles),
        model=cost_model(rng.choice(list(PRESETS))),
        memory=MemoryModel(stash=False, optimizer=rng.choice([0.0, 1.0]), reserved_bytes=0.5),
        profiles=tuple(profiles),
        synchronous=SynchronousStages(setting=setting, microbatches=microbatches),
    )
    order = list(range(num_kinds))
    rng.shuffle(order)
    return problem, order


def problem_of(
    costs: list[list[dict[str, float]]], *, limits: list[float], setting: Any
) -> Problem:
    """Two devices of each kind, of which there are the costs of layers, for four microbatches."""
    profiles = tuple(map(profile_of, costs))
    kinds = tuple(
        DeviceKind(name=name, host="h", count=2, memory_bytes=limits[number] if limits else None)
        for number, name in enumerate("AB"[: len(costs)])
    )
    return Problem(
        pool=DevicePool(kinds=kinds, inside={"h": 1e3}, between=1e3),
        spans=chain_spans(profiles),
        model=cost_model("eq4"),
        memory=MemoryModel(stash=False) if limits else None,
        profiles=profiles,
        synchronous=SynchronousStages(
            setting=setting,
            microbatches=Microbatches(schedule="gpipe", count=4, batch_size=None),
        ),
    )


def network_of(num_layers: int) -> Problem:
    """As deep a network as is told, like a VGG16: two devices each of two kinds choose layers."""
    rng = random.Random(1)
    levels = [n * 52 // num_layers // 10 for n in range(num_layers)]
    sizes = [64.0 / 2**level * rng.uniform(0.8, 1.2) for level in levels]
    seconds = [
        rng.uniform(5, 9) if n % 3 == 0 else rng.uniform(0.1, 0.5) for n in range(num_layers)
    ]
    costs = [
        [
            {
                "forward_s": speed * forward_s,
                "backward_s": 2 * speed * forward_s,
                "activation_bytes": size,
                "saved_bytes": size,
                "begin_bytes": size,
                "end_bytes": size * (number % 3 != 2),
            }
            for number, (forward_s, size) in enumerate(zip(seconds, sizes, strict=True))
        ]
        for speed in (1.0, 1.5)
    ]
    return problem_of(costs, limits=[0.25 * sum(sizes), 0.3 * sum(sizes)], setting="auto")


def least_s(problem: Problem, order: Sequence[int] | None = None) -> float:
    """Time of the best of all plans with the best of all choices; infinite where none fits."""
    pool, layers = problem.pool, problem.spans.num_layers
    groups = brute.divisions(pool.counts) if order is None else slices(pool, order)
    plans = (p for p in brute.plans(layers, groups) if len(p) >= problem.distinct_stages)
    times_s = (seconds_of(problem, plan) for plan in plans)
    return min(times_s, default=float("inf"))


def seconds_of(problem: Problem, plan: Sequence[Choice]) -> float:
    """Time of a plan with the best of all choices; infinite where it does not fit."""
    stages_s, cuts_s = plan_times(plan, problem.spans, problem.pool, problem.model)
    more_s = [_more_s(problem, plan, number) for number in range(len(plan))]
    return max([a + b for a, b in zip(stages_s, more_s, strict=True)] + cuts_s)


def _more_s(problem: Problem, plan: Sequence[Choice], number: int) -> float:
    """What a stage takes longer, by trying all that the setting leaves open."""
    assert problem.synchronous is not None
    assert problem.memory is not None
    stage, cut, memory = plan[number], problem.synchronous.microbatches, problem.memory
    replicas, left = sum(stage.counts), sum(sum(later.counts) for later in plan[number:])
    if max(sum(each.counts) for each in plan) > cut.count:
        return float("inf")
    readers = sum(plan[0].counts)  # of which the first one has the most microbatches to cut
    if cut.batch_size is not None and len(range(0, cut.count, readers)) > cut.batch_size:
        return float("inf")
    sizes = _sizes(cut, sum(plan[0].counts))
    share, most = max(sizes), -(-cut.count // replicas)
    if cut.schedule != "gpipe":
        ahead = (left - 1) // replicas
        most = min(most, 1 + ahead + ahead * (cut.schedule == "eager_1f1b"))
    rows = [sizes[device::replicas] for device in range(replicas)]
    in_flight = max(sum(row[n : n + most]) for row in rows for n in range(len(row))) / share
    held = [problem.profiles[kind] for kind, count in enumerate(stage.counts) if count]
    span = {"first": stage.first, "last": stage.end - 1}
    cost = StageCost.worst(
        [StageCost.of(p, **span, in_flight=in_flight, share=share) for p in held]
    )
    weights = max(sum(x.parameter_bytes for x in p.layers[stage.first : stage.end]) for p in held)
    each = 1 + memory.optimizer + memory.gradients + (2 if replicas > 1 else 0)
    limit = min(
        float("inf") if kind.memory_bytes is None else kind.memory_bytes
        for kind, count in zip(problem.pool.kinds, stage.counts, strict=True)
        if count
    )
    room = (limit * SLACK - memory.reserved_bytes - each * weights) * SLACK
    fitting = [
        cost.time_s(spans) / share
        for spans in _open(problem.synchronous.setting, stage, number)
        if cost.peak_bytes(spans) <= room
    ]
    return min(fitting, default=float("inf")) / replicas


def _sizes(cut: Microbatches, readers: int) -> list[float]:
    """Of all microbatches, which the first stage's devices have in turn, over a batch's."""
    size, found = cut.batch_size, [0.0] * cut.count
    for reader in range(readers):
        own = found[reader::readers]
        each = 1 / len(own) if size is None else -(-size // len(own)) / size
        found[reader::readers] = [each] * len(own)
    return found


def _open(setting: Any, stage: Choice, number: int) -> list[tuple[range, ...]]:
    """What may be recomputed of a stage, its layers numbered from 0; spans of single layers."""
    length = stage.end - stage.first
    if setting == "auto":
        return list(every_choice(length))
    if setting == "all":
        return [(range(length),)]
    if setting == "none":
        return [()]
    named = [layer - stage.first for layer, _ in setting.get("layers", [])]
    own = tuple(range(layer, layer + 1) for layer in named if 0 <= layer < length)
    if number in setting.get("stages", []):  # which may name no layer twice
        return [] if own else [(range(length),)]
    return [own]


def _profiles(rng: random.Random, num_layers: int, num_kinds: int) -> list[Profile]:
    large = rng.choice([3, 9])
    activations = [float(rng.randint(0, large)) for _ in range(num_layers)]
    parameters = [float(rng.randint(0, 2)) for _ in range(num_layers)]
    return [
        profile_of(
            [
                {
                    "forward_s": rng.randint(0, large),
                    "backward_s": rng.randint(0, large),
                    "activation_bytes": activations[index],
                    "parameter_bytes": parameters[index],
                    "saved_bytes": rng.randint(0, 2 * large),
                    "begin_bytes": rng.randint(0, large),
                    "end_bytes": rng.randint(0, int(activations[index])),
                }
                for index in range(num_layers)
            ],
            input_bytes=2.0,
        )
        for _ in range(num_kinds)
    ]
