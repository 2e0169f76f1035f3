"""The partitioning problem, and the solution that a search finds.

Devices of the same model with the same memory count as equal if they are on the same host, or if
the bandwidth is the same between any two devices. The search ``exact`` merges equal devices, and so
has far fewer subsets to consider. Among plans that differ only in the hosts of equal devices, it
takes the one whose stages, from the first on, use the hosts that come first in the inventory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from sparsepipe.cluster import Inventory
from sparsepipe.errors import ConfigError
from sparsepipe.partition.activation_checkpointing.setting import (
    OwnSpans,
    Setting,
    StageSpans,
    recomputed_spans,
)
from sparsepipe.partition.costs.layers import Spans, spans_of
from sparsepipe.partition.costs.model import CostModel
from sparsepipe.partition.devices import Choice, Counts, DeviceKind, DevicePool, kinds_of
from sparsepipe.partition.memory import MemoryModel, Microbatches
from sparsepipe.profiling import Profile, check_agreement, check_there
from sparsepipe.schedule import Plan


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Problem:
    """What a search needs: a model, devices, the cost model and memory limits.

    Args:
        pool: the devices; a plan uses them all.
        spans: costs of the layers on each kind of device.
        model: costs of stages and transfers.
        memory: counts the bytes that a device keeps; None: memory is not limited.
        profiles: one profile for each kind of device; empty if the spans come from elsewhere.
        synchronous: microbatches and recomputation of a synchronous pipeline, for chains of layers
            with profiles; None: memory counts as in an asynchronous pipeline.
    """

    pool: DevicePool
    spans: Spans
    model: CostModel
    memory: MemoryModel | None = None
    profiles: tuple[Profile, ...] = ()
    synchronous: SynchronousStages | None = None

    @property
    def numbers_of_readers(self) -> Sequence[int | None]:
        """The numbers of first-stage devices, each of which needs a search of its own, since memory
        depends on it; [None]: one search covers plans with any number.

        They decrease to the fewest devices whose batches have a sample for each microbatch.
        """
        if self.synchronous is None:
            return [None]
        cut = self.synchronous.microbatches
        is_free = self.memory is None or all(k.memory_bytes is None for k in self.pool.kinds)
        if is_free and cut.least_readers == 1:
            return [None]
        return range(min(cut.count, self.pool.num_devices), cut.least_readers - 1, -1)

    @property
    def distinct_stages(self) -> int:
        """Number of stages, from the first, that a search must tell apart: all up to the last one
        that ``recompute`` names; 0 if it names none.
        """
        named = () if self.synchronous is None else self.synchronous.named_stages
        return max(named, default=-1) + 1

    @classmethod
    def of(
        cls,
        inventory: Inventory,
        profiles: Mapping[str, Profile],
        *,
        model: CostModel,
        memory: MemoryModel | None = None,
        bandwidth_bytes_per_s: float | None = None,
        synchronous: SynchronousStages | None = None,
    ) -> Problem:
        """The problem for an inventory; ``profiles`` has a profile of each device model, by name.

        For a branching graph, whose plans are not for training, ``synchronous`` is ignored.
        """
        names = list(dict.fromkeys(kind.name for kind in kinds_of(inventory)))
        check_there(names, profiles)
        check_agreement({name: profiles[name] for name in names})
        pool = DevicePool.of(inventory, bandwidth_bytes_per_s=bandwidth_bytes_per_s)
        found = tuple(profiles[kind.name] for kind in pool.kinds)
        spans = spans_of(found)
        return cls(
            pool=pool,
            spans=spans,
            model=model,
            memory=memory,
            profiles=found,
            synchronous=synchronous if spans.nested_II is None else None,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Solution:
    """The best plan of a search.

    Attributes:
        stages: the stages of the plan.
        strategy: name of the search.
        order: names of the kinds in the order in which stages take devices; None: no fixed order.
        assumed: the problem solved, if the search treats different devices as equal; else None.
        spans: layers of each stage that the search has chosen to recompute; None: it did not
            choose.
        by_hosts: whether receivers on one host share its link; see
            :func:`~sparsepipe.partition.costs.model.plan_times`.
        expected_s: the search's own figure for the seconds between two minibatches; None: those of
            its slowest stage or transfer.
    """

    stages: tuple[Choice, ...]
    strategy: str
    order: tuple[str, ...] | None = None
    assumed: Problem | None = None
    spans: StageSpans | None = None
    by_hosts: bool = False
    expected_s: float | None = None

    @property
    def config(self) -> str:
        """Number of devices of each stage as text, such as ``"2-1"``."""
        return "-".join(str(sum(stage.counts)) for stage in self.stages)


def assign_in_order(
    stages: Sequence[Choice], pool: DevicePool, order: Sequence[int]
) -> list[Choice]:
    """The stages with as many devices each as before, taken from the kinds in this ``order``."""
    devices = [kind for kind in order for _ in range(pool.kinds[kind].count)]
    taken, found = 0, []
    for stage in stages:
        number = sum(stage.counts)
        mine = devices[taken : taken + number]
        counts: Counts = tuple(mine.count(kind) for kind in range(len(pool.kinds)))
        found.append(Choice(first=stage.first, end=stage.end, counts=counts))
        taken += number
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class SynchronousStages:
    """Microbatches and recomputation of a synchronous pipeline.

    Args:
        setting: a valid setting of ``recompute``; ``auto``: the cheapest layers with which each
            stage fits its devices.
        microbatches: how minibatches are cut.

    Attributes:
        recomputes: whether some layers may be recomputed.
        named_stages: numbers of the stages that the setting names.
    """

    setting: Setting
    microbatches: Microbatches
    recomputes: bool = field(init=False, compare=False, repr=False)
    named_stages: frozenset[int] = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        setting, named = self.setting, frozenset[int]()
        recomputes = setting != "none"
        if isinstance(setting, Mapping):
            recomputes, named = any(setting.values()), frozenset(setting.get("stages", []))
        object.__setattr__(self, "recomputes", recomputes)
        object.__setattr__(self, "named_stages", named)

    def is_whole(self, stage: int) -> bool:
        """Whether the setting recomputes all layers of ``stage``, as one span."""
        return self.setting == "all" or stage in self.named_stages

    def spans(self, num_layers: int) -> OwnSpans:
        """Spans of the layers that the setting names, before cuts divide them; empty if none."""
        if not isinstance(self.setting, Mapping):
            return ()
        whole = Plan.of(config="1", cuts=(), num_layers=num_layers)
        (spans,) = recomputed_spans({"layers": self.setting.get("layers", [])}, whole)
        return spans


def equal_kinds(pool: DevicePool, spans: Spans) -> list[int]:
    """By kind, the index of the first with equal model, memory, times and, if it matters, host."""
    first: dict[object, int] = {}
    found = []
    for k, kind in enumerate(pool.kinds):
        host = "any" if pool.is_uniform else kind.host
        like = kind.name, kind.memory_bytes, host, tuple(spans.compute_s_KI[k])
        found.append(first.setdefault(like, k))
    return found


def merged(problem: Problem, likes: Sequence[int]) -> Problem:
    """The problem with equal kinds merged; ``likes`` is from :func:`equal_kinds`."""
    pool, spans = problem.pool, problem.spans
    if len(set(likes)) == len(likes):
        return problem
    inside, between = pool.inside, pool.between
    if pool.is_uniform:  # a host with one device may now have several, which need a link
        between = pool.cut_bytes_per_s(0, 0)
        inside = dict.fromkeys(inside, between)
    firsts = sorted(set(likes))
    kinds = tuple(
        replace(kind, count=count)
        for kind, count in zip(
            (pool.kinds[first] for first in firsts), together(pool.counts, likes), strict=True
        )
    )
    return replace(
        problem,
        pool=DevicePool(kinds=kinds, inside=inside, between=between),
        spans=replace(spans, compute_s_KI=spans.compute_s_KI[firsts]),
        profiles=tuple(problem.profiles[first] for first in firsts) if problem.profiles else (),
    )


def together(counts: Sequence[int], likes: Sequence[int]) -> Counts:
    """``counts`` of devices, added up over equal kinds; ``likes`` is from :func:`equal_kinds`."""
    sums = dict.fromkeys(sorted(set(likes)), 0)
    for like, count in zip(likes, counts, strict=True):
        sums[like] += count
    return tuple(sums.values())


def assign_devices(
    stages: Sequence[Choice], pool: DevicePool, likes: Sequence[int]
) -> list[Choice]:
    """The ``stages`` of a merged pool with devices of ``pool``; the first hosts' come first."""
    left = list(pool.counts)
    found = []
    for stage in stages:
        needed = dict(zip(sorted(set(likes)), stage.counts, strict=True))
        taken = []
        for kind, like in enumerate(likes):
            number = min(left[kind], needed[like])
            left[kind] -= number
            needed[like] -= number
            taken.append(number)
        found.append(replace(stage, counts=tuple(taken)))
    return found


def as_uniform(problem: Problem, device: str) -> Problem:
    """The problem as if all devices were ``device`` with the least memory and slowest link."""
    pool, spans = problem.pool, problem.spans
    named = [k for k, kind in enumerate(pool.kinds) if kind.name == device]
    if not named:
        raise ConfigError(
            f"device {device!r} is not in the inventory",
            remedy=f"name one of {', '.join(dict.fromkeys(kind.name for kind in pool.kinds))}",
        )
    limits = [kind.memory_bytes for kind in pool.kinds if kind.memory_bytes is not None]
    one = DeviceKind(
        name=device,
        host="any",
        count=pool.num_devices,
        memory_bytes=min(limits, default=None),
        tflops=pool.kinds[named[0]].tflops,
    )
    speed = min([*pool.inside.values(), pool.between])
    return replace(
        problem,
        pool=DevicePool(kinds=(one,), inside={"any": speed}, between=speed),
        spans=spans_of(problem.profiles[named[0] : named[0] + 1])
        if problem.profiles
        else replace(spans, compute_s_KI=spans.compute_s_KI[named[:1]]),
        profiles=problem.profiles[named[0] : named[0] + 1],
    )
