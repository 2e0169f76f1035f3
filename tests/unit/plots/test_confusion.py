import numpy as np
import pytest
from matplotlib.colors import to_hex
from PIL import Image

from sparsepipe.plots import style
from sparsepipe.plots.confusion import confusion_figure, confusion_rows, per_class_figure
from tests.support.picture_checks import texts_outside

COUNTS = np.array([[8, 2, 0], [1, 3, 0], [0, 0, 0]])
CLASSES = ("chair", "bed", "lamp")


def cells(figure):
    axes = figure.axes[0]
    return {
        tuple(round(p) for p in reversed(text.get_position())): text.get_text()
        for text in axes.texts
    }


def test_rows_are_in_percent_of_their_class_and_zeros_are_left_out():
    figure = confusion_figure(COUNTS, CLASSES)
    assert cells(figure) == {(0, 0): "80", (0, 1): "20", (1, 0): "25", (1, 1): "75"}
    shown = figure.axes[0].images[0].get_array()
    np.testing.assert_allclose(shown, [[80, 20, 0], [25, 75, 0], [0, 0, 0]])


def test_every_pair_of_classes_is_a_row_of_the_table():
    rows = confusion_rows(COUNTS, CLASSES)
    assert [(row["actual"], row["predicted"]) for row in rows] == [
        (actual, predicted) for actual in CLASSES for predicted in CLASSES
    ]
    assert [row["shapes"] for row in rows] == [8, 2, 0, 1, 3, 0, 0, 0, 0]


def test_title_and_labels_say_what_is_counted():
    axes = confusion_figure(COUNTS, CLASSES).axes[0]
    title = axes.get_title(loc="left")
    assert "78.6 % (11 of 14)" in title.replace("\n", " ")
    assert "mean over classes 77.5 %" in title  # of the two classes that have samples
    assert [t.get_text() for t in axes.get_yticklabels()] == [
        "chair  (10)",
        "bed  (4)",
        "lamp  (0)",
    ]
    assert [t.get_text() for t in axes.get_xticklabels()] == list(CLASSES)
    assert "predicted" in axes.get_xlabel()
    assert "true" in axes.get_ylabel()


def test_the_diagonal_is_written_even_when_nothing_was_right():
    assert cells(confusion_figure([[0, 5], [0, 5]], ["a", "b"]))[0, 0] == "0"


@pytest.mark.parametrize("count", [1, 2, 10, 40])
def test_any_number_of_classes_fits_without_cut_or_overlapping_labels(count):
    classes = [f"night_stand_{i}" for i in range(count)]
    figure = confusion_figure(np.eye(count, dtype=int) * 1000 + 1, classes)
    assert texts_outside(figure) == []
    axes = figure.axes[0]
    box = axes.get_window_extent()
    assert 0.85 < box.width / box.height < 1.15  # cells are square to the eye
    label_height = axes.get_yticklabels()[0].get_window_extent().height
    assert label_height < box.height / count * 1.05
    digits = axes.texts[0].get_window_extent()
    assert digits.width < box.width / count
    assert digits.height >= 8  # pixels
    assert max(figure.get_size_inches()) * figure.dpi < 2600


def test_per_class_bars_are_sorted_and_skip_classes_without_samples():
    axes = per_class_figure(COUNTS, CLASSES).axes[0]
    bars = {
        label.get_text(): bar.get_width()
        for label, bar in zip(axes.get_yticklabels(), axes.patches, strict=True)
    }
    assert bars == {"bed  (4)": 75.0, "chair  (10)": 80.0}
    assert list(bars) == ["bed  (4)", "chair  (10)"]  # from below
    assert len({to_hex(bar.get_facecolor()) for bar in axes.patches}) == 1
    assert "%" in axes.get_xlabel()


@pytest.mark.parametrize("figure_of", [confusion_figure, per_class_figure])
def test_pictures_are_written_whatever_the_counts_and_the_names(tmp_path, figure_of):
    for counts, names in (
        (np.zeros((2, 2), dtype=int), ["a", "b"]),
        ([[1, 0, 0], [0, 1, 0], [0, 0, 1]], ["a$_{b$", "half \udc80", "plain"]),
    ):
        style.save_png(figure_of(counts, names), tmp_path / "a.png")
        assert Image.open(tmp_path / "a.png").size[0] > 100
