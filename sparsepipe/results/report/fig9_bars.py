"""Our figures of a bar of the paper's Fig. 9: of one strategy on some GPUs, from finished runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from sparsepipe.results.fig9_settings import devices_of, dp_minibatch_s, minibatch_s
from sparsepipe.results.report.cell import Ours, Row
from sparsepipe.results.report.rows import mean_of
from sparsepipe.results.sweep_table import plan_text


def time(runs: Sequence[Row]) -> Ours | None:
    """Milliseconds between two minibatches at the steady pace."""
    return mean_of(runs, minibatch_s, scale=1e3)


def speedup(runs: Sequence[Row], own: Sequence[Row], others: Sequence[Row]) -> Ours | None:
    """Over data parallelism: its own runs, or what the others tell of it.

    Args:
        runs: of the bar.
        own: of data parallelism.
        others: all on as many GPUs.
    """
    told = [row.get("dp_minibatch_s") for row in others]
    return _over(runs, dp_minibatch_s([minibatch_s(row) for row in own], told), own)


def speedup_without_overlap(runs: Sequence[Row], others: Sequence[Row]) -> Ours | None:
    """Over data parallelism that sums gradients after the backward, which simulations tell.

    Args:
        runs: of the bar.
        others: all on as many GPUs.
    """
    told = [row.get("dp_without_overlap_minibatch_s") for row in others]
    return _over(runs, dp_minibatch_s([], told), ())


def over_runs(runs: Sequence[Row], base: Sequence[Row]) -> Ours | None:
    """How many times as fast as other runs, in the mean of these.

    Args:
        runs: of the bar.
        base: the others.
    """
    return _over(runs, dp_minibatch_s([minibatch_s(row) for row in base], ()), base)


def off_percent(runs: Sequence[Row], simulated: Sequence[Row]) -> Ours | None:
    """By how many percent what was emulated is faster than its simulation.

    Args:
        runs: of the bar.
        simulated: of the same bar over the same link.
    """
    ratio = over_runs(runs, simulated)
    if ratio is None:
        return None
    spread = ratio.spread and (_percent(ratio.spread[0]), _percent(ratio.spread[1]))
    return replace(ratio, value=_percent(float(ratio.value)), spread=spread)


def time_scale(runs: Sequence[Row]) -> Ours | None:
    """By which emulations were stretched: their seconds are the cluster's, whatever it is."""
    told = [row for row in runs if row.get("time_scale")]
    texts = dict.fromkeys(f"{row['time_scale']:g}" for row in told)
    return Ours(value=" or ".join(texts), runs=tuple(told)) if told else None


def plan(runs: Sequence[Row]) -> Ours | None:
    """In words; several where runs have unlike ones."""
    if not runs:
        return None
    plans = dict.fromkeys(
        plan_text(str(run.get("plan_config") or devices_of(run)), run.get("plan_cuts") or ())
        for run in runs
    )
    return Ours(value=" or ".join(plans), runs=tuple(runs))


def _over(runs: Sequence[Row], base_s: float | None, base: Sequence[Row]) -> Ours | None:
    """Base over runs, in seconds of a minibatch; it comes from the runs of the base too."""
    if base_s is None:
        return None
    found = mean_of(runs, lambda row: base_s / minibatch_s(row))
    if found is None:
        return None
    others = [run for run in base if not any(run is each for each in found.runs)]
    return replace(found, runs=(*found.runs, *others))


def _percent(ratio: float) -> float:
    return 100 * (ratio - 1)
