"""What stages keep and take of layers that are named, grown layer by layer."""

from __future__ import annotations

from math import isinf
from typing import Any

import pytest

from sparsepipe.partition.activation_checkpointing.setting import recomputed_spans
from sparsepipe.partition.activation_checkpointing.stage_memory import StageCost
from sparsepipe.partition.search.checkpointed_stages import LayerTables
from sparsepipe.schedule import Plan
from tests.support.recomputing_instances import random_recomputing

SETTINGS: tuple[Any, ...] = (
    "all",
    {"layers": [0, [1, 1]]},
    {"layers": [[0, 1]]},
    {"layers": [1], "stages": [0]},
)


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("setting", SETTINGS)
def test_each_stage_is_as_it_is_by_itself(setting: Any, whole: bool) -> None:
    clashes = 0
    for seed in range(20):
        problem, _ = random_recomputing(seed, setting)
        tables, places = LayerTables(problem), problem.spans.num_layers + 1
        kinds = tuple(range(len(problem.pool.kinds)))
        kept_II, inside_II, seconds_II = tables.named(kinds, whole)
        chain = tables.chain(kinds)
        for first in range(places - 1):
            for end in range(first + 1, places):
                own = StageCost(
                    layers=chain.layers[first:end],
                    input_bytes=chain.border_bytes(first, True),
                    in_flight=1,
                )
                named = _named(setting, first, end, places - 1)
                spans = [range(end - first)] if whole else named
                assert kept_II[first, end] == pytest.approx(own.kept_bytes(spans)), seed
                inside = max(map(own.inside_bytes, spans), default=0.0)
                assert inside_II[first, end] == pytest.approx(inside), seed
                clash = whole and bool(named)
                clashes += clash
                assert isinf(seconds_II[first, end]) == clash
                assert clash or seconds_II[first, end] == pytest.approx(own.time_s(spans)), seed
    assert bool(clashes) == (whole and setting != "all")


def _named(setting: Any, first: int, end: int, num_layers: int) -> list[range]:
    """Spans that are named, of a stage whose layers are numbered from 0."""
    if setting == "all":
        return []
    cuts = [place for place in (first, end) if 0 < place < num_layers]
    config = "-".join("1" * (len(cuts) + 1))
    plan = Plan.of(config=config, cuts=cuts, num_layers=num_layers)
    spans = recomputed_spans({"layers": setting["layers"]}, plan)[bool(first)]
    return [range(span.start - first, span.stop - first) for span in spans]
