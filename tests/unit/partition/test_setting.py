"""Settings of recomputed layers as spans of a plan's stages, and those that are refused."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest

from sparsepipe.errors import ConfigError
from sparsepipe.partition.activation_checkpointing.setting import (
    bounds_of,
    in_words,
    recomputed_spans,
)
from sparsepipe.schedule import Plan

PLAN = Plan.of(config="1-2-1", cuts=[2, 8], num_layers=10)


@pytest.mark.parametrize(
    ("setting", "spans"),
    [
        ("none", [[], [], []]),
        ({}, [[], [], []]),
        ({"layers": [], "stages": []}, [[], [], []]),
        ("all", [[(0, 2)], [(2, 8)], [(8, 10)]]),
        ({"stages": [2, 0]}, [[(0, 2)], [], [(8, 10)]]),
        ({"layers": [0, 1, 8, 9]}, [[(0, 2)], [], [(8, 10)]]),
        ({"layers": [3, 5, 4, 7]}, [[], [(3, 6), (7, 8)], []]),
        ({"layers": [[3, 4], [5, 6]]}, [[], [(3, 5), (5, 7)], []]),
        ({"layers": [2, [3, 4], 5, 6]}, [[], [(2, 3), (3, 5), (5, 7)], []]),
        ({"layers": [[0, 9]]}, [[(0, 2)], [(2, 8)], [(8, 10)]]),
        ({"layers": [[0, 2], 3, [7, 9]]}, [[(0, 2)], [(2, 3), (3, 4), (7, 8)], [(8, 10)]]),
        ({"layers": [1, 2]}, [[(1, 2)], [(2, 3)], []]),
        ({"layers": [1, [4, 5]], "stages": [2]}, [[(1, 2)], [(4, 6)], [(8, 10)]]),
    ],
)
def test_settings_as_spans_of_stages(setting: Any, spans: list[list[tuple[int, int]]]) -> None:
    found = recomputed_spans(setting, PLAN)
    assert found == tuple(tuple(range(first, end) for first, end in stage) for stage in spans)
    every = [span for stage in found for span in stage]
    assert all(a.stop <= b.start for a, b in pairwise(every))
    assert recomputed_spans({"layers": bounds_of(found)}, PLAN) == found


def test_layers_in_words() -> None:
    assert in_words(recomputed_spans({"layers": [1, [4, 6]]}, PLAN)) == "1, 4-6"
    assert in_words(recomputed_spans("none", PLAN)) == "none"


@pytest.mark.parametrize(
    ("setting", "named"),
    [
        ("some", "'some'"),
        ({"layer": [3]}, "layer"),
        ({"layers": [[4, 3]]}, "[4, 3]"),
        ({"layers": ["3"]}, "'3'"),
        ({"layers": [[1, 4], 4]}, "layer 4 is named twice"),
        ({"stages": [1], "layers": [[0, 3]]}, "layer 2 is named twice, also by stage 1"),
        ({"layers": [[8, 11]]}, "network is 9, not 11"),
        ({"stages": [0, 3]}, "is 2, not 3"),
    ],
)
def test_a_refusal_names_the_value_and_has_a_remedy(setting: Any, named: str) -> None:
    with pytest.raises(ConfigError) as caught:
        recomputed_spans(setting, PLAN)
    assert named in caught.value.message
    assert "{stages: [0], layers: [14, [17, 22]]}" in caught.value.remedy
