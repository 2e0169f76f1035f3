"""Words by which runs of the paper's experiments are found in a tracker."""

from __future__ import annotations

import pytest

from tests.support.command_line import composed


@pytest.mark.parametrize("name", ["table1", "table2", "table3", "fig7", "fig8", "fig9", "all"])
def test_experiments_of_the_paper_are_tagged_so(name: str) -> None:
    assert composed(f"experiment={name}").to_dict()["tags"] == ["paper", name]
