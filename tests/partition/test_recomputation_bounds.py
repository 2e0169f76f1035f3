"""What recomputing takes at least, beside the cheapest choice of each stage."""

from __future__ import annotations

import random

import numpy as np

from sparsepipe.partition.recomputation import cheapest_spans
from sparsepipe.partition.recomputation_bounds import Bounds
from sparsepipe.partition.stage_cost import LayerCost, StageCost


def random_chain(rng: random.Random, length: int) -> StageCost:
    return StageCost(
        layers=tuple(
            LayerCost(
                forward_s=float(rng.randint(0, 9)),
                saved_bytes=float(rng.randint(0, 18)),
                begin_bytes=float(rng.randint(0, 9)),
                end_bytes=float(rng.randint(0, 4)),
                output_bytes=float(rng.randint(4, 9)),
            )
            for _ in range(length)
        ),
        input_bytes=float(rng.randint(0, 9)),
        in_flight=1,
    )


def test_bounds_are_below_the_cheapest_choices_and_near() -> None:
    near = []
    for seed in range(30):
        rng = random.Random(seed)
        length, flying = rng.randint(2, 8), rng.choice([1, 2, 4])
        chain = random_chain(rng, length)
        room_II = np.full((length + 1, length + 1), rng.uniform(20, 100) * flying)
        bounds_II = Bounds(chain).seconds_II(room_II, flying=flying)
        for first in range(length):
            for end in range(first + 1, length + 1):
                stage = StageCost(
                    layers=chain.layers[first:end],
                    input_bytes=chain.border_bytes(first, True),
                    in_flight=flying,
                )
                found = cheapest_spans(stage, limit_bytes=float(room_II[0, 0]))
                bound = float(bounds_II[first, end])
                if found is None:
                    continue
                time_s = stage.time_s(found)
                assert bound <= time_s * (1 + 1e-9) + 1e-9, (seed, first, end)
                assert found != () or bound == 0.0
                if time_s:
                    near.append(bound / time_s)
    assert np.mean(near) > 0.4, "else too many stages would have to be counted"
