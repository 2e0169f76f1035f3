"""How a model is split: the layers of each stage, and the ranks that replicate it.

Ranks are numbered stage after stage. Minibatch ``m`` is handled in a stage of ``r`` replicas
by replica ``m mod r``, forward and backward (round robin; PipeDream, section 3.2).
"""

from __future__ import annotations

import json
import math
import operator
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, count, pairwise
from pathlib import Path
from typing import Any, Self

from sparsepipe.errors import PlanError
from sparsepipe.utils import reading


def in_turn(count: int, *, replica: int, replicas: int) -> range:
    """The microbatches, of ``count``, that one of a stage's replicas handles: they take turns."""
    return range(replica, count, replicas)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """A span of layers on one or more devices.

    Args:
        layers: numbers of its first and its last layer, both included, from 0.
        devices: names of the devices, one for each replica; or for each rank of the grid.
        grid: shape of the grid of ranks that share each sample; None: each has whole samples.
    """

    layers: tuple[int, int]
    devices: tuple[str, ...]
    grid: tuple[int, ...] | None = None

    @property
    def replicas(self) -> int:
        """r, the number of replicas: a grid is one."""
        return len(self.devices) if self.grid is None else 1

    @property
    def num_layers(self) -> int:
        """Layers of this stage."""
        return self.layers[1] - self.layers[0] + 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Stages that cover a model's layers, in order.

    Args:
        stages: at least one; each begins where the one before ends.
        details: further entries of the plan file: ``bottleneck_s``, ``stage_times_s``,
            ``rank_times_s``, ``transfer_times_s``, ``cost_model``, ``strategy``, what it was
            computed from.

    Raises:
        PlanError: the stages do not cover layers without gap or overlap.
    """

    stages: tuple[Stage, ...]
    details: Mapping[str, Any] = field(default_factory=dict, compare=False)
    _firsts: tuple[int, ...] = field(init=False, repr=False, compare=False)
    """The first rank of each stage, and how many there are: plans may have thousands."""
    _replicas_before: tuple[int, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not self.stages:
            raise PlanError("the plan has no stages", remedy="give it at least one")
        begin = 0
        for number, stage in enumerate(self.stages):
            first, last = stage.layers
            if first != begin or last < first:
                raise PlanError(
                    f"stage {number} has layers {first} to {last}, it should begin with {begin}",
                    remedy="let stages follow one another from layer 0 on, each with one layer "
                    "or more",
                )
            if stage.grid is not None:
                size = math.prod(stage.grid) if stage.grid and min(stage.grid) > 0 else 0
                if size < 2 or size != len(stage.devices):
                    shape = " x ".join(map(str, stage.grid))
                    raise PlanError(
                        f"stage {number} is a grid of {shape} on {len(stage.devices)} devices",
                        remedy="give it as many devices as the product of the grid, two or more, "
                        "and one replica; leave the grid out for one device",
                    )
            if not stage.devices:
                raise PlanError(f"stage {number} has no devices", remedy="give it one or more")
            begin = last + 1
        firsts = (0, *accumulate(len(stage.devices) for stage in self.stages))
        before = (0, *accumulate(stage.replicas for stage in self.stages))
        object.__setattr__(self, "_firsts", firsts)
        object.__setattr__(self, "_replicas_before", before)

    @classmethod
    def of(
        cls,
        *,
        config: str,
        cuts: Sequence[int],
        num_layers: int,
        grids: Sequence[Sequence[int] | None] | None = None,
    ) -> Self:
        """A plan by hand.

        Args:
            config: replicas of each stage, such as ``"2-1"``.
            cuts: the first layer of each stage but the first.
            num_layers: number of the model's layers.
            grids: grid of each stage, None for those whose ranks have whole samples.
        """
        parts = config.split("-")
        if not all(part.isdecimal() and int(part) for part in parts):
            raise PlanError(
                f"config={config!r} does not say how many replicas each stage has",
                remedy="write one number for each stage, such as '2-1' for three devices",
            )
        if len(cuts) != len(parts) - 1:
            raise PlanError(
                f"config={config!r} has {len(parts)} stages, {len(cuts)} cuts are given",
                remedy=f"give {len(parts) - 1} cuts: the first layer of each stage but the first",
            )
        bounds = [0, *cuts, num_layers]
        if any(b <= a for a, b in pairwise(bounds)):
            raise PlanError(
                f"cuts {list(cuts)} do not split {num_layers} layers into {len(parts)} stages",
                remedy=f"give increasing numbers from 1 to {num_layers - 1}",
            )
        ranks = count()
        stages = []
        shapes = grids_of(parts, grids)
        for s, (part, shape) in enumerate(zip(parts, shapes, strict=True)):
            devices = int(part) * math.prod(shape or (1,))
            stages.append(
                Stage(
                    layers=(bounds[s], bounds[s + 1] - 1),
                    devices=tuple(f"rank {next(ranks)}" for _ in range(devices)),
                    grid=shape,
                )
            )
        return cls(stages=tuple(stages))

    @property
    def num_stages(self) -> int:
        """S."""
        return len(self.stages)

    @property
    def num_ranks(self) -> int:
        """R, devices of all stages."""
        return self._firsts[-1]

    @property
    def num_layers(self) -> int:
        """L, layers of the model."""
        return self.stages[-1].layers[1] + 1

    @property
    def config(self) -> str:
        """Replicas of each stage, such as ``"2-1"``; a grid is one."""
        return "-".join(str(stage.replicas) for stage in self.stages)

    @property
    def cuts(self) -> tuple[int, ...]:
        """First layer of each stage but the first."""
        return tuple(stage.layers[0] for stage in self.stages[1:])

    @property
    def replicas_of_stages(self) -> tuple[int, ...]:
        """The number of replicas of each stage."""
        return tuple(stage.replicas for stage in self.stages)

    @property
    def has_grids(self) -> bool:
        """Whether the ranks of a stage share samples."""
        return any(stage.grid is not None for stage in self.stages)

    @property
    def without_grids(self) -> Plan:
        """The same with one device for each grid, which speaks for it: as schedules have them."""
        stages = (
            stage if stage.grid is None else replace(stage, devices=stage.devices[:1], grid=None)
            for stage in self.stages
        )
        return replace(self, stages=tuple(stages))

    def replicas(self, stage: int) -> int:
        """The number of replicas of ``stage``."""
        return self.stages[stage].replicas

    def ranks_of(self, stage: int) -> range:
        """The ranks that hold ``stage``."""
        return range(self._firsts[stage], self._firsts[stage + 1])

    def stage_of(self, rank: int) -> int:
        """The stage that ``rank`` holds."""
        assert 0 <= rank < self.num_ranks
        return bisect_right(self._firsts, rank) - 1

    def replica_of(self, rank: int) -> int:
        """Which of its stage's replicas ``rank`` is; 0 for all ranks of a grid."""
        stage = self.stage_of(rank)
        return 0 if self.stages[stage].grid is not None else rank - self._firsts[stage]

    def rank_of(self, stage: int, replica: int) -> int:
        """The rank of a replica of ``stage``; of a grid the one that speaks to other stages."""
        return self.ranks_of(stage)[replica]

    def leader_of(self, rank: int) -> int:
        """The rank that speaks to other stages for ``rank``: itself, or the first of its grid."""
        return self.rank_of(self.stage_of(rank), self.replica_of(rank))

    def rank_for(self, stage: int, minibatch: int) -> int:
        """The rank that handles ``minibatch`` in ``stage``."""
        return self.rank_of(stage, minibatch % self.replicas(stage))

    def microbatches_of(self, rank: int, count: int) -> range:
        """Microbatches that ``rank`` handles, of ``count`` of a minibatch."""
        stage = self.stage_of(rank)
        return in_turn(count, replica=self.replica_of(rank), replicas=self.replicas(stage))

    def peers(self, upstream: int, downstream: int) -> Iterator[tuple[int, int]]:
        """Pairs of ranks of two stages that some minibatch passes from one to the other."""
        a, b = self.replicas(upstream), self.replicas(downstream)
        pairs = {(self.rank_for(upstream, m), self.rank_for(downstream, m)) for m in range(a * b)}
        return iter(sorted(pairs))

    def warmup(self, stage: int) -> int:
        """Forwards that a replica of ``stage`` runs ahead of its first backward.

        ``(R_s - 1) // r_s`` with ``R_s`` the replicas from this stage on; at stage 0 one less
        than PipeDream's NOAM (section 3.2), since the next forward comes before the backward.
        """
        replicas = self._replicas_before[-1] - self._replicas_before[stage]
        return (replicas - 1) // self.replicas(stage)

    def to_json(self) -> str:
        """The plan file's text; :meth:`from_json` reads it back."""
        stages = [
            {"layers": list(s.layers), "devices": list(s.devices)}
            | ({} if s.grid is None else {"grid": list(s.grid)})
            for s in self.stages
        ]
        return (
            json.dumps({"config": self.config, "stages": stages, **self.details}, indent=2) + "\n"
        )

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Reads the text of a plan file.

        Raises:
            PlanError: it is no plan file, or its stages do not fit.
        """
        try:
            value = reading.mapping(reading.parse_json(text), "the whole")
            listed = reading.listing(value.get("stages"), "stages")
            stages = tuple(_stage(entry, f"stages[{n}]") for n, entry in enumerate(listed))
            _check_details(value)
        except ValueError as error:
            raise PlanError(
                f"this is no plan: {error}",
                remedy='write {"stages": [{"layers": [first, last], "devices": [...]}, ...]}',
            ) from error
        known = ("stages", "config")
        plan = cls(stages=stages, details={k: v for k, v in value.items() if k not in known})
        if value.get("config", plan.config) != plan.config:
            raise PlanError(
                f"the plan has config {value['config']!r}, its stages are {plan.config!r}",
                remedy="correct one of the two",
            )
        return plan

    @classmethod
    def load(cls, path: Path, *, remedy: str = "remove it: the run then makes it anew") -> Self:
        """Reads a plan file; see :meth:`from_json`."""
        with reading.explained(path, "plan", error=PlanError, remedy=remedy):
            return cls.from_json(reading.read_text(path))


def _stage(entry: Any, place: str) -> Stage:
    """A stage of a plan file. Raises a ValueError that names the place."""
    value = reading.mapping(entry, place)
    layers = _wholes(value.get("layers"), f"{place}.layers")
    if len(layers) != 2:
        raise ValueError(f"{place}.layers has {len(layers)} numbers, not its first and last layer")
    named = reading.listing(value.get("devices"), f"{place}.devices")
    grid = value.get("grid")
    return Stage(
        layers=(layers[0], layers[1]),
        devices=tuple(reading.name(each, f"{place}.devices[{n}]") for n, each in enumerate(named)),
        grid=None if grid is None else tuple(_wholes(grid, f"{place}.grid")),
    )


def _check_details(value: Mapping[str, Any]) -> None:
    """Checks the further entries that runs use. Raises a ValueError that names the place."""
    for key in ("bottleneck_s", "profiling_s"):
        if value.get(key) is not None:
            reading.amount(value[key], key)
    for device, file in reading.mapping(value.get("measured") or {}, "measured").items():
        reading.name(file, f"measured.{device}")
    for n, times in enumerate(reading.listing(value.get("rank_times_s") or [], "rank_times_s")):
        place = f"rank_times_s[{n}]"
        reading.name(reading.mapping(times, place).get("device"), f"{place}.device")
        for key in ("forward", "backward", "update"):
            reading.amount(times.get(key), f"{place}.{key}")
        reading.amount(times.get("load", 0.0), f"{place}.load")


def _wholes(value: Any, place: str) -> list[int]:
    listed = reading.listing(value, place)
    return [reading.whole(each, f"{place}[{n}]") for n, each in enumerate(listed)]


def grids_of(
    replicas: Sequence[object], grids: Sequence[Sequence[int] | None] | None
) -> list[tuple[int, ...] | None]:
    """The grid of each of as many stages as there are ``replicas``."""
    if grids is None:
        return [None] * len(replicas)
    if len(grids) != len(replicas):
        raise PlanError(
            f"{len(grids)} grids are given for {len(replicas)} stages",
            remedy="give one for each stage, such as [null, [1, 2]]; null is for one device",
        )
    return [None if grid is None else tuple(map(int, grid)) for grid in grids]


def devices_of(replicas: Sequence[int], grids: Sequence[Sequence[int] | None] | None) -> list[int]:
    """The number of devices of each stage."""
    shapes = grids_of(replicas, grids)
    return [count * math.prod(shape or (1,)) for count, shape in zip(replicas, shapes, strict=True)]


def balanced(costs: Sequence[float], replicas: Sequence[int]) -> list[int]:
    """The first layer of each stage but the first, so that the dearest stage is cheapest.

    A stage costs the sum of its layers divided by its replicas. Exact (dynamic program over
    stages and last layers). Of equal solutions the one that shares what is left most evenly
    over devices (least sum of squares), and of those the one with the latest cuts: layers
    that cost nothing, such as activations and pooling, stay behind the layer they follow.

    Args:
        costs: of each layer, at least 0.
        replicas: of each stage, at least 1.

    Raises:
        PlanError: there are more stages than layers.
    """
    layers, stages = len(costs), len(replicas)
    if stages > layers:
        raise PlanError(
            f"{stages} stages for {layers} layers",
            remedy="use at most as many stages as there are layers",
        )
    sums = [0.0, *accumulate(costs)]

    def load(stage: int, first: int, end: int) -> float:
        return (sums[end] - sums[first]) / replicas[stage]

    dearest, _ = _best_cuts(layers, stages, load, max)

    def squares(stage: int, first: int, end: int) -> float:
        each = load(stage, first, end)
        return math.inf if each > dearest else replicas[stage] * each**2

    return _best_cuts(layers, stages, squares, operator.add)[1]


def _best_cuts(
    layers: int,
    stages: int,
    cost: Callable[[int, int, int], float],
    combine: Callable[[float, float], float],
) -> tuple[float, list[int]]:
    """Least cost of all stages and its cuts; the latest ones of equal cost.

    ``cost`` is that of a stage from one layer up to another; ``combine`` rises with both of its
    arguments, the cost of the stages before and of one more.
    """
    best: dict[int, tuple[float, list[int]]] = {
        end: (cost(0, 0, end), []) for end in range(1, layers + 1)
    }
    for stage in range(1, stages):
        best = {
            end: min(
                (
                    (combine(best[cut][0], cost(stage, cut, end)), [*best[cut][1], cut])
                    for cut in range(end - 1, stage - 1, -1)
                ),
                key=lambda found: found[0],
            )
            for end in range(stage + 1, layers + 1)
        }
    return best[layers]
