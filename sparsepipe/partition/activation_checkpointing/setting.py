"""The setting ``recompute``: which layers of each stage are recomputed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from sparsepipe.errors import ConfigError
from sparsepipe.schedule import Plan

Setting = str | Mapping[str, Sequence[Any]]
"""``none``, ``all``, or a mapping: ``stages``, a list of numbers of stages, and ``layers``, a list
of numbers of layers and of spans [first, last], the last one inclusive as in a plan file."""

OwnSpans = tuple[range, ...]
"""The recomputed spans of a stage in order, of which only the input is kept."""

StageSpans = tuple[OwnSpans, ...]
"""The same, of each stage."""


_EXPECTED = ("bottleneck_s", "bottleneck", "stage_times_s", "rank_times_s", "memory_bytes")
"""Entries of a plan file that its search expected, and that depend on the recomputed layers."""


def check_setting(setting: object) -> None:
    """Refuses settings that suit no model and plan; ``auto`` passes.

    Raises:
        ConfigError: it is something else, or names a layer or a stage twice.
    """
    if setting not in ("none", "all", "auto"):
        _parsed(setting)


def recomputed_spans(setting: Setting, plan: Plan) -> StageSpans:
    """The spans of the stages of a plan that are recomputed.

    A stage that is named is one span. Of the list of layers those that follow one another make one
    span, and each [first, last] is one by itself; where a stage ends spans are cut.

    Raises:
        ConfigError: the setting is malformed, or names a layer or stage twice or one that the plan
            lacks.
    """
    stages = [range(stage.layers[0], stage.layers[1] + 1) for stage in plan.stages]
    if setting in ("none", "all"):
        return tuple((stage,) if setting == "all" else () for stage in stages)
    assert setting != "auto", "a search chooses layers first"
    whole, spans = _parsed(setting)
    if max(whole, default=0) >= plan.num_stages:
        raise _refusal(
            f"the plan ({plan.config}) has stages 0 to {plan.num_stages - 1}, not {whole}"
        )
    if spans and spans[-1].stop > plan.num_layers:
        raise _refusal(
            f"the network has layers 0 to {plan.num_layers - 1}, not {spans[-1].stop - 1}"
        )
    found = []
    for number, stage in enumerate(stages):
        cut = [range(max(s.start, stage.start), min(s.stop, stage.stop)) for s in spans]
        inside = tuple(span for span in cut if span)
        if number in whole and inside:
            raise _refusal(f"layer {inside[0].start} is named twice, by stage {number} as well")
        found.append((stage,) if number in whole else inside)
    return tuple(found)


def spans_in_plan(plan: Plan) -> StageSpans:
    """The spans of a plan file's entry ``recomputed``, a list of [first, last].

    Raises:
        ConfigError: the plan has no such layers, or one twice.
    """
    return recomputed_spans({"layers": plan.details.get("recomputed", [])}, plan)


def with_spans(plan: Plan, spans: StageSpans) -> Plan:
    """The plan with these recomputed layers in its details.

    What a search has expected of it with other layers to recompute is left out.
    """
    bounds = bounds_of(spans)
    if bounds == bounds_of(spans_in_plan(plan)):
        return plan
    left_out = ("recomputed", *_EXPECTED)
    details = {key: value for key, value in plan.details.items() if key not in left_out}
    return replace(plan, details={**details, "recomputed": bounds} if bounds else details)


def as_setting(spans: StageSpans) -> Setting:
    """The setting that names these spans, such as a search has chosen."""
    if not any(spans):
        return "none"
    return {"layers": bounds_of(spans)}


def bounds_of(spans: StageSpans) -> list[list[int]]:
    """First and last layer of each span, for plan files and results."""
    return [[span.start, span.stop - 1] for stage in spans for span in stage]


def in_words(spans: StageSpans) -> str:
    """The layers as text for log lines and tables."""
    bounds = bounds_of(spans)
    texts = [f"{first}" if first == last else f"{first}-{last}" for first, last in bounds]
    return ", ".join(texts) or "none"


def _parsed(setting: object) -> tuple[list[int], list[range]]:
    """Numbers of stages, and spans of layers in order; consecutive single layers are joined."""
    if not isinstance(setting, Mapping) or not {*setting} <= {"stages", "layers"}:
        raise _refusal(f"{setting!r} does not say which layers are recomputed")
    stages, layers = ([*(setting.get(name) or ())] for name in ("stages", "layers"))
    entries = [entry if isinstance(entry, Sequence) else (entry, entry) for entry in layers]
    numbers = [*stages, *(number for entry in entries for number in entry)]
    if not all(type(number) is int and number >= 0 for number in numbers):
        raise _refusal(f"{setting!r} holds what is not a number of a stage or a layer")
    if any(len(entry) != 2 or entry[0] > entry[1] for entry in entries):
        raise _refusal(f"{setting!r} holds a span that is not [first, last]")
    found: list[range] = []
    may_join = False
    ordered = sorted(zip(entries, layers, strict=True), key=lambda each: each[0][0])
    for (first, last), given in ordered:
        if found and first < found[-1].stop:
            raise _refusal(f"layer {first} is named twice")
        alone = not isinstance(given, Sequence)
        joins = may_join and alone and found[-1].stop == first
        start = found.pop().start if joins else first
        found.append(range(start, last + 1))
        may_join = alone
    if len({*stages}) < len(stages):
        raise _refusal(f"{setting!r} names a stage twice")
    return stages, found


def _refusal(what: str) -> ConfigError:
    return ConfigError(
        f"recompute: {what}",
        remedy="give none, all, auto, or numbers of stages, of layers and of [first, last], such "
        "as {stages: [0], layers: [14, [17, 22]]}",
    )
