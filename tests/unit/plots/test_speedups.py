from matplotlib.colors import to_hex
from PIL import Image

from sparsepipe.plots import style
from sparsepipe.plots.speedups import Bar, SpeedupMark, speedups_figure
from tests.support.picture_checks import has_colour, pixels, texts_outside

BARS = {
    ("5 GPUs", "DP"): Bar(value=1.0, frame=1.25),
    ("5 GPUs", "MP"): Bar(value=2.0, frame=2.5),
    ("6 GPUs", "DP"): Bar(value=1.0),
    ("6 GPUs", "HETE-MP"): Bar(value=3.0),
}
MARKS = {
    ("5 GPUs", "MP"): SpeedupMark(value=2.2),
    ("6 GPUs", "MP"): SpeedupMark(value=4.0, derived=True),
}


def drawn(bars=BARS, marks=MARKS):
    return speedups_figure(
        "simulated, 50 MB/s",
        bars,
        marks,
        groups=["5 GPUs", "6 GPUs"],
        strategies=["DP", "MP", "HETE-MP"],
        bar_label="speedup over DP",
        frame_label="over DP without overlap",
        mark_label="the paper's",
    )


def test_bars_stand_in_their_groups_with_their_values():
    axes = drawn().axes[0]
    heights = {
        (round(patch.get_x() + patch.get_width() / 2, 2), patch.get_height())
        for patch in axes.patches
        if patch.get_fill() and patch.get_height()
    }
    assert heights == {(-0.29, 1.0), (0.0, 2.0), (0.71, 1.0), (1.29, 3.0)}
    assert [patch.get_height() for patch in axes.patches if not patch.get_fill()] == [1.25, 2.5]
    texts = sorted((text.xy[0], text.get_text()) for text in axes.texts)
    assert [text for _, text in texts] == ["1.00", "2.00", "none", "1.00", "none", "3.00"]
    assert [tick.get_text() for tick in axes.get_xticklabels()] == ["5 GPUs", "6 GPUs"]
    assert axes.get_title() == "simulated, 50 MB/s"
    assert axes.get_ylabel() == "speedup over DP"
    assert axes.get_ylim()[1] > 4.0, "marks have room as well"


def test_marks_lie_over_their_bars_and_derived_ones_are_hollow():
    (axes,) = drawn().axes
    printed, derived = [line for line in axes.get_lines() if line.get_marker() == "D"]
    assert (list(printed.get_ydata()), list(derived.get_ydata())) == ([2.2], [4.0])
    assert (list(printed.get_xdata()), list(derived.get_xdata())) == ([0], [1]), "of MP"
    assert to_hex(printed.get_markerfacecolor()) == style.INK
    assert derived.get_markerfacecolor() == "white"


def test_the_legend_names_what_is_drawn():
    (legend,) = drawn().legends
    assert [text.get_text() for text in legend.get_texts()] == [
        "DP", "MP", "HETE-MP", "over DP without overlap", "the paper's", "the paper's, derived",
    ]  # fmt: skip
    (legend,) = drawn({("5 GPUs", "DP"): Bar(value=1.0)}, {}).legends
    assert [text.get_text() for text in legend.get_texts()] == ["DP", "MP", "HETE-MP"]


def test_all_is_to_be_seen_and_written(tmp_path):
    figure = drawn()
    assert texts_outside(figure) == []
    image = pixels(figure)
    assert has_colour(image, style.VERMILION) > 1000, "the bar of HETE-MP"
    assert has_colour(image, style.INK) > 50, "a filled mark"
    style.save_png(figure, tmp_path / "deep" / "fig9.png")
    with Image.open(tmp_path / "deep" / "fig9.png") as picture:
        picture.verify()
