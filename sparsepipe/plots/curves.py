"""Learning curves of one run, and of several training methods in comparison."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from statistics import fmean
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from sparsepipe.errors import DataError
from sparsepipe.plots import style
from sparsepipe.runs.metrics import Row, epoch_series, last_value, read_metrics

_SPLITS = (
    # split, label, colour, marker: colour never carries the meaning alone
    ("train", "training", style.BLUE, "o"),
    ("val", "validation", style.ORANGE, "s"),
)
_MAX_MARKED_EPOCHS = 30


Runs = Sequence[str | os.PathLike[str] | Sequence[Row]]
"""For each run, the path of its metrics CSV, or the rows (:mod:`sparsepipe.runs.metrics`)."""


def learning_curves_figure(
    metrics: str | os.PathLike[str] | Sequence[Row], *, tested: str = "last"
) -> Figure:
    """Draws loss and accuracy: training and validation over epochs, the test as a horizontal line.

    Args:
        metrics: path of a metrics CSV or its rows, with any of the columns
            ``{train,val,test}/{loss,accuracy}``; accuracies are from 0 to 1.
        tested: the weights that were tested, ``best`` or ``last``, for the legend.

    Raises:
        DataError: the file is missing, or no loss or accuracy was logged.
    """
    rows, drawn = _rows(metrics), 0
    panels = (("loss", "cross-entropy loss (nats)", 1.0), ("accuracy", "accuracy (%)", 100.0))
    figure = style.new_figure(width_in=9.6, height_in=3.9)
    for axes, (name, label, scale) in zip(figure.subplots(1, 2), panels, strict=True):
        for split, split_label, colour, mark in _SPLITS:
            if not (series := epoch_series(rows, f"{split}/{name}")):
                continue
            axes.plot(
                [epoch + 1 for epoch in series.epochs],  # an epoch's mean is known at its end
                [value * scale for value in series.values],
                label=split_label,
                color=colour,
                linewidth=1.8,
                marker=mark if len(series) <= _MAX_MARKED_EPOCHS else None,
                markersize=4.5,
            )
        if (test := last_value(rows, f"test/{name}")) is not None:
            level = f"{test:.3f}" if scale == 1.0 else f"{test * scale:.1f} %"
            axes.axhline(
                test * scale,
                color=style.VERMILION,
                linewidth=1.8,
                linestyle=(0, (5, 3)),
                label=f"test, {tested} weights: {level}",
            )
        drawn += len(axes.get_lines())
        axes.margins(y=0.08)
        _finish_axes(axes, "epoch", label)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
        if axes.get_lines():
            if scale != 1.0:
                axes.set_ylim(top=min(max(axes.get_ylim()[1], 5.0), 100.5))
            axes.legend(fontsize=style.TICK_PT, framealpha=0.9, edgecolor="none", loc="best")
    if not drawn:
        raise DataError(
            "there is nothing to draw: no loss or accuracy was logged",
            remedy="train for at least one whole epoch with a module that logs them",
        )
    return figure


def _finish_axes(axes: Axes, x_label: str, y_label: str) -> None:
    style.tidy(axes)
    axes.set_xlabel(x_label, fontsize=style.LABEL_PT, color=style.INK)
    axes.set_ylabel(y_label, fontsize=style.LABEL_PT, color=style.INK)
    if not axes.get_lines():
        axes.set_yticks([])
        look: dict[str, Any] = {"ha": "center", "fontsize": style.LABEL_PT, "color": style.GREY}
        axes.text(0.5, 0.5, "not logged", transform=axes.transAxes, **look)
        return
    for axis in ("x", "y"):
        style.from_zero(axes, axis)


_LOOKS = (
    # colour, line, marker: colour never carries the meaning alone
    (style.INK, "-", "o"),
    (style.BLUE, "-", "s"),
    (style.GREEN, "--", "^"),
    (style.ORANGE, "-.", "D"),
    (style.VERMILION, ":", "X"),
    (style.PURPLE, (0, (3, 1, 1, 1)), "v"),
    (style.GREY, (0, (1, 2)), "P"),
)
_PANELS = (
    ("train/loss", "training loss (nats)", 1.0),
    ("val/accuracy", "validation accuracy (%)", 100.0),
)
TIME = "time/epoch_s"
"""The metric with the seconds of an epoch; only rows of trained epochs have it."""
_UNITS = (("hours", 1 / 60, 120.0), ("minutes", 1.0, 2.0), ("seconds", 60.0, 0.0))
"""Units of the time axis: name, number in a minute, and shortest time in minutes to use it for."""
_MARKS = 10
"""Least number of markers on a curve, which has fewer only if it has fewer epochs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """One metric of the runs of one training method, at the epochs that all runs have.

    Attributes:
        epochs: numbers of the epochs, from 1.
        minutes: training time until the end of each epoch, the mean over the runs.
        mean: mean value of the runs at each epoch.
        least: smallest value of the runs at each epoch.
        largest: largest value of the runs at each epoch.
    """

    epochs: tuple[int, ...]
    minutes: tuple[float, ...]
    mean: tuple[float, ...]
    least: tuple[float, ...]
    largest: tuple[float, ...]


