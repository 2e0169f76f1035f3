import pytest
from PIL import Image

from sparsepipe.plots import style, timeline
from sparsepipe.plots.timeline import timeline_figure, timeline_text
from tests.support.picture_checks import has_colour, pixels, texts_outside

LANES = [
    ("stage 0", [("F", 0, None, 0, 1), ("F", 1, None, 1, 2), ("B", 0, None, 4, 6),
                 ("U", 0, None, 6, 6), ("B", 1, None, 7, 9), ("U", 1, None, 9, 9)]),
    ("stage 1", [("F", 0, None, 1, 2), ("B", 0, None, 2, 4), ("U", 0, None, 4, 4),
                 ("F", 1, None, 4, 5), ("B", 1, None, 5, 7), ("U", 1, None, 7, 7)]),
]  # fmt: skip
PARTS = [("a", [("F", 0, 0, 0, 1), ("F", 0, 1, 1, 2), ("B", 0, 1, 2, 4), ("U", 0, None, 4, 5)])]


def test_text_of_a_pipeline():
    assert (
        timeline_text(LANES)
        == """\
time    0  1  2  3  4  5  6  7  8  9
stage 0 |F0|F1|.....|B0---U..|B1---U
stage 1 ...|F0|B0---UF1|B1---U
"""
    )


def test_text_of_microbatches_and_of_updates_that_take_time():
    assert (
        timeline_text(PARTS)
        == """\
time 0    1    2    3    4    5
a    |F0.0|F0.1|B0.1-----|U0==|
"""
    )


def test_text_may_end_early_and_in_the_middle_of_a_bar():
    assert (
        timeline_text(LANES, until=5)
        == """\
time    0  1  2  3  4  5
stage 0 |F0|F1|.....|B0-
stage 1 ...|F0|B0---UF1|
"""
    )


def test_text_has_its_own_unit():
    seconds = [("a", [("F", 0, None, 0.0, 0.25), ("B", 0, None, 0.25, 0.75)])]
    assert timeline_text(seconds, unit=0.25) == "time 0  1  2  3\na    |F0|B0---|\n"


def test_text_of_nobody_and_of_nothing():
    assert timeline_text([]) == "time 0\n"
    assert timeline_text([("idle", [])]) == "time 0\nidle\n"


def texts(figure):
    return {t.get_text(): t.get_position() for t in figure.axes[0].texts}


def test_a_bar_lies_where_its_row_says_and_bears_its_name():
    figure = timeline_figure(LANES, title="two stages")
    assert texts(figure)["B0"] == (3, 1)  # the later one, in the second lane
    assert texts(figure)["F1"] == (4.5, 1)
    bars = [p for p in figure.axes[0].patches if (p.get_x(), p.get_width()) == (4, 2)]
    assert len(bars) == 1
    assert [t.get_text() for t in figure.axes[0].get_yticklabels()] == ["stage 0", "stage 1"]
    assert figure.axes[0].get_ylim()[0] > figure.axes[0].get_ylim()[1]  # stage 0 on top


def test_updates_are_marked_where_they_are():
    marks = [line.get_xdata()[0] for line in timeline_figure(LANES, title="").axes[0].get_lines()]
    assert marks == [6, 9, 4, 7]


def test_colours_of_the_kinds_are_there_and_an_update_that_takes_time_has_a_bar():
    image = pixels(timeline_figure(LANES, title="two stages"))
    assert has_colour(image, timeline._FORWARD) > 1000
    assert has_colour(image, timeline._BACKWARD) > 1000
    points = has_colour(image, style.VERMILION)
    assert has_colour(pixels(timeline_figure(PARTS, title="parts")), style.VERMILION) > 4 * points


@pytest.mark.parametrize("ranks", [1, 6])
@pytest.mark.parametrize("minibatches", [1, 12, pytest.param(400, marks=pytest.mark.full)])
def test_nothing_is_cut_off_and_names_stay_within_their_bars(ranks, minibatches):
    lanes = [
        (f"stage {r}, replica 10", [("F", m, 3, m + r, m + r + 1) for m in range(minibatches)])
        for r in range(ranks)
    ]
    figure = timeline_figure(lanes, title="many")
    assert not texts_outside(figure)
    per_unit = figure.axes[0].transData.transform([[0, 0], [1, 0]])[:, 0]
    for text in figure.axes[0].texts:
        assert text.get_window_extent().width < per_unit[1] - per_unit[0]
    assert bool(figure.axes[0].texts) == (minibatches < 400)  # too narrow for names


def test_a_picture_may_end_early():
    figure = timeline_figure(LANES, title="early", until=5)
    assert figure.axes[0].get_xlim() == (0, 5)
    assert not texts_outside(figure)
    named = {(t.get_text(), t.get_position()) for t in figure.axes[0].texts}
    assert ("B0", (4.5, 0)) in named  # in the middle of what is seen of it
    assert not [name for name, _ in named if name == "B1"]


def test_the_file_is_written(tmp_path):
    path = tmp_path / "deep" / "timeline.png"
    timeline.timeline_picture(LANES, path, title="two stages")
    with Image.open(path) as image:
        assert image.width > 600


WITH_MESSAGES = [
    LANES[0],
    ("sends", [("a", 0, None, 1, 2), ("g", 0, None, 2.5, 2.6)]),
    LANES[1],
    ("sums", [("S", 0, 1, 3, 5)]),
]


def test_what_is_on_its_way_lies_in_thinner_lanes_below():
    figure = timeline_figure(WITH_MESSAGES, title="two stages")
    found = texts(figure)
    assert found["a0"] == (1.5, 0.75)
    assert found["B0"] == (3, 1.5)  # of the second stage, half a lane lower than without
    assert found["S0.1"] == (4, 2.25)
    assert "g0" not in found, "too short for its name"
    (sent,) = [p for p in figure.axes[0].patches if (p.get_x(), p.get_width()) == (1, 1)
               and p.get_y() > 0.5 and p.get_y() < 1]  # fmt: skip
    (made,) = [p for p in figure.axes[0].patches if (p.get_x(), p.get_width()) == (4, 2)]
    assert sent.get_height() == pytest.approx(made.get_height() / 2)
    assert texts_outside(figure) == []
    names = [text.get_text() for text in figure.axes[0].get_legend().get_texts()]
    assert names[-3:] == ["activation on its way", "gradient on its way", "sum over replicas"]
    plain = timeline_figure(LANES, title="").axes[0].get_legend().get_texts()
    assert [text.get_text() for text in plain] == names[:4]


def test_a_picture_may_be_kept_narrow():
    lanes = [("many", [("F", number, None, number, number + 1) for number in range(40)])]
    wide, narrow = (timeline_figure(lanes, title="", max_width_in=most) for most in (40.0, 6.0))
    assert wide.get_figwidth() > 12 > 7 > narrow.get_figwidth()
    assert "F30" in texts(wide)
    assert "F30" not in texts(narrow), "no room for it"
    assert texts_outside(narrow) == []


def test_messages_in_text():
    assert timeline_text([("sends", [("a", 0, None, 0, 2)])]) == "time  0 1 2\nsends |a0>|\n"
