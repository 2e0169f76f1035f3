"""Where the work of a network lies: accumulated shares over its layers (the paper's Fig. 7)."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from sparsepipe.results import style


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """What each layer of a network costs on one device; at least one layer.

    Attributes:
        compute_s: forward and backward seconds.
        activation_bytes: of each layer's output.
        parameter_bytes: of each layer.
    """

    compute_s: Sequence[float]
    activation_bytes: Sequence[float]
    parameter_bytes: Sequence[float]


_LINES = (
    # attribute, label, colour, dashes: colour never carries the meaning alone
    ("compute_s", "compute time", style.BLUE, "-"),
    ("activation_bytes", "activation size", style.ORANGE, "--"),
    ("parameter_bytes", "parameter size", style.GREEN, ":"),
)


def accumulated_shares(
    devices: Mapping[str, Costs], path: str | os.PathLike[str], *, cuts: Sequence[int] = ()
) -> None:
    """Writes the shares of compute, activations and parameters that lie in the first layers.

    Args:
        devices: costs by device, one panel each.
        path: the picture to write; its directories are made.
        cuts: first layers of the stages behind the first, marked in every panel.

    Raises:
        DataError: the picture cannot be written.
    """
    style.save_png(accumulated_shares_figure(devices, cuts=cuts), path)


def accumulated_shares_figure(devices: Mapping[str, Costs], *, cuts: Sequence[int] = ()) -> Figure:
    """The figure that :func:`accumulated_shares` writes."""
    figure = style.new_figure(width_in=max(5.6, 4.4 * len(devices)), height_in=3.9)
    panels = figure.subplots(1, len(devices), squeeze=False, sharey=True)[0]
    for axes, (device, costs) in zip(panels, devices.items(), strict=True):
        _draw(axes, costs, cuts)
        axes.set_title(device, fontsize=style.TITLE_PT, color=style.INK)
    panels[0].set_ylabel("accumulated share (%)", fontsize=style.LABEL_PT, color=style.INK)
    panels[0].legend(fontsize=style.TICK_PT, frameon=False, loc="lower right")
    return figure


def _draw(axes: Axes, costs: Costs, cuts: Sequence[int]) -> None:
    for name, label, colour, dashes in _LINES:
        values = getattr(costs, name)
        shares = [100 * total / (sum(values) or 1.0) for total in accumulate(values)]
        axes.plot(range(len(shares)), shares, color=colour, linestyle=dashes, label=label)
    for number, cut in enumerate(cuts):
        told = f"cut before {cut}" if number == 0 else str(cut)
        axes.axvline(cut - 0.5, color=style.VERMILION, linewidth=1.2)
        axes.annotate(
            told, (cut - 0.5, 3), xytext=(3, 0), textcoords="offset points", rotation=90,
            fontsize=style.TICK_PT, color=style.VERMILION,
        )  # fmt: skip
    style.tidy(axes)
    axes.set_ylim(0, 103)
    axes.set_xlim(-0.5, len(costs.compute_s) - 0.5)
    axes.set_xlabel("layer", fontsize=style.LABEL_PT, color=style.INK)
