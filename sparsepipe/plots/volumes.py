"""Slices of volumes, with the outlines of labels and predictions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.artist import Artist
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from sparsepipe.plots import style


def case_figure(
    slices: Sequence[Mapping[str, Any]],
    classes: Sequence[str],
    *,
    title: str,
    directions: str = "",
) -> Figure:
    """Draws the slices of a case side by side, in mm from the centre of the first voxel: the input
    in grey, the outlines of all classes but the first, dashed where labelled, solid where
    predicted, and a blue tint over voxels without a label.

    Args:
        slices: ``axes`` (numbers of the two axes of the volume), ``spacing_mm`` along these (if it
            is NaN, axes count voxels), and ``image``, ``label`` and ``prediction``, arrays [n, m];
            see :func:`sparsepipe.models.cases.slices_of`.
        classes: the names of all classes.
        title: the title of the figure.
        directions: letters of the directions to which the volume's axes point, such as RAS; none if
            they are unknown.
    """
    unit = "voxels" if np.isnan([each["spacing_mm"] for each in slices]).any() else "mm"
    spacings = [(1.0, 1.0) if unit == "voxels" else each["spacing_mm"] for each in slices]
    sizes = [np.multiply(each["image"].shape, d) for each, d in zip(slices, spacings, strict=True)]
    widths, heights = zip(*sizes, strict=True)
    scale = min(11.0 / sum(widths), 6.0 / max(heights))
    figure = style.new_figure(
        width_in=max(sum(widths) * scale, 4.0) + 0.9 * len(slices),
        height_in=max(heights) * scale + 1.4,
    )
    panels = figure.subplots(1, len(slices), width_ratios=widths, squeeze=False)[0]
    values = np.concatenate([each["image"].ravel() for each in slices])
    low, high = np.nanpercentile(values, [1, 99])
    colors, seen = style.class_colors(len(classes)) / 255, set[int]()
    for axes, each, (dx, dy) in zip(panels, slices, spacings, strict=True):
        n, m = each["image"].shape
        extent = (-dx / 2, (n - 0.5) * dx, -dy / 2, (m - 0.5) * dy)
        axes.imshow(
            each["image"].T, cmap="gray", vmin=low, vmax=high, extent=extent, origin="lower"
        )
        places = np.arange(-1, n + 1) * dx, np.arange(-1, m + 1) * dy
        unknown = np.pad(each["label"] < 0, 1).T
        if unknown.any():
            axes.contourf(*places, unknown, [0.5, 1.5], colors=[style.BLUE], alpha=0.3)
        for name, look in (("label", "dashed"), ("prediction", "solid")):
            for k in set(each[name][each[name] > 0].tolist()):
                mask = np.pad(each[name] == k, 1).T  # so that outlines close at the border
                axes.contour(
                    *places, mask, [0.5], colors=[colors[k]], linestyles=look, linewidths=1.2
                )
                seen.add(k)
        style.tidy(axes)
        axes.grid(visible=False)
        axes.set(xlim=extent[:2], ylim=extent[2:], aspect="equal")
        for axis, number in zip((axes.xaxis, axes.yaxis), each["axes"], strict=True):
            name = f"to {directions[number]}" if directions else f"axis {number}"
            axis.set_label_text(f"{name} ({unit})", fontsize=style.LABEL_PT, color=style.INK)
    labels = np.concatenate([each["label"].ravel() for each in slices])
    lines = [(style.drawable(classes[k]), colors[k], "solid") for k in sorted(seen)]
    if (labels > 0).any():
        lines += [("label", style.INK, "dashed"), ("prediction", style.INK, "solid")]
    handles: list[Artist] = [Line2D([], [], color=c, linestyle=look) for _, c, look in lines]
    handles += [Patch(color=style.BLUE, alpha=0.3)] * bool((labels < 0).any())
    names = [*(name for name, *_ in lines), "not labelled"][: len(handles)]
    figure.set_figheight(figure.get_figheight() + 0.2 * -(-len(names) // 2))
    figure.legend(
        handles,
        names,
        loc="outside lower center",
        ncols=2,
        frameon=False,
        fontsize=style.TICK_PT,
        labelcolor=style.INK,
    )
    figure.suptitle(style.drawable(title), fontsize=style.TITLE_PT, color=style.INK)
    return figure
