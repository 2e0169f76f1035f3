import csv

import pytest
from PIL import Image

from sparsepipe.errors import DataError
from sparsepipe.plots import style
from sparsepipe.plots.curves import learning_curves_figure
from tests.support.picture_checks import has_colour, pixels, texts_outside


def run_rows(epochs=3, *, val=True, test=True):
    rows = []
    for epoch in range(epochs):
        row = {"epoch": epoch, "step": 10 * (epoch + 1)}
        row |= {"train/loss": 2.0 - 0.5 * epoch, "train/accuracy": 0.2 + 0.2 * epoch}
        if val:
            row |= {"val/loss": 2.1 - 0.5 * epoch, "val/accuracy": 0.1 + 0.2 * epoch}
        rows.append(row)
    if test:
        rows[-1] |= {"test/loss": 1.2, "test/accuracy": 0.55}
    return rows


def lines(axes):
    return {line.get_label(): line for line in axes.get_lines()}


def test_the_curves_hold_the_values_of_the_run():
    loss, accuracy = learning_curves_figure(run_rows()).axes
    train = lines(loss)["training"]
    assert list(train.get_xdata()) == [1, 2, 3]
    assert list(train.get_ydata()) == [2.0, 1.5, 1.0]
    assert lines(accuracy)["validation"].get_ydata() == pytest.approx([10, 30, 50])
    test = lines(accuracy)["test, last weights: 55.0 %"]
    assert list(test.get_ydata()) == pytest.approx([55.0, 55.0])
    assert loss.get_xlabel() == "epoch"
    assert "nats" in loss.get_ylabel()
    assert "%" in accuracy.get_ylabel()


def test_only_what_was_logged_is_drawn():
    loss, accuracy = learning_curves_figure(run_rows(val=False, test=False)).axes
    assert set(lines(loss)) == set(lines(accuracy)) == {"training"}
    (only_loss, empty) = learning_curves_figure([{"epoch": 0, "train/loss": 1.0}]).axes
    assert lines(only_loss)
    assert not lines(empty)
    assert [text.get_text() for text in empty.texts] == ["not logged"]
    _, accuracy = learning_curves_figure([{"epoch": 0, "test/accuracy": 0.9}], tested="best").axes
    assert "test, best weights: 90.0 %" in lines(accuracy)


def test_accuracy_axis_stays_within_what_accuracy_can_be():
    rows = [{"epoch": e, "train/accuracy": v} for e, v in enumerate([0.0, 1.0])]
    _, accuracy = learning_curves_figure(rows).axes
    bottom, top = accuracy.get_ylim()
    assert bottom == 0
    assert 100 <= top <= 101


def test_nothing_logged_is_an_error_with_a_remedy():
    with pytest.raises(DataError, match="nothing to draw") as caught:
        learning_curves_figure([{"epoch": 0, "lr": 0.1}])
    assert "one whole epoch" in caught.value.remedy


def test_the_picture_is_a_png_of_the_figures_size_from_rows_or_a_csv(tmp_path):
    rows = run_rows()
    with (tmp_path / "metrics.csv").open("w", newline="") as stream:
        writer = csv.DictWriter(stream, sorted({key for row in rows for key in row}), restval="")
        writer.writeheader()
        writer.writerows(rows)
    style.save_png(learning_curves_figure(tmp_path / "metrics.csv"), tmp_path / "new" / "a.png")
    style.save_png(learning_curves_figure(rows), tmp_path / "b.png")
    with Image.open(tmp_path / "b.png") as picture:
        assert picture.format == "PNG"
        assert picture.size == (int(9.6 * style.DPI), int(3.9 * style.DPI))
    assert (tmp_path / "new" / "a.png").read_bytes() == (tmp_path / "b.png").read_bytes()


def test_the_test_result_is_seen_in_its_own_colour_and_nothing_is_cut_off():
    without, with_test = (learning_curves_figure(run_rows(test=t)) for t in (False, True))
    assert has_colour(pixels(without), style.VERMILION) == 0
    assert has_colour(pixels(with_test), style.VERMILION) > 500
    assert texts_outside(with_test) == []


def test_drawing_leaves_matplotlibs_global_state_alone(tmp_path):
    import matplotlib

    before = (dict(matplotlib.rcParams), matplotlib.get_backend())
    style.save_png(learning_curves_figure(run_rows()), tmp_path / "x.png")
    assert (dict(matplotlib.rcParams), matplotlib.get_backend()) == before


@pytest.mark.parametrize("axis", ["x", "y"])
def test_an_axis_reaches_below_zero_only_where_a_value_does(axis: str) -> None:
    """Its margin does not: times, shares and positive losses have no negative ticks."""
    for least, below in ((0.01, False), (0.0, False), (-0.5, True)):
        axes = style.new_figure(width_in=3, height_in=3).subplots()
        axes.plot([least, 5.0], [least, 5.0])
        style.from_zero(axes, axis)
        low, high = axes.get_xlim() if axis == "x" else axes.get_ylim()
        assert (low < 0) == below
        assert high > 5
