"""docs/simulate.md shows simulated runs as they are."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest
from PIL import Image

DOCS = Path(__file__).parents[3] / "docs"
SCRIPT = runpy.run_path(str(DOCS / "draw_simulations.py"))
PAGE = (DOCS / "simulate.md").read_text()


@pytest.mark.parametrize("name", SCRIPT["DRAWINGS"])
def test_the_picture_of_the_page_is_what_is_drawn(name: str, tmp_path: Path) -> None:
    """The same size at least: fonts and lines differ a little from release to release."""
    assert f"](simulate/{name}.png)" in PAGE
    drawn, shown = SCRIPT["draw"](name, tmp_path), DOCS / "simulate" / f"{name}.png"
    with Image.open(drawn) as new, Image.open(shown) as old:
        assert abs(new.width - old.width) <= 2
        assert abs(new.height - old.height) <= 2


def starts(name: str, lane: str) -> dict[str, tuple[float, float]]:
    rows = dict(SCRIPT["lanes_of"](SCRIPT["DRAWINGS"][name]))[lane]
    return {row.label: (row.start, row.end) for row in rows}


def test_the_papers_fig_3() -> None:
    """Counted from 0: stage 1 runs F4 after the update of minibatch 1... and B4 after that of 3."""
    times = starts("asynchronous", "stage 1")
    assert times["U1"][1] <= times["F4"][0] < times["B2"][0]
    assert times["U3"][1] <= times["B4"][0] < times["U4"][0]


def test_two_activations_at_once_take_twice_as_long() -> None:
    record = SCRIPT["record_of"](SCRIPT["DRAWINGS"]["hybrid"])
    first = [t for t in record.transfers if t.kind == "activation" and t.number in (0, 1)]
    assert [t.end - t.start for t in first] == pytest.approx([0.4, 0.4])
