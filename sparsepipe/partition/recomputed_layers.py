"""Which layers of a stage are recomputed, as a setting says it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from sparsepipe.errors import ConfigError

Setting = str | Sequence[int | Sequence[int]] | None
"""``none`` (or None), ``all``, or a list of layers and of pairs of a first and a last layer."""


def recomputed_spans(
    setting: Setting, *, first: int, last: int, num_layers: int
) -> tuple[range, ...]:
    """The spans of a stage of whose activations only the input is kept.

    Args:
        setting: ``none``, ``all`` (the stage is one span), or a list of numbers of layers, of which
            those that follow one another make one span, and of spans [first, last], the last one
            inclusive, each of which is one by itself. Spans end where the stage does.
        first: the stage's first layer.
        last: its last one, inclusive.
        num_layers: of the whole model.

    Raises:
        ConfigError: the setting is something else, names a layer that there is not, or one twice.
    """
    if setting is None or setting == "none":
        return ()
    if setting == "all":
        return (range(first, last + 1),)
    if isinstance(setting, str):
        raise _refusal(f"{setting!r} says not which layers are recomputed")
    spans = _joined([_span(entry, num_layers) for entry in setting])
    cut = [range(max(s.start, first), min(s.stop, last + 1)) for s in spans]
    return tuple(span for span in cut if span)


def _span(entry: object, num_layers: int) -> tuple[range, bool]:
    """An entry of the list, and whether it is a layer, which may join others."""
    alone = _is_layer(entry)
    bounds = [entry, entry] if alone else entry
    if not isinstance(bounds, Sequence) or isinstance(bounds, str):
        raise _neither(entry)
    if len(bounds) != 2 or not all(map(_is_layer, bounds)):
        raise _neither(entry)
    begin, end = map(int, bounds)
    if not 0 <= begin <= end < num_layers:
        raise _refusal(f"{entry!r} is not among the layers 0 to {num_layers - 1}")
    return range(begin, end + 1), alone


def _neither(entry: object) -> ConfigError:
    return _refusal(f"{entry!r} is neither a layer nor a first and a last one")


def _is_layer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _joined(entries: Sequence[tuple[range, bool]]) -> list[range]:
    """In order; layers that follow one another in one span."""
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


def _refusal(what: str) -> ConfigError:
    return ConfigError(
        f"the layers to be recomputed: {what}",
        remedy="give none, all, or a list of layers and of [first, last], such as [3, 4, [7, 12]]",
    )
