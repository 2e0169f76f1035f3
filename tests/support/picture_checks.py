"""What several picture tests need."""

import io
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from PIL import Image

from sparsepipe.plots import style
from sparsepipe.plots.shares import LayerShares, accumulated_shares_figure


def pixels(figure: Figure) -> np.ndarray:
    """The drawn figure as [height, width, 3] of 0..255."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=style.DPI)
    return np.asarray(Image.open(buffer).convert("RGB")).astype(int)


def shares_picture(files: dict[str, Path], place: Path, *, cuts: Sequence[int]) -> bytes:
    """The picture of the shares of layers in profiles, by device, and of cuts."""
    costs = {}
    for name, file in files.items():
        layers = json.loads(file.read_text())["layers"]
        costs[name] = LayerShares(
            compute_s=[layer["forward_s"] + layer["backward_s"] for layer in layers],
            activation_bytes=[layer["activation_bytes"] for layer in layers],
            parameter_bytes=[layer["parameter_bytes"] for layer in layers],
        )
    style.save_png(accumulated_shares_figure(costs, cuts=cuts), place / "expected.png")
    return (place / "expected.png").read_bytes()


def has_colour(image: np.ndarray, colour: str, *, tolerance: int = 12) -> int:
    """How many pixels are of a colour such as #D55E00."""
    wanted = [int(colour[i : i + 2], 16) for i in (1, 3, 5)]
    return int((np.abs(image - wanted).max(-1) <= tolerance).sum())


def texts_outside(figure: Figure) -> list[str]:
    """Texts that the figure's edge cuts off."""
    figure.draw_without_rendering()
    texts = list(figure.texts)
    for axes in figure.axes:
        texts += [axes.title, axes._left_title, axes.xaxis.label, axes.yaxis.label, *axes.texts]
        for axis in (axes.xaxis, axes.yaxis):
            low, high = sorted(axis.get_view_interval())
            texts += [t.label1 for t in axis.get_major_ticks() if low <= t.get_loc() <= high]
    boxes = {text.get_text(): text.get_window_extent() for text in texts if text.get_text().strip()}
    width, height = figure.bbox.width, figure.bbox.height
    return [
        text
        for text, box in boxes.items()
        if box.x0 < -1 or box.y0 < -1 or box.x1 > width + 1 or box.y1 > height + 1
    ]
