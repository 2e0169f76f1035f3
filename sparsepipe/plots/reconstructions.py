"""Pictures of samples of several domains and of what a decoder makes of their codes.

Shapes: N samples, C channels.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

import numpy as np
from matplotlib.figure import Figure
from numpy.typing import NDArray

from sparsepipe.plots import style

Images = NDArray[np.float32]
_CELL_IN = 0.8


def draw_reconstructions(
    domains: Mapping[str, Mapping[str, Images]], path: str | os.PathLike[str]
) -> None:
    """Writes a PNG with a row for each domain and a block of columns for each kind of picture.

    Args:
        domains: of each domain, by their kinds (such as ``input`` and ``both``), images
            [N, C, H, W] or volumes [N, C, D, H, W], which are seen along their first dimension. One
            channel is drawn in grey, three as colours, of others their mean.
        path: the picture to write; its directories are made.

    Raises:
        DataError: the picture cannot be written.
    """
    style.save_png(reconstructions_figure(domains), path)


def reconstructions_figure(domains: Mapping[str, Mapping[str, Images]]) -> Figure:
    """The figure that :func:`draw_reconstructions` writes: an axes for each domain and kind."""
    kinds = list(next(iter(domains.values())))
    count = max(len(each[kinds[0]]) for each in domains.values())
    figure = style.new_figure(
        width_in=1.2 + len(kinds) * (count * _CELL_IN + 0.2),
        height_in=0.5 + len(domains) * _CELL_IN,
    )
    axes = figure.subplots(len(domains), len(kinds), squeeze=False)
    for row, (name, pictures) in zip(axes, domains.items(), strict=True):
        for place, kind in zip(row, kinds, strict=True):
            strip = np.concatenate([_picture(each) for each in pictures[kind]], axis=1)
            place.imshow(strip, cmap="gray", vmin=0, vmax=1)
            place.set_xticks([])
            place.set_yticks([])
            for side in place.spines.values():
                side.set_color(style.FAINT)
        row[0].set_ylabel(
            name, rotation=0, ha="right", va="center", fontsize=style.TICK_PT, color=style.INK
        )
    for place, kind in zip(axes[0], kinds, strict=True):
        place.set_title(kind, fontsize=style.LABEL_PT, color=style.INK)
    return figure


def _picture(sample: Images) -> Images:
    """A sample [C, ...] as an image [H, W] or [H, W, 3] from 0 to 1."""
    image = sample.max(axis=1) if sample.ndim == 4 else sample
    image = image.transpose(1, 2, 0) if len(image) == 3 else image.mean(axis=0)
    clipped: Images = np.clip(image, 0, 1)
    return clipped
