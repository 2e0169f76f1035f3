"""The look that all figures share.

Figures are drawn by Agg directly, without pyplot's registry and ``rcParams``, so that any thread or
process may draw. Colours are those of Okabe and Ito (2008), which differ enough for people with
common kinds of colour blindness, and when printed in grey.
"""

from __future__ import annotations

import io
import os
from typing import Literal

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.text import Text
from matplotlib.ticker import LogFormatter
from numpy.typing import NDArray

from sparsepipe.utils.files import write_bytes_atomic

DPI = 144
"""Dots per inch of every picture, at which text of 9 pt is 18 pixels high."""

BLUE = "#0072B2"
ORANGE = "#E69F00"
VERMILION = "#D55E00"
GREEN = "#009E73"
PURPLE = "#CC79A7"
INK = "#222222"
GREY = "#767676"
FAINT = "#D9D9D9"

NOT_FINITE = "not finite"
"""The name of a prediction that is not finite, in place of a class."""

TITLE_PT = 11.0
LABEL_PT = 10.0
TICK_PT = 9.0


def class_colors(count: int) -> NDArray[np.uint8]:
    """Returns a colour for each of ``count`` classes, uint8 [count, 3], in [0, 255]: first strong
    ones, then pale ones, repeated after 40.
    """
    pairs = [colormaps[name](np.arange(20), bytes=True)[:, :3] for name in ("tab20", "tab20b")]
    colors: NDArray[np.uint8] = np.concatenate([part for p in pairs for part in (p[::2], p[1::2])])
    return colors[np.arange(count) % len(colors)]


def new_figure(*, width_in: float, height_in: float) -> Figure:
    """An empty white figure with constrained layout."""
    return Figure(
        figsize=(width_in, height_in),
        dpi=DPI,
        layout=ConstrainedLayoutEngine(w_pad=0.08, h_pad=0.08),
        facecolor="white",
    )


def tidy(axes: Axes) -> None:
    """Gives ``axes`` the common look: no box, a faint grid in the background, small dark ticks."""
    axes.set_facecolor("white")
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color(GREY)
    axes.tick_params(labelsize=TICK_PT, color=GREY, labelcolor=INK)
    axes.set_axisbelow(True)
    axes.grid(visible=True, color=FAINT, linewidth=0.6)


def from_zero(axes: Axes, axis: Literal["x", "y"]) -> None:
    """Makes an axis begin at 0 if its margin, but no value, lies below 0."""
    low, _ = axes.get_xlim() if axis == "x" else axes.get_ylim()
    least = axes.dataLim.xmin if axis == "x" else axes.dataLim.ymin
    if low < 0 <= least:
        axes.set(**{f"{axis}lim": (0, None)})


def drawable(name: str) -> str:
    """The name with escapes in place of characters that stand for bytes outside UTF-8."""
    return name.encode("utf-8", "backslashreplace").decode()


def _take_literally(figure: Figure) -> None:
    """Makes a ``$`` in a text, such as a class name, not begin a formula, except on log axes."""
    made = set()
    for axis in (each for axes in figure.axes for each in (axes.xaxis, axes.yaxis)):
        labels = axis.get_ticklabels(which="both")  # which makes them
        if isinstance(axis.get_major_formatter(), LogFormatter):
            made.update(labels)
    for text in figure.findobj(Text):
        if text not in made and "$" in text.get_text():
            text.set_parse_math(False)


def save_png(figure: Figure, path: str | os.PathLike[str]) -> None:
    """Draws ``figure`` and writes it to ``path`` as PNG, atomically.

    The file contains no date and no program version, so equal figures give identical files.
    """
    buffer = io.BytesIO()
    _take_literally(figure)
    figure.savefig(buffer, format="png", dpi=DPI, metadata={"Software": None})
    write_bytes_atomic(path, buffer.getvalue())
