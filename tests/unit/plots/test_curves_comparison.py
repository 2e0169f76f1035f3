import csv

import pytest

from sparsepipe.errors import DataError
from sparsepipe.plots.curves import comparison_figure, curve
from tests.support.picture_checks import texts_outside


def rows(losses, *, accuracies=(), epoch_s=60.0):
    """A run's metrics: one row an epoch, each of which takes as long."""
    made = []
    for epoch, loss in enumerate(losses):
        row = {"epoch": epoch, "step": 10 * (epoch + 1), "train/loss": loss}
        row["time/epoch_s"] = epoch_s
        if epoch < len(accuracies):
            row["val/accuracy"] = accuracies[epoch]
        made.append(row)
    return made


def write(path, made):
    with path.open("w", newline="") as stream:
        writer = csv.DictWriter(stream, sorted({k for row in made for k in row}), restval="")
        writer.writeheader()
        writer.writerows(made)
    return path


def test_a_curve_is_mean_and_range_over_runs_at_their_mean_times():
    runs = [rows([4.0, 2.0], epoch_s=30.0), rows([2.0, 1.0], epoch_s=90.0)]
    found = curve(runs, "train/loss")
    assert found.epochs == (1, 2)
    assert found.minutes == pytest.approx((1.0, 2.0))
    assert found.mean == pytest.approx((3.0, 1.5))
    assert found.least == (2.0, 1.0)
    assert found.largest == (4.0, 2.0)


def test_a_curve_has_the_epochs_that_all_runs_have():
    longer = rows([3.0, 2.0, 1.0])
    assert curve([longer, longer[:2]], "train/loss").epochs == (1, 2)
    unvalidated = rows([3.0, 2.0, 1.0], accuracies=[0.5])
    unvalidated[2]["val/accuracy"] = 0.7
    found = curve([unvalidated], "val/accuracy")
    assert (found.epochs, found.mean) == ((1, 3), (0.5, 0.7))
    assert found.minutes == pytest.approx((1.0, 3.0)), "the second epoch took its time too"


def test_nothing_is_known_of_the_time_after_an_epoch_without_one():
    broken = rows([3.0, 2.0, 1.0])
    broken[1]["time/epoch_s"] = ""
    assert curve([broken], "train/loss").epochs == (1,)


def test_the_figure_shows_each_way_over_epochs_and_over_time(tmp_path):
    fast = [rows([2.0, 1.0], accuracies=[0.5, 0.9], epoch_s=30.0)] * 2
    slow = write(tmp_path / "metrics.csv", rows([2.0, 1.5], accuracies=[0.4, 0.8]))
    figure = comparison_figure({"fast": fast, "slow": [slow], "missing": []})
    loss, loss_time, accuracy, accuracy_time = figure.axes
    for axes in figure.axes:
        assert [line.get_label() for line in axes.get_lines()] == ["fast (2 runs)", "slow (1 run)"]
    one, other = loss_time.get_lines()
    assert list(one.get_xdata()) == pytest.approx([0.5, 1.0])
    assert list(other.get_xdata()) == pytest.approx([1.0, 2.0])
    assert list(loss.get_lines()[1].get_xdata()) == [1, 2]
    assert list(accuracy.get_lines()[1].get_ydata()) == pytest.approx([40, 80])
    assert list(accuracy_time.get_lines()[0].get_ydata()) == pytest.approx([50, 90])
    assert loss.get_xlabel() == "epoch"
    assert "minutes" in loss_time.get_xlabel()
    assert "nats" in loss.get_ylabel()
    assert "%" in accuracy.get_ylabel()
    assert texts_outside(figure) == []


@pytest.mark.parametrize(
    ("epoch_s", "unit", "last"),
    [(0.5, "seconds", 1.0), (120.0, "minutes", 4.0), (7200.0, "hours", 4.0)],
)
def test_time_has_the_unit_of_the_longest_run(epoch_s, unit, last):
    made = {"short": [rows([2.0])], "long": [rows([2.0, 1.0], epoch_s=epoch_s)]}
    made["short"][0][0]["time/epoch_s"] = 0.1
    axes = comparison_figure(made).axes[1]
    assert axes.get_xlabel() == f"training time ({unit})"
    assert axes.get_lines()[1].get_xdata()[-1] == pytest.approx(last)
    assert [line.get_label() for line in axes.get_lines()] == ["short", "long"], "of one run each"


def test_the_spread_is_a_band_from_the_least_to_the_largest():
    apart = [rows([4.0, 3.0]), rows([2.0, 1.0])]
    loss = comparison_figure({"way": apart}).axes[0]
    (band,) = loss.collections
    corners = {tuple(point) for point in band.get_paths()[0].vertices.tolist()}
    assert {(1, 4), (2, 3), (1, 2), (2, 1)} <= corners


def test_nothing_to_draw_is_an_error_with_a_remedy(tmp_path):
    with pytest.raises(DataError, match="nothing to draw") as caught:
        comparison_figure({"way": [[{"epoch": 0, "lr": 0.1}]]})
    assert "val_share" in caught.value.remedy
    with pytest.raises(DataError, match="cannot be read"):
        comparison_figure({"way": [tmp_path / "none.csv"]})
