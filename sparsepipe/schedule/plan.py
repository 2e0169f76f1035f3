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
    """Numbers of the microbatches, out of ``count``, that ``replica`` handles in turn."""
    return range(replica, count, replicas)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """Consecutive layers on one or more devices.

    Args:
        layers: numbers of the first and the last layer, both included, from 0.
        devices: names of the devices, one for each replica, or for each rank of the grid.
        grid: shape of the grid of ranks that share each sample; None: ranks do not share samples.
    """

    layers: tuple[int, int]
    devices: tuple[str, ...]
    grid: tuple[int, ...] | None = None

    @property
    def replicas(self) -> int:
        """r, the number of replicas; a grid counts as one."""
        return len(self.devices) if self.grid is None else 1

    @property
    def num_layers(self) -> int:
        """Number of layers of this stage."""
        return self.layers[1] - self.layers[0] + 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Stages that cover a model's layers, in order.

    Args:
        stages: at least one; each begins with the layer after the last of the one before.
        details: further entries of the plan file: ``bottleneck_s``, ``stage_times_s``,
            ``rank_times_s``, ``transfer_times_s``, ``cost_model``, ``strategy``, and the inputs of
            the search.

    Raises:
        PlanError: the stages leave a gap or overlap, or a stage has no device, or not as many as
            its grid has positions.
    """

    stages: tuple[Stage, ...]
    details: Mapping[str, Any] = field(default_factory=dict, compare=False)
    _firsts: tuple[int, ...] = field(init=False, repr=False, compare=False)
    """The first rank of each stage, then the number of ranks: kept, since plans may have thousands
    of ranks."""
    _replicas_before: tuple[int, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not self.stages:
            raise PlanError("the plan has no stages", remedy="give it at least one")
        begin = 0
        for number, stage in enumerate(self.stages):
            first, last = stage.layers
            if first != begin or last < first:
                raise PlanError(
                    f"stage {number} has the first and last layers [{first}, {last}], but should "
                    f"begin with layer {begin} and have at least one layer",
                    remedy="let stages follow one another without a gap, beginning with layer 0",
                )
            if stage.grid is not None:
                size = math.prod(stage.grid) if stage.grid and min(stage.grid) > 0 else 0
                if size < 2 or size != len(stage.devices):
                    shape = " x ".join(map(str, stage.grid))
                    raise PlanError(
                        f"the devices of stage {number}, {len(stage.devices)} in all, cannot form "
                        f"a grid of {shape}",
                        remedy="give the stage one replica and as many devices as the grid has "
                        "positions, at least two; leave the grid out for one device",
                    )
            if not stage.devices:
                raise PlanError(f"stage {number} has no device", remedy="give it at least one")
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
        """A plan from numbers of replicas and cuts, with devices called ``rank 0``, ``rank 1`` etc.

        Args:
            config: number of replicas of each stage, such as ``"2-1"``; a grid counts as one.
            cuts: the first layer of each stage except stage 0.
            num_layers: number of the model's layers.
            grids: shape of each stage's grid, None for a stage without one; None: no grids.
        """
        parts = config.split("-")
        if not all(part.isdecimal() and int(part) for part in parts):
            raise PlanError(
                f"config={config!r} does not say how many replicas each stage has",
                remedy="write one number for each stage, such as '2-1' for three devices",
            )
        if len(cuts) != len(parts) - 1:
            raise PlanError(
                f"cuts={list(cuts)} does not fit the number of stages in config={config!r}",
                remedy="give the first layer of each stage except stage 0: "
                f"{len(parts) - 1} in all",
            )
        bounds = [0, *cuts, num_layers]
        if any(b <= a for a, b in pairwise(bounds)):
            raise PlanError(
                f"cuts {list(cuts)} do not split {num_layers} layers into {len(parts)} stages",
                remedy=f"give increasing numbers from 1 to {num_layers - 1}, or fewer stages",
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
        """S, the number of stages."""
        return len(self.stages)

    @property
    def num_ranks(self) -> int:
        """R, the number of ranks, one for each device of each stage."""
        return self._firsts[-1]

    @property
    def num_layers(self) -> int:
        """L, the number of layers of the model."""
        return self.stages[-1].layers[1] + 1

    @property
    def config(self) -> str:
        """The number of replicas of each stage, such as ``"2-1"``; a grid counts as one."""
        return "-".join(str(stage.replicas) for stage in self.stages)

    @property
    def cuts(self) -> tuple[int, ...]:
        """The first layer of each stage except stage 0."""
        return tuple(stage.layers[0] for stage in self.stages[1:])

    @property
    def replicas_of_stages(self) -> tuple[int, ...]:
        """The number of replicas of each stage."""
        return tuple(stage.replicas for stage in self.stages)

    @property
    def has_grids(self) -> bool:
        """Whether the ranks of any stage form a grid."""
        return any(stage.grid is not None for stage in self.stages)

    @property
    def without_grids(self) -> Plan:
        """The same plan with only the first device of each grid, for schedules and drawings."""
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
        """Number of ``rank`` among its stage's replicas, from 0; 0 for all ranks of a grid."""
        stage = self.stage_of(rank)
        return 0 if self.stages[stage].grid is not None else rank - self._firsts[stage]

    def rank_of(self, stage: int, replica: int) -> int:
        """The rank of a replica of ``stage``; for a grid, the rank that communicates with other
        stages.
        """
        return self.ranks_of(stage)[replica]

    def leader_of(self, rank: int) -> int:
        """The rank that communicates with other stages for ``rank``: itself or its grid's first."""
        return self.rank_of(self.stage_of(rank), self.replica_of(rank))

    def rank_for(self, stage: int, minibatch: int) -> int:
        """The rank that handles ``minibatch``, or the microbatch with this number, in ``stage``."""
        return self.rank_of(stage, minibatch % self.replicas(stage))

    def microbatches_of(self, rank: int, count: int) -> range:
        """Numbers of the microbatches that ``rank`` handles, if each minibatch has ``count``."""
        stage = self.stage_of(rank)
        return in_turn(count, replica=self.replica_of(rank), replicas=self.replicas(stage))

    def peers(self, upstream: int, downstream: int) -> Iterator[tuple[int, int]]:
        """Yields (upstream, downstream) pairs of ranks that handle a common minibatch, sorted."""
        a, b = self.replicas(upstream), self.replicas(downstream)
        pairs = {(self.rank_for(upstream, m), self.rank_for(downstream, m)) for m in range(a * b)}
        return iter(sorted(pairs))

    def warmup(self, stage: int) -> int:
        """Number of forwards of a replica of ``stage`` before it alternates forwards and backwards.

        This is ``(R_s - 1) // r_s``, where ``r_s`` is the number of replicas of this stage and
        ``R_s`` that of this and all later stages. At stage 0 it is one less than PipeDream's NOAM
        (section 3.2), since the next forward comes before the backward.
        """
        replicas = self._replicas_before[-1] - self._replicas_before[stage]
        return (replicas - 1) // self.replicas(stage)

    def to_json(self) -> str:
        """The text of the plan file, which :meth:`from_json` reads back."""
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
            PlanError: the text is not that of a valid plan file.
        """
        try:
            value = reading.mapping(reading.parse_json(text), "its content")
            listed = reading.listing(value.get("stages"), "stages")
            stages = tuple(_stage(entry, f"stages[{n}]") for n, entry in enumerate(listed))
            _check_details(value)
        except ValueError as error:
            raise PlanError(
                f"this is not a valid plan: {error}",
                remedy='write {"stages": [{"layers": [first, last], "devices": [...]}, ...]}',
            ) from error
        known = ("stages", "config")
        plan = cls(stages=stages, details={k: v for k, v in value.items() if k not in known})
        if value.get("config", plan.config) != plan.config:
            raise PlanError(
                f"the plan's config is {value['config']!r}, but its stages make {plan.config!r}",
                remedy="correct the config or the stages",
            )
        return plan

    @classmethod
    def load(cls, path: Path, *, remedy: str = "remove it: the run then makes a new one") -> Self:
        """Reads a plan file; ``remedy`` is for a file that cannot be read or is not valid."""
        with reading.explained(path, "plan", error=PlanError, remedy=remedy):
            return cls.from_json(reading.read_text(path))


def _stage(entry: Any, place: str) -> Stage:
    """Reads the stage at the path ``place`` of a plan file; a ValueError names the wrong entry."""
    value = reading.mapping(entry, place)
    layers = _wholes(value.get("layers"), f"{place}.layers")
    if len(layers) != 2:
        raise ValueError(f"{place}.layers is {layers}, not two numbers (first, last)")
    named = reading.listing(value.get("devices"), f"{place}.devices")
    grid = value.get("grid")
    return Stage(
        layers=(layers[0], layers[1]),
        devices=tuple(reading.name(each, f"{place}.devices[{n}]") for n, each in enumerate(named)),
        grid=None if grid is None else tuple(_wholes(grid, f"{place}.grid")),
    )


def _check_details(value: Mapping[str, Any]) -> None:
    """Raises a ValueError if an entry that runs read, other than the stages, is not valid."""
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
    """The shape of each stage's grid (None: no grid); ``replicas``: one entry for each stage."""
    if grids is None:
        return [None] * len(replicas)
    if len(grids) != len(replicas):
        raise PlanError(
            f"the number of grids is {len(grids)}, but that of stages is {len(replicas)}",
            remedy="give one for each stage, such as [null, [1, 2]]: null if it has no grid",
        )
    return [None if grid is None else tuple(map(int, grid)) for grid in grids]


