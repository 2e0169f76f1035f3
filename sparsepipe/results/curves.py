"""Learning curves: loss and accuracy over the epochs of a run."""

from __future__ import annotations

import os
from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from sparsepipe.errors import DataError
from sparsepipe.results import style
from sparsepipe.results.metrics import Row, Series, epoch_series, last_value, read_metrics

_SPLITS = (
    # split, label, colour, marker: colour never carries the meaning alone
    ("train", "training", style.BLUE, "o"),
    ("val", "validation", style.ORANGE, "s"),
)
_MAX_MARKED_EPOCHS = 30


def learning_curves(
    metrics: str | os.PathLike[str] | Sequence[Row], path: str | os.PathLike[str]
) -> None:
    """Writes loss and accuracy over epochs, training and validation, as a PNG.

    Args:
        metrics: a metrics CSV or its rows as mappings, with any of the columns
            ``{train,val,test}/{loss,accuracy}``; accuracies are shares of 1.
            See :mod:`sparsepipe.results.metrics`.
        path: the picture to write; its directories are made.

    Raises:
        DataError: no such file, nothing to draw, or the picture cannot be written.
    """
    rows = read_metrics(metrics) if isinstance(metrics, str | os.PathLike) else list(metrics)
    style.save_png(learning_curves_figure(rows), path)


def learning_curves_figure(rows: Sequence[Row]) -> Figure:
    """The figure that :func:`learning_curves` writes: left loss, right accuracy."""
    panels = (("loss", "cross-entropy loss (nats)", 1.0), ("accuracy", "accuracy (%)", 100.0))
    drawn = 0
    figure = style.new_figure(width_in=9.6, height_in=3.9)
    for axes, (name, label, scale) in zip(figure.subplots(1, 2), panels, strict=True):
        end = 1
        for split, split_label, colour, marker in _SPLITS:
            series = epoch_series(rows, f"{split}/{name}")
            end = max((end, *(epoch + 1 for epoch in series.epochs)))
            drawn += _draw_series(axes, series, scale, label=split_label, color=colour, mark=marker)
        test = last_value(rows, f"test/{name}")
        if test is not None:
            drawn += _draw_test(axes, test * scale, end, in_percent=scale != 1.0)
        _finish(axes, label, in_percent=scale != 1.0)
    if not drawn:
        raise DataError(
            "there is nothing to draw: no loss or accuracy was logged",
            remedy="Train for at least one whole epoch with a module that logs them.",
        )
    return figure


def _draw_series(
    axes: Axes, series: Series, scale: float, *, label: str, color: str, mark: str
) -> int:
    if not series:
        return 0
    axes.plot(
        [epoch + 1 for epoch in series.epochs],  # an epoch's mean is known at its end
        [value * scale for value in series.values],
        label=label,
        color=color,
        linewidth=1.8,
        marker=mark if len(series) <= _MAX_MARKED_EPOCHS else None,
        markersize=4.5,
    )
    return 1


def _draw_test(axes: Axes, level: float, end: int, *, in_percent: bool) -> int:
    """The test set is looked at once, after the last epoch: a level with its value."""
    text = f"{level:.1f} %" if in_percent else f"{level:.3f}"
    axes.axhline(level, color=style.VERMILION, linewidth=1.2, linestyle=(0, (5, 3)))
    axes.plot(
        [end],
        [level],
        color=style.VERMILION,
        marker="D",
        markersize=7,
        linestyle="none",
        label=f"test, final: {text}",
        clip_on=False,
        zorder=5,
    )
    return 1


def _finish(axes: Axes, label: str, *, in_percent: bool) -> None:
    style.tidy(axes)
    axes.set_xlabel("epoch", fontsize=style.LABEL_PT, color=style.INK)
    axes.set_ylabel(label, fontsize=style.LABEL_PT, color=style.INK)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    if not axes.get_lines():
        axes.set_yticks([])
        axes.text(
            0.5,
            0.5,
            "not logged",
            transform=axes.transAxes,
            ha="center",
            fontsize=style.LABEL_PT,
            color=style.GREY,
        )
        return
    axes.margins(y=0.08)
    bottom, top = axes.get_ylim()
    axes.set_ylim(max(bottom, 0.0), min(top, 100.5) if in_percent else top)
    axes.legend(
        fontsize=style.TICK_PT,
        frameon=True,
        framealpha=0.9,
        edgecolor="none",
        loc="lower right" if in_percent else "upper right",
    )
