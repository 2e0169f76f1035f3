from itertools import pairwise

import pytest

from sparsepipe.cluster import Link
from sparsepipe.plots import style, timeline
from sparsepipe.plots.timeline import lanes, timelines_figure
from sparsepipe.schedule import Span, asynchronous, naive
from sparsepipe.simulate.engine import Setting, simulate
from sparsepipe.simulate.network import ClusterNetwork
from sparsepipe.simulate.workload import Workload
from tests.support.picture_checks import has_colour, pixels, texts_outside
from tests.support.plans import plan_of


def row(kind, number, part, start, end, rank=0):
    return Span(rank, kind, number, part, start=start, end=end)


LANES = [
    ("stage 0", [row("F", 0, None, 0, 1), row("F", 1, None, 1, 2), row("B", 0, None, 4, 6),
                 row("U", 0, None, 6, 6), row("B", 1, None, 7, 9), row("U", 1, None, 9, 9)]),
    ("stage 1", [row("F", 0, None, 1, 2), row("B", 0, None, 2, 4), row("U", 0, None, 4, 4),
                 row("F", 1, None, 4, 5), row("B", 1, None, 5, 7), row("U", 1, None, 7, 7)]),
]  # fmt: skip
PARTS = [
    (
        "a",
        [row("F", 0, 0, 0, 1), row("F", 0, 1, 1, 2), row("B", 0, 1, 2, 4), row("U", 0, None, 4, 5)],
    )
]


def timeline_figure(lanes, *, title, **settings):
    return timelines_figure({title: lanes}, **settings)


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
    assert has_colour(image, timeline.FORWARD) > 1000
    assert has_colour(image, timeline.BACKWARD) > 1000
    points = has_colour(image, style.VERMILION)
    assert has_colour(pixels(timeline_figure(PARTS, title="parts")), style.VERMILION) > 4 * points


@pytest.mark.parametrize("ranks", [1, 6])
@pytest.mark.parametrize("minibatches", [1, 12, pytest.param(400, marks=pytest.mark.full)])
def test_nothing_is_cut_off_and_names_stay_within_their_bars(ranks, minibatches):
    lanes = [
        (f"stage {r}, replica 10", [row("F", m, 3, m + r, m + r + 1) for m in range(minibatches)])
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


WITH_MESSAGES = [
    LANES[0],
    ("sends", [row("activation", 0, None, 1, 2), row("gradient", 0, None, 2.5, 2.6)]),
    LANES[1],
    ("sums", [row("sum", 0, 1, 3, 5)]),
]


def test_what_is_on_its_way_lies_in_thinner_lanes_below():
    figure = timeline_figure(WITH_MESSAGES, title="two stages")
    found = texts(figure)
    assert found["a0"] == (1.5, 0.75)
    assert found["B0"] == (3, 1.5)  # of the second stage, half a lane lower than without
    assert found["s0.1"] == (4, 2.25)
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


def test_messages_and_sums_lie_under_the_rank_that_has_them_on_its_way():
    plan = plan_of("1-1")
    network = ClusterNetwork.flat(2, Link(bytes_per_s=100.0))
    workload = Workload.uniform(plan, output_bytes=100.0)
    record = simulate(naive(plan, 1), workload, Setting(network=network))
    found = lanes(plan, record.all_spans, names=["a", "b"])
    assert [(name, [(s.label, s.start, s.end) for s in own]) for name, own in found] == [
        ("a", [("F0", 0, 1), ("B0", 6, 8), ("U0", 8, 8)]),
        ("sends", [("a0", 1, 2)]),
        ("b", [("F0", 2, 3), ("B0", 3, 5), ("U0", 5, 5)]),
        ("sends", [("g0", 5, 6)]),
    ]
    assert [name for name, _ in lanes(plan, record.all_spans, least=1.0)] == ["stage 0", "stage 1"]


def test_a_lane_holds_one_thing_at_a_time():
    plan = plan_of("1-3-1")
    network = ClusterNetwork.flat(5, Link(bytes_per_s=20.0, latency_s=0.1))
    workload = Workload.uniform(plan, output_bytes=30.0, parameter_bytes=20.0)
    record = simulate(asynchronous(plan, 20), workload, Setting(network=network))
    found = lanes(plan, record.all_spans)
    for _, own in found:
        for before, after in pairwise(own):
            assert before.end <= after.start
    kinds = [span.kind for _, own in found for span in own]
    sent = kinds.count("activation") + kinds.count("gradient")
    assert sent == len(record.transfers) == 4 * 20
    assert kinds.count("sum") == 3 * len(record.reductions), "under each of the three replicas"
    assert len(found) > 5 + 5, "messages of a rank overlap here"
