"""The option ``recompute`` of a strategy: what is refused of it, and which spans it means."""

from __future__ import annotations

from itertools import chain

from torch import nn

from sparsepipe.errors import ConfigError
from sparsepipe.partition.recompute.layers import (
    Setting,
    StageSpans,
    check_setting,
    recomputed_spans,
)
from sparsepipe.schedule import Plan


def check_recompute(setting: Setting) -> None:
    """Refuses what no plan could suit.

    Raises:
        ConfigError: the setting says no layers, or leaves the choice to somebody who is not here.
    """
    check_setting(setting)
    if setting == "auto":
        raise ConfigError(
            "recompute='auto' has layers chosen by a profile, for the memory of the devices, and "
            "a strategy by itself has neither",
            remedy="run it from the command line, with parallel.strategy.recompute=auto and a "
            "search for the plan; or say which layers, such as {layers: [[0, 5]]}; "
            "sparsepipe.partition.recompute.plan.choose_spans chooses them",
        )


def spans_of(setting: Setting, plan: Plan, layers: nn.Sequential | None = None) -> StageSpans:
    """The spans of each stage that are recomputed.

    Args:
        setting: that was checked.
        plan: the stages.
        layers: the whole Sequential, where it is to be looked through as well.

    Raises:
        ConfigError: there are no such layers or stages, or a span begins with a layer that says it
            works in place on its input, which is what has to be kept.
    """
    spans = recomputed_spans(setting, plan)
    if layers is not None:
        for span in chain.from_iterable(spans):
            _check_first(span, layers[span.start])
    return spans


def _check_first(span: range, layer: nn.Module) -> None:
    """What does not say so is found out when it runs (``runtime/recomputation.py``)."""
    if getattr(layer, "inplace", False):
        raise ConfigError(
            f"recompute: layer {span.start} ({type(layer).__name__}) works in place on its input, "
            f"which is what is kept of layers {span.start} to {span.stop - 1}",
            remedy=f"give layer {span.start} inplace=False, or begin the layers to be recomputed, "
            "or the stage, with one that leaves its input as it is",
        )
