"""Accumulated shares of compute, activations and parameters over the layers, as in Fig. 7."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from matplotlib.figure import Figure

from sparsepipe.plots import style


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerShares:
    """Costs of each layer of a network on one device.

    ``compute_s``: forward and backward pass; ``activation_bytes``: size of the output.
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
_ROW_PT = 11.0
_LABEL_SHARE = 0.06
"""Width of the label of a cut, as a share of the panel's width."""


def share_rows(devices: Mapping[str, LayerShares]) -> list[dict[str, float]]:
    """A row for each layer: its index, and each device's accumulated shares of costs, 0 to 1."""
    columns = {
        f"{device}: {label}": _accumulated(getattr(costs, name))
        for device, costs in devices.items()
        for name, label, _, _ in _LINES
    }
    layers = max(map(len, columns.values()), default=0)
    return [
        {"layer": index, **{name: shares[index] for name, shares in columns.items()}}
        for index in range(layers)
    ]


def accumulated_shares_figure(
    devices: Mapping[str, LayerShares], *, cuts: Sequence[int] = ()
) -> Figure:
    """Draws accumulated shares of compute, activations and parameters, a panel for each device.

    ``cuts`` are the first layers of all stages except stage 0, marked in every panel.
    """
    figure = style.new_figure(width_in=max(5.6, 4.4 * len(devices)), height_in=3.9)
    panels = figure.subplots(1, len(devices), squeeze=False, sharey=True)[0]
    for axes, (device, costs) in zip(panels, devices.items(), strict=True):
        layers = len(costs.compute_s)
        for name, label, colour, dashes in _LINES:
            shares = [100 * share for share in _accumulated(getattr(costs, name))]
            axes.plot(range(len(shares)), shares, color=colour, linestyle=dashes, label=label)
        label_rows = _label_rows(cuts, layers)
        for number, (cut, row) in enumerate(label_rows):
            axes.axvline(
                cut - 0.5, color=style.VERMILION, linewidth=1.2, zorder=1.5,
                label=None if number else "cut before layer",
            )  # fmt: skip
            axes.annotate(
                str(cut), (cut - 0.5, 1), xycoords=("data", "axes fraction"),
                xytext=(0, 2 + row * _ROW_PT), textcoords="offset points", ha="center",
                fontsize=style.TICK_PT, color=style.VERMILION,
            )  # fmt: skip
        style.tidy(axes)
        axes.set_ylim(0, 103)
        axes.set_xlim(-0.5, layers - 0.5)
        axes.set_xlabel("layer", fontsize=style.LABEL_PT, color=style.INK)
        above = 1 + max((row for _, row in label_rows), default=-1)
        axes.set_title(device, fontsize=style.TITLE_PT, color=style.INK, pad=6 + above * _ROW_PT)
    panels[0].set_ylabel("accumulated share (%)", fontsize=style.LABEL_PT, color=style.INK)
    lines = {str(line.get_label()): line for line in panels[0].get_lines()}
    shown = [label for label in lines if not label.startswith("_")]
    figure.legend(
        [lines[label] for label in shown], shown,
        fontsize=style.TICK_PT, frameon=False, loc="outside lower center",
        ncols=min(len(shown), 2 * len(devices) + 1),
    )  # fmt: skip
    return figure


def _accumulated(values: Sequence[float]) -> list[float]:
    whole = sum(values) or 1.0
    return [total / whole for total in accumulate(values)]


def _label_rows(cuts: Sequence[int], layers: int) -> list[tuple[int, int]]:
    """Each cut with the row, from 0 upwards, of labels above the axes where its label has room."""
    ends: list[float] = []  # end of the last label in each row
    placed = []
    for cut in sorted(cuts):
        row = next((r for r, end in enumerate(ends) if end <= cut), len(ends))
        ends[row : row + 1] = [cut + _LABEL_SHARE * layers]
        placed.append((cut, row))
    return placed