def curve(runs: Sequence[Sequence[Row]], name: str) -> Curve:
    """The metric ``name`` over the epochs of the runs of one training method.

    ``runs`` has the rows of each run's metrics, with a column ``time/epoch_s``.
    """
    values = [_by_epoch(rows, name) for rows in runs]
    times = [_minutes(rows) for rows in runs]
    common = sorted(
        set.intersection(*(set(v) & set(t) for v, t in zip(values, times, strict=True)))
    )
    each = [[run[epoch] for run in values] for epoch in common]
    return Curve(
        epochs=tuple(epoch + 1 for epoch in common),
        minutes=tuple(fmean(run[epoch] for run in times) for epoch in common),
        mean=tuple(map(fmean, each)),
        least=tuple(map(min, each)),
        largest=tuple(map(max, each)),
    )


def comparison_figure(ways: Mapping[str, Runs]) -> Figure:
    """Draws training loss and validation accuracy of at most seven training methods.

    ``ways`` has the runs of each method by its label. Lines are means over the runs, bands reach
    from the smallest to the largest value. Panels on the left are over epochs, those on the right
    over mean training time, which excludes validation.

    Raises:
        DataError: a file cannot be read, or no run has these metrics.
    """
    assert len(ways) <= len(_LOOKS), f"{len(ways)} ways, {len(_LOOKS)} looks"
    read = {label: [_rows(run) for run in runs] for label, runs in ways.items() if runs}
    figure = style.new_figure(width_in=10.4, height_in=7.2)
    panels = figure.subplots(2, 2, sharey="row")
    several = any(len(runs) > 1 for runs in read.values())
    ways_labels = [
        f"{way} ({len(runs)} run{'s' if len(runs) != 1 else ''})" if several else way
        for way, runs in read.items()
    ]
    found = {name: [curve(runs, name) for runs in read.values()] for name, _, _ in _PANELS}
    longest = max((c.minutes[-1] for each in found.values() for c in each if c.minutes), default=0)
    unit, per_minute, _ = next(each for each in _UNITS if longest >= each[2])
    drawn = 0
    for (over_epochs, over_time), (name, label, scale) in zip(panels, _PANELS, strict=True):
        drawings = zip(found[name], ways_labels, _LOOKS, strict=False)
        for line, way, look in drawings:
            if not line.epochs:
                continue
            drawn += 1
            times = [minutes * per_minute for minutes in line.minutes]
            _draw_run(over_epochs, line, line.epochs, scale, label=way, look=look)
            _draw_run(over_time, line, times, scale, label=way, look=look)
        for axes, x_label, y_label in (
            (over_epochs, "epoch", label),
            (over_time, f"training time ({unit})", ""),
        ):
            axes.margins(y=0.05)
            _finish_axes(axes, x_label, y_label)
        over_epochs.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    if not drawn:
        raise DataError(
            f"there is nothing to draw: no run has {' or '.join(n for n, _, _ in _PANELS)} with "
            f"{TIME}",
            remedy="give metrics of runs of task=train with data.val_share above 0",
        )
    panels[0][0].legend(fontsize=style.TICK_PT, frameon=True, framealpha=0.9, edgecolor="none")
    return figure


def _draw_run(
    axes: Axes,
    found: Curve,
    places: Sequence[float],
    scale: float,
    *,
    label: str,
    look: tuple[object, ...],
) -> None:
    colour, line, marker = look
    low, high = ([value * scale for value in edge] for edge in (found.least, found.largest))
    axes.fill_between(places, low, high, color=colour, alpha=0.15, linewidth=0)
    axes.plot(
        places,
        [value * scale for value in found.mean],
        label=label,
        color=colour,
        linestyle=line,
        marker=marker,
        markersize=4.5,
        markevery=max(1, len(places) // _MARKS),
        linewidth=1.6,
    )


def _rows(run: str | os.PathLike[str] | Sequence[Row]) -> list[Row]:
    return list(read_metrics(run)) if isinstance(run, str | os.PathLike) else list(run)


def _by_epoch(rows: Sequence[Row], name: str) -> dict[int, float]:
    series = epoch_series(rows, name)
    return dict(zip(series.epochs, series.values, strict=True))


def _minutes(rows: Sequence[Row]) -> dict[int, float]:
    """Minutes of training until the end of each epoch, up to the first epoch without a time."""
    seconds = _by_epoch(rows, TIME)
    known = [epoch for epoch in sorted(seconds) if all(e in seconds for e in range(epoch))]
    ends = accumulate(seconds[epoch] for epoch in known)
    return {epoch: end / 60 for epoch, end in zip(known, ends, strict=True)}