def devices_of(replicas: Sequence[int], grids: Sequence[Sequence[int] | None] | None) -> list[int]:
    """The number of devices of each stage: replicas times positions of its grid, if it has one."""
    shapes = grids_of(replicas, grids)
    return [count * math.prod(shape or (1,)) for count, shape in zip(replicas, shapes, strict=True)]


def balanced(costs: Sequence[float], replicas: Sequence[int]) -> list[int]:
    """The first layer of each stage except stage 0, so that the most expensive stage costs least.

    A stage costs the sum of its layers divided by its number of replicas. The solution is exact
    (dynamic program over stages and last layers). Among equal solutions, it is the one that spreads
    costs most evenly over devices (least sum of squares), then the one with the latest cuts: layers
    that cost nothing, such as activations and pooling, stay with the layer before them.

    Args:
        costs: cost of each layer, at least 0.
        replicas: number of replicas of each stage, at least 1.

    Raises:
        PlanError: there are more stages than layers.
    """
    layers, stages = len(costs), len(replicas)
    if stages > layers:
        raise PlanError(
            f"the plan has more stages ({stages}) than the model has layers ({layers})",
            remedy="use at most one stage for each layer",
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
    """The least combined cost of all stages, and its cuts; among equal costs, the latest cuts.

    ``cost`` takes a stage, its first layer and the layer after its last. ``combine`` adds the cost
    of one more stage to that of the stages before; it must rise with both arguments.
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
