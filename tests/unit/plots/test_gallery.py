import numpy as np
import pytest
from PIL import Image

from sparsepipe.plots import style
from sparsepipe.plots.gallery import gallery_figure, view
from tests.support.picture_checks import has_colour, pixels, texts_outside

CLASSES = ("chair", "bed")


def cloud(count=500, seed=0):
    return np.random.default_rng(seed).uniform(-1, 1, (count, 3))


def titles(figure):
    return [axes.get_title().strip() for axes in figure.axes]


def test_titles_mark_right_and_wrong_with_a_sign_and_the_probability():
    figure = gallery_figure(
        [cloud()] * 3, [0, 1, 1], [0, 0, 1], CLASSES, probabilities=[0.981, 0.6, 1.0]
    )
    assert titles(figure) == ["✓ chair  98 %", "✗ bed\n→ chair  60 %", "✓ bed  100 %"]
    assert "2 of 3" in figure.get_suptitle()
    assert "%: probability of the prediction" in figure.get_suptitle()
    plain = gallery_figure([cloud()], [0], [0], CLASSES)
    assert titles(plain) == ["✓ chair"]
    assert "%" not in plain.get_suptitle()


def test_files_are_named_whatever_letters_they_have():
    files = ["/data/chair/a$_b$.stl", "x" * 60 + ".obj", "plain"]
    figure = gallery_figure(
        [cloud()] * 3, None, [0, 1, 0], CLASSES, probabilities=[0.9, 0.8, 0.7], files=files
    )
    named = [title.splitlines() for title in titles(figure)]
    assert named[0] == ["a$_b$.stl", "chair  90 %"]
    assert named[1][0] == "x" * 12 + "…" + "x" * 8 + ".obj"
    assert named[2] == ["plain", "chair  70 %"]
    assert "Predicted classes of 3 shapes" in figure.get_suptitle()
    assert texts_outside(figure) == []
    drawn = pixels(figure)
    assert has_colour(drawn, style.VERMILION) == 0, "nobody knows which are wrong"
    files = ["/data/a/part.stl", "/data/b/part.stl", "part.stl", "/data/b/other.stl"]
    figure = gallery_figure([cloud()] * 4, None, [0] * 4, CLASSES, files=files)
    named = [title.splitlines()[0] for title in titles(figure)]
    one = gallery_figure([cloud()], None, [0], CLASSES, files=files[:1])
    assert "Predicted classes of 1 shape\n" in one.get_suptitle()
    assert named == ["a/part.stl", "b/part.stl", "part.stl", "other.stl"]


def test_a_wrong_prediction_has_a_colour_of_its_own():
    right = pixels(gallery_figure([cloud()], [0], [0], CLASSES))
    wrong = pixels(gallery_figure([cloud()], [0], [1], CLASSES))
    assert has_colour(right, style.VERMILION) == 0
    assert has_colour(wrong, style.VERMILION) > 1000
    assert has_colour(right, style.BLUE) > 300
    assert has_colour(wrong, style.BLUE) == 0


@pytest.mark.parametrize(
    ("count", "columns", "grid"), [(13, 6, (3, 6)), (2, 6, (1, 2)), (4, 1, (4, 1))]
)
def test_one_panel_a_shape_in_as_many_rows_as_needed(count, columns, grid):
    figure = gallery_figure([cloud(20)] * count, [0] * count, [1] * count, CLASSES, columns=columns)
    assert len(figure.axes) == count
    spec = figure.axes[0].get_gridspec()
    assert (spec.nrows, spec.ncols) == grid
    assert texts_outside(figure) == []


def test_z_is_up_and_shapes_are_not_distorted():
    upright = np.array([[0, 0, 0], [0, 0, 1.0]])
    flat, _ = view(upright)
    right, up = flat[1] - flat[0]
    assert right == pytest.approx(0)
    assert up > 0.9
    # An orthographic view: right, up and depth are a rotation of x, y, z.
    points = cloud(50)
    flat, depth = view(points)
    seen = np.column_stack([flat, depth])
    np.testing.assert_allclose(np.linalg.norm(seen, axis=1), np.linalg.norm(points, axis=1))
    axes = gallery_figure([points * [5, 1, 1]], [0], [0], CLASSES).axes[0]
    axes.figure.draw_without_rendering()
    box = axes.get_window_extent()
    per_unit = box.width / np.ptp(axes.get_xlim()), box.height / np.ptp(axes.get_ylim())
    assert per_unit[0] == pytest.approx(per_unit[1])


def test_near_points_cover_far_ones_and_are_darker():
    _, depth = view(np.array([[0, 0, 0], [0, 0, 5.0]]))
    assert depth[1] < depth[0]  # seen from above, what is higher is nearer
    collection = (
        gallery_figure([[[0, 0, 5.0], [0, 0, 0.0]]], [0], [0], CLASSES).axes[0].collections[0]
    )
    drawn = collection.get_offsets()[:, 1]
    assert drawn[0] < drawn[1]  # the far one first
    values = collection.get_array()
    brightness = [sum(collection.cmap(collection.norm(v))[:3]) for v in values]
    assert brightness[0] > brightness[1]


def test_odd_clouds_are_drawn_as_far_as_they_can_be():
    big, holes = cloud(50_000), cloud(10)
    holes[3] = np.nan
    figure = gallery_figure([np.zeros((0, 3)), big, holes, cloud(1)], [0] * 4, [0] * 4, CLASSES)
    drawn = [len(axes.collections[0].get_offsets()) for axes in figure.axes]
    assert drawn[0] == 0
    assert 1500 <= drawn[1] <= 3000
    assert drawn[2:] == [9, 1]
    assert [text.get_text() for text in figure.axes[0].texts] == ["no points"]


def test_the_file_is_a_png_and_equal_input_gives_equal_bytes(tmp_path):
    for name in ("a.png", "b.png"):
        figure = gallery_figure([cloud()] * 7, [0] * 7, [1] * 7, CLASSES, columns=4)
        style.save_png(figure, tmp_path / name)
    with Image.open(tmp_path / "a.png") as picture:
        picture.verify()
        assert picture.size[0] == int(4 * 1.9 * style.DPI)
    assert (tmp_path / "a.png").read_bytes() == (tmp_path / "b.png").read_bytes()
