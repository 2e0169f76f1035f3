"""The setting ``recompute``: which layers of each stage are recomputed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from sparsepipe.errors import ConfigError
from sparsepipe.schedule import Plan

Setting = str | Mapping[str, Sequence[Any]]
"""``none``, ``all``, ``auto``, or a mapping with ``stages``, a list of stage numbers, and
``layers``, a list of layer numbers and of spans [first, last], the last one inclusive."""

OwnSpans = tuple[range, ...]
"""The recomputed spans of one stage, in order; only the input of a span is kept."""

StageSpans = tuple[OwnSpans, ...]
"""The recomputed spans of each stage."""

_EXPECTED = ("bottleneck_s", "bottleneck", "stage_times_s", "rank_times_s", "memory_bytes")
"""Entries of a plan file that depend on which layers are recomputed."""


def check_setting(setting: object) -> None:
    """Raises a ConfigError if the setting is malformed or names a layer twice."""
    if setting not in ("none", "all", "auto"):
        _parsed(setting)


def recomputed_spans(setting: Setting, plan: Plan) -> StageSpans:
    """The spans that each stage of a plan recomputes; ``setting`` must not be ``auto``.

    A named stage is one span. Named layers that follow one another make one span, and each [first,
    last] is a span of its own. Spans are cut where a stage ends.
    """
    stages = [range(stage.layers[0], stage.layers[1] + 1) for stage in plan.stages]
    if setting in ("none", "all"):
        return tuple((stage,) if setting == "all" else () for stage in stages)
    assert setting != "auto", "a search chooses layers first"
    whole, spans = _parsed(setting)
    if max(whole, default=0) >= plan.num_stages:
        raise _refusal(
            f"the last stage of the plan ({plan.config}) is {plan.num_stages - 1}, not {max(whole)}"
        )
    if spans and spans[-1].stop > plan.num_layers:
        raise _refusal(
            f"the last layer of the network is {plan.num_layers - 1}, not {spans[-1].stop - 1}"
        )
    found = []
    for number, stage in enumerate(stages):
        cut = [range(max(s.start, stage.start), min(s.stop, stage.stop)) for s in spans]
        inside = tuple(span for span in cut if span)
        if number in whole and inside:
            raise _refusal(f"layer {inside[0].start} is named twice, also by stage {number}")
        found.append((stage,) if number in whole else inside)
    return tuple(found)


def spans_in_plan(plan: Plan) -> StageSpans:
    """The recomputed spans that the plan's entry ``recomputed`` lists as [first, last]."""
    return recomputed_spans({"layers": plan.details.get("recomputed", [])}, plan)


def with_spans(plan: Plan, spans: StageSpans) -> Plan:
    """The plan with ``spans`` as the recomputed layers in its details; if these change, without the
    times and bytes that a search predicted for the previous ones.
    """
    bounds = bounds_of(spans)
    if bounds == bounds_of(spans_in_plan(plan)):
        return plan
    left_out = ("recomputed", *_EXPECTED)
    details = {key: value for key, value in plan.details.items() if key not in left_out}
    return replace(plan, details={**details, "recomputed": bounds} if bounds else details)


def bounds_of(spans: StageSpans) -> list[list[int]]:
    """The first and last layer of each span of all stages, for plan files and results."""
    return [[span.start, span.stop - 1] for stage in spans for span in stage]


def in_words(spans: StageSpans) -> str:
    """The recomputed layers as text for log lines and tables, such as ``3, 5-8``, or ``none``."""
    bounds = bounds_of(spans)
    texts = [f"{first}" if first == last else f"{first}-{last}" for first, last in bounds]
    return ", ".join(texts) or "none"


def _parsed(setting: object) -> tuple[list[int], list[range]]:
    """The setting's stage numbers, and its spans in order; consecutive single layers are joined."""
    if not isinstance(setting, Mapping) or not {*setting} <= {"stages", "layers"}:
        raise _refusal(f"{setting!r} is not none, all, auto or a mapping with stages and layers")
    stages, layers = ([*(setting.get(name) or ())] for name in ("stages", "layers"))
    pairs = [entry if isinstance(entry, Sequence) else (entry, entry) for entry in layers]
    numbers = [*stages, *(number for pair in pairs for number in pair)]
    if not all(type(number) is int and number >= 0 for number in numbers):
        raise _refusal(f"{setting!r} contains something other than stage and layer numbers")
    if any(len(pair) != 2 or pair[0] > pair[1] for pair in pairs):
        raise _refusal(f"{setting!r} contains a span other than [first, last]")
    found: list[range] = []
    may_join = False
    ordered = sorted(zip(pairs, layers, strict=True), key=lambda each: each[0][0])
    for (first, last), given in ordered:
        if found and first < found[-1].stop:
            raise _refusal(f"layer {first} is named twice")
        alone = not isinstance(given, Sequence)
        joins = may_join and alone and found[-1].stop == first
        start = found.pop().start if joins else first
        found.append(range(start, last + 1))
        may_join = alone
    return stages, found


def _refusal(what: str) -> ConfigError:
    return ConfigError(
        f"recompute: {what}",
        remedy="give none, all, auto, or stage numbers, layer numbers and spans [first, last] of "
        "the model, such as {stages: [0], layers: [14, [17, 22]]}",
    )
