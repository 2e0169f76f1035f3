"""Confusion matrix and per-class accuracy. Shape suffixes: K classes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from numpy.typing import ArrayLike, NDArray

from sparsepipe.plots import style

_DARK_CELL = 0.55
"""Share, from 0 to 1, above which a cell of the matrix is so dark that it gets white digits."""


def confusion_rows(
    counts_KK: ArrayLike, classes: Sequence[str], *, counted: str = "shapes"
) -> list[dict[str, str | int]]:
    """A row per pair of classes: true class, predicted class, ``counts_KK[true][predicted]``, whose
    column is named by what is ``counted``. A further column of ``counts_KK`` counts predictions
    that are not finite.
    """
    counts = np.asarray(counts_KK, np.int64)
    return [
        {"actual": actual, "predicted": predicted, counted: int(count)}
        for actual, row in zip(classes, counts, strict=True)
        for predicted, count in zip((*classes, style.NOT_FINITE), row, strict=False)
    ]


def confusion_figure(
    counts_KK: ArrayLike, classes: Sequence[str], *, counted: str = "shapes"
) -> Figure:
    """Draws the confusion matrix, each row in percent of its class.

    Args:
        counts_KK: number of samples or voxels, as for :func:`confusion_rows`.
        classes: the K class names in order; the layout is made for 2 to 40 classes.
        counted: what is counted, for the axis.
    """
    counts, classes = np.asarray(counts_KK, np.int64), list(map(style.drawable, classes))
    num_classes, columns = len(classes), [*classes, style.NOT_FINITE][: counts.shape[1]]
    share_KK = _row_shares(counts)
    # Small matrices get roomy cells; at 40 classes two digits must still fit one.
    cell_in = float(np.clip(7.0 / num_classes, 0.27, 0.62))
    side_in = max(num_classes * cell_in, 2.0)
    names_in = 0.085 * max(len(name) for name in classes)  # of 9 pt text
    title = _summary(counts)
    if 0.1 * len(title.splitlines()[0]) > side_in + 1.3:  # with few classes it would be cut off
        title = title.replace(" (", "\n(")
    figure = style.new_figure(
        width_in=side_in + names_in + 0.085 * len(f"  ({counts.sum():,})") + 1.3,
        height_in=side_in + names_in + 0.7 + 0.2 * len(title.splitlines()),
    )
    axes = figure.subplots()
    # Constrained layout needs many passes to fit a fixed aspect and would cut off labels;
    # the size above makes cells square up to a few per cent.
    image = axes.imshow(
        np.nan_to_num(share_KK) * 100, cmap="Blues", vmin=0, vmax=100, aspect="auto"
    )
    look: dict[str, Any] = {
        "ha": "center",
        "va": "center",
        "fontsize": float(np.clip(cell_in * 20, 6.0, 10.0)),
    }
    for row, shares in enumerate(share_KK):
        if np.isnan(shares).all():
            axes.axhspan(row - 0.5, row + 0.5, color=style.FAINT, zorder=2)
            continue
        for column, share in enumerate(shares):
            if share >= 0.005 or row == column:  # the diagonal is always written
                colour = "white" if share > _DARK_CELL else style.INK
                axes.text(column, row, f"{100 * share:.0f}", color=colour, **look)
    places, across = np.arange(num_classes), np.arange(len(columns))
    axes.set_xticks(across, columns, rotation=90, fontsize=style.TICK_PT)
    rows = [f"{name}  ({total:,})" for name, total in zip(classes, counts.sum(1), strict=True)]
    axes.set_yticks(places, rows, fontsize=style.TICK_PT)
    axes.set_xlabel("predicted class", fontsize=style.LABEL_PT, color=style.INK)
    axes.set_ylabel(f"true class  ({counted})", fontsize=style.LABEL_PT, color=style.INK)
    axes.tick_params(length=0, labelcolor=style.INK)
    axes.set_xticks(across[1:] - 0.5, minor=True)
    axes.set_yticks(places[1:] - 0.5, minor=True)
    axes.grid(visible=True, which="minor", color=style.FAINT, linewidth=0.5)
    axes.tick_params(which="minor", length=0)
    for spine in axes.spines.values():
        spine.set_color(style.GREY)
    axes.set_title(title, fontsize=style.TITLE_PT, color=style.INK, loc="left")
    bar = figure.colorbar(image, ax=axes, fraction=0.04, pad=0.02, aspect=30)
    bar.set_label("share of the true class (%)", fontsize=style.LABEL_PT, color=style.INK)
    bar.ax.tick_params(labelsize=style.TICK_PT, color=style.GREY, labelcolor=style.INK)
    bar.outline.set_visible(False)
    return figure


def per_class_figure(counts_KK: ArrayLike, classes: Sequence[str]) -> Figure:
    """Draws each class's accuracy as a bar, best first; arguments as :func:`confusion_figure`."""
    counts, classes = np.asarray(counts_KK, np.int64), list(map(style.drawable, classes))
    shown = [k for k in range(len(classes)) if counts[k].sum()]
    accuracy = {k: 100 * counts[k, k] / counts[k].sum() for k in shown}
    order = sorted(shown, key=lambda k: (accuracy[k], -k))  # bars are stacked from below
    figure = style.new_figure(width_in=6.4, height_in=1.3 + 0.24 * max(len(order), 2))
    axes = figure.subplots()
    bars = axes.barh(
        [f"{classes[k]}  ({counts[k].sum():,})" for k in order],
        [accuracy[k] for k in order],
        color=style.BLUE,
        height=0.72,
    )
    axes.bar_label(bars, fmt="%.1f", padding=3, fontsize=style.TICK_PT, color=style.INK)
    style.tidy(axes)
    axes.grid(visible=False, axis="y")
    axes.set_xlim(0, 109)
    axes.set_xticks(range(0, 101, 20))
    axes.set_ylim(-0.6, len(order) - 0.4)
    axes.set_xlabel("accuracy (%)", fontsize=style.LABEL_PT, color=style.INK)
    axes.set_title(_summary(counts), fontsize=style.TITLE_PT, color=style.INK, loc="left")
    return figure


def _row_shares(counts: NDArray[np.int64]) -> NDArray[np.float64]:
    """Rows divided by their sums; the row of a class without samples is NaN."""
    shares = np.full(counts.shape, np.nan)
    totals = counts.sum(axis=1, keepdims=True)
    np.divide(counts, totals, out=shares, where=totals > 0)
    return shares


def _summary(counts: NDArray[np.int64]) -> str:
    total, right = int(counts.sum()), int(np.trace(counts))
    if not total:
        return "no samples"
    mean = float(np.nanmean(np.diag(_row_shares(counts))))
    return (
        f"overall accuracy {100 * right / total:.1f} % ({right:,} of {total:,})\n"
        f"mean over classes {100 * mean:.1f} %"
    )
