"""The setting ``recompute``: which layers of each stage are recomputed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
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


def check_setting(setting: object) -> None:
    """Refuses settings that suit no model and plan; ``auto`` passes.

    Raises:
        ConfigError: it is something else, or names a layer or a stage twice.
    """
    if isinstance(setting, str):
        if setting not in ("none", "all", "auto"):
            raise _refusal(f"{setting!r} does not say which layers are recomputed")
        return
    if not isinstance(setting, Mapping):
        raise _refusal(f"{setting!r} does not say which layers are recomputed")
    if unknown := [key for key in setting if key not in ("stages", "layers")]:
        raise _refusal(f"{unknown[0]!r} is neither 'stages' nor 'layers'")
    _stages(setting)
    _layers(setting)


def recomputed_spans(setting: Setting, plan: Plan) -> StageSpans:
    """The spans of the stages of a plan that are recomputed.

    A stage that is named is one span. Of the list of layers those that follow one another make one
    span, and each [first, last] is one by itself; where a stage ends spans are cut.

    Raises:
        ConfigError: the setting is something else, names layers or stages that there are not, or
            one twice.
    """
    check_setting(setting)
    stages = [range(stage.layers[0], stage.layers[1] + 1) for stage in plan.stages]
    if isinstance(setting, str):
        assert setting != "auto", "a search chooses layers first"
        return tuple((stage,) if setting == "all" else () for stage in stages)
    whole, spans = _stages(setting), _layers(setting)
    for number in whole:
        if number >= plan.num_stages:
            raise _refusal(
                f"stage {number} is not among the stages 0 to {plan.num_stages - 1}",
                f"name stages of the plan ({plan.config}), {_numbers(plan.num_stages)}",
            )
    for span in spans:
        if span.stop > plan.num_layers:
            raise _refusal(
                f"layer {span.stop - 1} is not among the layers 0 to {plan.num_layers - 1}",
                f"name layers of the network, {_numbers(plan.num_layers)}",
            )
    found = []
    for number, stage in enumerate(stages):
        cut = [range(max(s.start, stage.start), min(s.stop, stage.stop)) for s in spans]
        inside = tuple(span for span in cut if span)
        if number in whole and inside:
            raise _refusal(
                f"layer {inside[0].start} is named more than once, with stage {number} as well"
            )
        found.append((stage,) if number in whole else inside)
    return tuple(found)


def spans_in_plan(plan: Plan) -> StageSpans:
    """The spans of a plan file's entry ``recomputed``, a list of [first, last].

    Raises:
        ConfigError: the plan has no such layers, or one twice.
    """
    return recomputed_spans({"layers": plan.details.get("recomputed", [])}, plan)


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


def _stages(setting: Mapping[str, Sequence[Any]]) -> list[int]:
    named = _list_of(setting, "stages")
    for place, number in enumerate(named):
        if not _is_number(number) or number < 0:
            raise _refusal(f"{number!r} is no stage")
        if number in named[:place]:
            raise _refusal(f"stage {number} is named more than once")
    return named


def _layers(setting: Mapping[str, Sequence[Any]]) -> list[range]:
    return _joined([_span(entry) for entry in _list_of(setting, "layers")])


def _list_of(setting: Mapping[str, Sequence[Any]], name: str) -> list[Any]:
    value = setting.get(name, [])
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise _refusal(f"{name}={value!r} is no list")
    return list(value)


def _span(entry: object) -> tuple[range, bool]:
    """An entry of the list, and whether it is a layer, which may join others."""
    alone = _is_number(entry)
    bounds = [entry, entry] if alone else entry
    if not isinstance(bounds, Sequence) or isinstance(bounds, str):
        raise _neither(entry)
    if len(bounds) != 2 or not all(map(_is_number, bounds)):
        raise _neither(entry)
    begin, end = map(int, bounds)
    if not 0 <= begin <= end:
        raise _refusal(f"{entry!r} names no layers, which are numbered from 0")
    return range(begin, end + 1), alone


def _neither(entry: object) -> ConfigError:
    return _refusal(f"{entry!r} is neither a layer nor a first and a last one")


def _is_number(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _joined(entries: Sequence[tuple[range, bool]]) -> list[range]:
    """Spans in order; consecutive single layers are joined."""
    ordered = sorted(entries, key=lambda entry: entry[0].start)
    for (before, _), (after, _) in pairwise(ordered):
        if after.start < before.stop:
            raise _refusal(f"layer {after.start} is named more than once")
    found: list[tuple[range, bool]] = []
    for span, alone in ordered:
        joins = alone and found and found[-1][1] and found[-1][0].stop == span.start
        start = found.pop()[0].start if joins else span.start
        found.append((range(start, span.stop), alone))
    return [span for span, _ in found]


def _numbers(count: int) -> str:
    """A relative clause on the range of numbers, for remedies."""
    return f"which are numbered from 0 to {count - 1}" if count > 1 else "of which there is 0 only"


def _refusal(what: str, remedy: str | None = None) -> ConfigError:
    return ConfigError(
        f"recompute: {what}",
        remedy=remedy
        or "give none, all, auto, or numbers of stages, of layers and of [first, last], such as "
        "{stages: [0], layers: [14, [17, 22]]}",
    )
