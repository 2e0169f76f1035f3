"""Chooses the layers that each stage recomputes, so that the stage fits its devices.

This is for synchronous schedules: weights have one version, and microbatches are in flight. A span
is a run of layers of which only the input is kept. With a price for each byte that a microbatch
keeps and a cap on the bytes inside the largest span, the best choice of spans is a shortest path
through the layers. Among the paths for many prices and caps, the fastest with which the stage fits
is taken; then layers are removed from its spans, the slowest first, while the stage still fits. A
choice that takes a few percent less time may be missed.

Shape suffixes: I cut positions (in II, a stage begins at the first and ends at the second); F first
layers of stages; P prices; C caps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sparsepipe.cluster.places import device_name
from sparsepipe.errors import ConfigError
from sparsepipe.partition.activation_checkpointing.setting import StageSpans
from sparsepipe.partition.activation_checkpointing.stage_memory import StageCost, moved
from sparsepipe.partition.costs.layers import Floats
from sparsepipe.partition.memory import MIB, MemoryModel, Microbatches, room_bytes
from sparsepipe.profiling import Profile
from sparsepipe.schedule import Plan

Paths = NDArray[np.float64]
"""Best paths [4, F, P, C] to a cut position: cost, bytes kept, seconds of recomputation, and bytes
inside the largest span."""


class SpanChoices:
    """Chooses the spans to recompute, for all possible stages of a chain of layers."""

    def __init__(self, chain: StageCost) -> None:
        self._chain = chain
        layers, length = chain.layers, len(chain.layers)
        self._until_s_I = np.cumsum([0.0, *(layer.forward_s for layer in layers)])
        saved_I = np.cumsum([0.0, *(layer.saved_bytes for layer in layers)])
        begin_I = np.array([layer.begin_bytes for layer in layers])
        end_I = np.array([layer.end_bytes for layer in layers])
        anew_I = np.array([chain.inside_bytes(range(first, first)) for first in range(length)])
        self._inside_II = saved_I[None, :] - saved_I[:-1, None] + anew_I[:, None]
        self._plain_II = (saved_I[1:] + end_I)[None, :] - (saved_I[:-1] - begin_I)[:, None]
        sizes = np.unique(self._inside_II[np.triu_indices(length, 1, length + 1)])
        places = np.linspace(0, len(sizes) - 1, min(len(sizes), max(12, min(64, 1600 // length))))
        self._caps_C: Floats = sizes[np.ceil(places).astype(np.intp)]
        # From a cost of bytes alone, with seconds for ties, to one of almost only seconds.
        seconds, kept = float(self._until_s_I[-1]) or 1.0, float(saved_I[-1]) or 1.0
        self._second_cost_P = np.array([1e-9, *np.geomspace(1e-3, 1e3, 47)]) / seconds
        self._byte_cost = 1.0 / kept
        self._ends: list[Paths] = []

    def seconds_II(self, room_II: Floats, *, in_flight: float) -> Floats:
        """Upper bound [I, I] of the seconds of recomputation with which each possible stage, with
        ``in_flight`` microbatches, fits into ``room_II`` bytes; infinite if it does not fit.
        """
        length = len(self._chain.layers)
        if not self._ends:
            self._ends = self._walk(range(length), length)
        found_II = np.zeros(room_II.shape)
        for end, paths in enumerate(self._ends, 1):
            room_F = room_bytes(1.0) * room_II[:end, end]
            _, kept, time_s, inside = paths[:, :end]
            fits_FPC = in_flight * kept + inside <= room_F[:, None, None]
            seconds_F = np.where(fits_FPC, time_s, np.inf).min(axis=(1, 2))
            is_plain_F = in_flight * self._plain_II[:end, end - 1] <= room_F
            found_II[:end, end] = np.where(is_plain_F, 0.0, seconds_F)
        return found_II

    def cheapest(
        self, first: int, end: int, limit_bytes: float, *, in_flight: float
    ) -> list[range] | None:
        """The fastest spans found with which a stage of layers ``first`` to ``end - 1`` fits into
        ``limit_bytes``, as layer numbers that count from ``first``; None if none fits.
        """
        limit = room_bytes(limit_bytes)
        if in_flight * self._plain_II[first, end - 1] <= limit:
            return []
        paths = self._walk(range(first, first + 1), end, marks=end)[-1][:, 0]
        fits_PC = in_flight * paths[1] + paths[3] <= limit
        stage = StageCost(
            layers=self._chain.layers[first:end],
            input_bytes=self._chain.border_bytes(first, True),
            in_flight=in_flight,
        )
        found = []
        for marks in np.unique(paths[4 + first :, fits_PC], axis=1).T:
            starts = np.flatnonzero(marks == _STARTS).tolist()
            is_over = np.append(marks != _GOES_ON, True)
            ends = [start + 1 + int(is_over[start + 1 :].argmax()) for start in starts]
            found.append(_given_back(stage, list(map(range, starts, ends)), limit))
        return min(
            found, key=lambda spans: (stage.time_s(spans), stage.kept_bytes(spans)), default=None
        )

    def _walk(self, firsts: range, last: int, *, marks: int = 0) -> list[Paths]:
        """Best paths to each end up to ``last``; marks of ``marks`` layers follow the figures."""
        chain, ends, begun = self._chain, list[Paths](), dict[int, Paths]()
        shape = 4 + marks, len(firsts), len(self._second_cost_P), len(self._caps_C)
        kept, again = np.full(shape, np.inf), np.full(shape, np.inf)
        for place in range(firsts.start, last + 1):
            if place > firsts.start:
                layer = chain.layers[place - 1]
                kept = _better(
                    self._plus(kept, layer.saved_bytes),
                    self._plus(again, layer.saved_bytes + layer.begin_bytes),
                )
                again = np.full(shape, np.inf)
                for begin, paths in begun.items():
                    seconds = float(self._until_s_I[place] - self._until_s_I[begin])
                    inside = self._inside_II[begin, place]
                    longer = self._plus(paths, 0.0, seconds)
                    longer[0] = np.where(self._caps_C < inside, np.inf, longer[0])
                    longer[3] = np.maximum(longer[3], inside)
                    if marks:
                        longer[4 + begin], longer[5 + begin : 4 + place] = _STARTS, _GOES_ON
                    again = _better(again, longer)
                ends.append(
                    _better(
                        self._plus(kept, layer.end_bytes), self._plus(again, layer.output_bytes)
                    )
                )
            if place in firsts:  # as if the layer before were recomputed
                again[:, place - firsts.start] = 0.0
            if place < last:
                begun[place] = _better(
                    self._plus(kept, chain.border_bytes(place, False)),
                    self._plus(again, chain.border_bytes(place, True)),
                )
        return ends

    def _plus(self, paths: Paths, num_bytes: float, time_s: float = 0.0) -> Paths:
        longer = paths.copy()
        longer[0] += self._byte_cost * num_bytes + (self._second_cost_P * time_s)[:, None]
        longer[1] += num_bytes
        longer[2] += time_s
        return longer


_STARTS, _GOES_ON = 2.0, 1.0
"""Marks of a layer that begins a recomputed span and of one that continues it; others have 0."""


def _better(one: Paths, other: Paths) -> Paths:
    return np.where(one[0] <= other[0], one, other)


def _given_back(stage: StageCost, spans: list[range], limit: float) -> list[range]:
    """Removes layers from spans, slowest first, where the stage still fits into ``limit`` bytes."""
    slowest = sorted(
        (layer for span in spans for layer in span), key=lambda n: -stage.layers[n].forward_s
    )
    for layer in slowest:
        number = next(n for n, span in enumerate(spans) if layer in span)
        span = spans[number]
        parts = [part for part in (range(span.start, layer), range(layer + 1, span.stop)) if part]
        fewer = [*spans[:number], *parts, *spans[number + 1 :]]
        if stage.peak_bytes(fewer) <= limit:
            spans = fewer
    return spans


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedStage:
    """A stage with its devices, for which layers to recompute are chosen.

    All devices recompute the same layers: each layer counts with its longest time and most bytes on
    any device, and the device with the least memory must hold the stage.

    Args:
        first: index of the first layer.
        last: index of the last layer, inclusive.
        profiles: the profiles of its kinds of devices.
        replicas: r, number of devices; 2 may stand for any number above 1.
        limit_bytes: the least memory of a device; infinite if unknown.
        in_flight: peak of microbatches in flight on a device, in multiples of the largest one.
        share: size of the largest microbatch as a fraction of the profiles' batch.
    """

    first: int
    last: int
    profiles: tuple[Profile, ...]
    replicas: int
    limit_bytes: float
    in_flight: float
    share: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RecomputedLayers:
    """Layers to recompute, with the resulting seconds and bytes of each stage.

    Attributes:
        spans: the recomputed spans of each stage.
        times_s: seconds of recomputation on the slowest device, for a batch of the profiles' size.
        peaks_bytes: the most bytes that a device keeps at a time for backward passes.
        rooms_bytes: bytes that a device can keep for backward passes; infinite if unlimited.
        beside_bytes: bytes that it keeps besides, such as weights; 0 if memory does not count.
    """

    spans: StageSpans
    times_s: tuple[float, ...]
    peaks_bytes: tuple[float, ...]
    rooms_bytes: tuple[float, ...]
    beside_bytes: tuple[float, ...]


def choose_spans(
    plan: Plan,
    profiles: Mapping[str, Profile],
    limits_bytes: Mapping[str, float],
    *,
    memory: MemoryModel,
    microbatches: Microbatches,
) -> RecomputedLayers:
    """Chooses spans to recompute with which all stages of a plan fit their devices.

    ``profiles`` are by device model, ``limits_bytes`` (memory) by device ``host/model/number``.
    """
    stages = []
    for number, stage in enumerate(plan.stages):
        names = dict.fromkeys(map(device_name, stage.devices))
        stages.append(
            PlacedStage(
                first=stage.layers[0],
                last=stage.layers[1],
                profiles=tuple(profiles[name] for name in names),
                replicas=stage.replicas,
                limit_bytes=min(limits_bytes[device] for device in stage.devices),
                in_flight=microbatches.in_flight(plan, number),
                share=microbatches.share(plan.replicas(0)),
            )
        )
    return recompute_stages(stages, memory)


def recompute_stages(
    stages: Sequence[PlacedStage], memory: MemoryModel | None, spans: StageSpans | None = None
) -> RecomputedLayers:
    """Returns seconds and bytes of stages that recompute ``spans``, even if they do not fit; None:
    the fastest spans found with which each stage fits its devices.

    Raises:
        ConfigError: ``spans`` is None, and no spans were found with which a stage fits.
    """
    found, times_s, peaks, rooms, besides = [], [], [], [], []
    for number, stage in enumerate(stages):
        cost = StageCost.worst(
            [
                StageCost.of(
                    profile,
                    first=stage.first,
                    last=stage.last,
                    in_flight=stage.in_flight,
                    share=stage.share,
                )
                for profile in stage.profiles
            ]
        )
        beside, room = 0.0, float("inf")
        if memory is not None:
            own = slice(stage.first, stage.last + 1)
            parameters = (
                sum(layer.parameter_bytes for layer in profile.layers[own])
                for profile in stage.profiles
            )
            beside = memory.beside_bytes(max(parameters), replicas=stage.replicas)
            room = room_bytes(stage.limit_bytes) - beside
        chosen: list[range] | None = None
        if spans is not None:
            chosen = moved(spans[number], -stage.first)
        elif room >= 0:
            length = len(cost.layers)
            chosen = SpanChoices(cost).cheapest(0, length, room, in_flight=stage.in_flight)
        if chosen is None:
            least = min(cost.peak_bytes([range(len(cost.layers))]), cost.peak_bytes(()))
            raise ConfigError(
                f"recompute=auto: stage {number} does not fit its devices: besides weights they "
                f"have {max(0.0, room) / MIB:,.1f} MiB for its activations, which take "
                f"{least / MIB:,.1f} MiB with all or none of its layers recomputed",
                remedy=f"use {MORE_ROOM}",
            )
        found.append(tuple(moved(chosen, stage.first)))
        times_s.append(cost.time_s(chosen) / stage.share)
        peaks.append(cost.peak_bytes(chosen))
        rooms.append(room)
        besides.append(beside)
    return RecomputedLayers(
        spans=tuple(found),
        times_s=tuple(times_s),
        peaks_bytes=tuple(peaks),
        rooms_bytes=tuple(rooms),
        beside_bytes=tuple(besides),
    )


MORE_ROOM = (
    "devices with more memory, more devices, more microbatches "
    "(parallel.strategy.microbatches), parallel=sync_1f1b if another schedule is set, a smaller "
    "data.batch_size, or an optimizer with less state"
)
"""The remedy, after ``use``, for a plan that does not fit, whichever layers are recomputed."""
