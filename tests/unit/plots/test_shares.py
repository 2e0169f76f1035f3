import numpy as np

from sparsepipe.plots import style
from sparsepipe.plots.shares import LayerShares, accumulated_shares_figure, share_rows
from tests.support.picture_checks import has_colour, pixels, texts_outside

COSTS = LayerShares(
    compute_s=[1.0, 2.0, 1.0], activation_bytes=[8.0, 1.0, 1.0], parameter_bytes=[0.0, 0.0, 0.0]
)


def test_shares_add_up_layer_by_layer():
    axes = accumulated_shares_figure({"GPU": COSTS}).axes[0]
    lines = {line.get_label(): line.get_ydata() for line in axes.get_lines()}
    np.testing.assert_allclose(lines["compute time"], [25, 75, 100])
    np.testing.assert_allclose(lines["activation size"], [80, 90, 100])
    np.testing.assert_allclose(lines["parameter size"], [0, 0, 0])  # a net without any
    assert axes.get_title() == "GPU"
    assert "%" in axes.get_ylabel()
    assert axes.get_xlabel() == "layer"


def test_the_table_has_what_the_picture_shows():
    rows = share_rows({"A": COSTS, "B": COSTS})
    assert [row["layer"] for row in rows] == [0, 1, 2]
    for device in ("A", "B"):
        for label, shares in (
            ("compute time", [0.25, 0.75, 1.0]),
            ("activation size", [0.8, 0.9, 1.0]),
            ("parameter size", [0.0, 0.0, 0.0]),
        ):
            np.testing.assert_allclose([row[f"{device}: {label}"] for row in rows], shares)
    assert share_rows({}) == []


def test_each_device_has_a_panel_with_all_cuts():
    figure = accumulated_shares_figure({"A": COSTS, "B": COSTS}, cuts=[1, 2])
    assert [axes.get_title() for axes in figure.axes] == ["A", "B"]
    for axes in figure.axes:
        cuts = [line.get_xdata()[0] for line in axes.get_lines()[3:]]
        assert cuts == [0.5, 1.5]
        assert [text.get_text() for text in axes.texts] == ["1", "2"]
    (legend,) = figure.legends
    told = [text.get_text() for text in legend.get_texts()]
    assert told == ["compute time", "activation size", "parameter size", "cut before layer"]
    assert texts_outside(figure) == []
    assert has_colour(pixels(figure), style.VERMILION) > 100


def test_numbers_of_near_cuts_do_not_cover_one_another():
    many = LayerShares(
        compute_s=[1.0] * 52, activation_bytes=[1.0] * 52, parameter_bytes=[1.0] * 52
    )
    figure = accumulated_shares_figure({"A": many, "B": many}, cuts=[10, 11, 12, 30, 31, 50])
    assert texts_outside(figure) == []
    for axes in figure.axes:
        boxes = [text.get_window_extent() for text in [*axes.texts, axes.title]]
        pairs = [(a, b) for i, a in enumerate(boxes) for b in boxes[i + 1 :]]
        assert not [pair for pair in pairs if pair[0].overlaps(pair[1])]
