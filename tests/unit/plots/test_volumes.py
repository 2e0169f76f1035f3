"""Slices of volumes: outlines and axes are in millimetres, and nothing covers anything else."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from matplotlib.colors import to_hex

from sparsepipe.plots import style
from sparsepipe.plots.volumes import case_figure
from tests.support.picture_checks import texts_outside

CLASSES = ("background", "liver", "a $vessel$ with a long name")
SPACING = (0.5, 2.0, 3.0)


def slices(sizes: tuple[int, ...] = (40, 20, 12)) -> list[dict[str, Any]]:
    """A box of the first class, predicted one voxel further along each axis and at the border."""
    found = []
    for a, b in ((0, 1), (0, 2), (1, 2))[: len(sizes) * (len(sizes) - 1) // 2]:
        label = np.zeros((sizes[a], sizes[b]), np.int16)
        prediction = label.copy()
        label[2:7, 3:9], prediction[3:8, 4:10], prediction[-2:, -1:] = 1, 1, 2
        label[-3:] = -100
        image = np.random.default_rng(0).normal(size=label.shape)
        spacing = (SPACING[a], SPACING[b])
        cut = {"image": image, "label": label, "prediction": prediction}
        found.append({"axes": (a, b), "spacing_mm": spacing, **cut})
    return found


def test_outlines_are_where_the_classes_are_in_mm() -> None:
    figure = case_figure(slices(), CLASSES, title="scan.nii.gz")
    color = to_hex(style.class_colors(3)[1] / 255)
    for axes, each in zip(figure.axes, slices(), strict=True):
        (dx, dy), (n, m) = each["spacing_mm"], each["image"].shape
        assert axes.get_xlabel() == f"axis {each['axes'][0]} (mm)"
        assert axes.images[0].get_extent() == [-dx / 2, (n - 0.5) * dx, -dy / 2, (m - 0.5) * dy]
        np.testing.assert_array_equal(axes.images[0].get_array(), each["image"].T)
        lines = {
            (to_hex(drawn.get_edgecolor()[0]), drawn.get_linestyle()[0][1] is None): drawn
            for drawn in axes.collections
            if len(drawn.get_edgecolor())
        }
        for is_solid, first in ((False, (2, 3)), (True, (3, 4))):  # the label is dashed
            path = lines[color, is_solid].get_paths()[0].vertices
            low = np.subtract(first, 0.5) * (dx, dy)
            np.testing.assert_allclose(path.min(0), low)
            np.testing.assert_allclose(path.max(0), low + np.multiply((5, 6), (dx, dy)))
        at_border = lines[to_hex(style.class_colors(3)[2] / 255), True].get_paths()[0].vertices
        assert (at_border[0] == at_border[-1]).all(), "outlines close at the border"


def test_axes_count_voxels_where_their_size_is_unknown() -> None:
    given = slices()
    for each in given:
        each["spacing_mm"] = (np.nan, np.nan)
        each["image"][0, 0] = np.nan
        each["label"] = np.zeros_like(each["label"])
    figure = case_figure(given, CLASSES, title="scan.npy", directions="LPS")
    for axes, each in zip(figure.axes, given, strict=True):
        n, m = each["image"].shape
        assert axes.get_xlabel() == f"to {'LPS'[each['axes'][0]]} (voxels)"
        assert axes.images[0].get_extent() == [-0.5, n - 0.5, -0.5, m - 0.5]
        assert np.isfinite(axes.images[0].get_clim()).all()
    texts = [text.get_text() for text in figure.legends[0].get_texts()]
    assert texts == [*CLASSES[1:]], "of predictions alone, classes need no other entries"


@pytest.mark.parametrize("sizes", [(40, 20, 12), (400, 12, 12), (15, 90), (90, 15)])
def test_the_legend_covers_no_slice_and_no_text_is_cut_off(sizes: tuple[int, ...]) -> None:
    figure = case_figure(slices(sizes), CLASSES, title="a/long/path/to/$scan$.nii.gz   81.2 %")
    assert texts_outside(figure) == []
    (legend,) = figure.legends
    names = [text.get_text() for text in legend.get_texts()]
    assert names == [*CLASSES[1:], "label", "prediction", "not labelled"]
    box = legend.get_window_extent()
    assert box.x0 >= 0
    assert box.x1 <= figure.bbox.width
    for axes in figure.axes:
        assert axes.get_tightbbox().y0 >= box.y1
        assert axes.get_window_extent().width > 30
