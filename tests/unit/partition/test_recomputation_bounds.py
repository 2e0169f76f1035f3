"""What recomputing takes at least, beside the cheapest choice of each stage."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from sparsepipe.partition.activation_checkpointing.bounds import BOUNDS, Bounds
from sparsepipe.partition.activation_checkpointing.stage import cheapest
from sparsepipe.partition.activation_checkpointing.stage_memory import LayerCost, StageCost
from sparsepipe.partition.activation_checkpointing.work import Work


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


def test_figures_are_made_where_stages_may_need_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """None where all fits, and with little room none of spans that have much inside."""
    made: list[tuple[float, ...]] = []
    between = Bounds._between

    def counted(self: Bounds, *figures: float) -> Any:
        made.append(figures)
        return between(self, *figures)

    monkeypatch.setattr(Bounds, "_between", counted)
    chain = random_chain(random.Random(3), 30)
    bounds, shape = Bounds(chain, Work()), (31, 31)
    plain = chain.peak_bytes(())
    assert not bounds.seconds_II(np.full(shape, 2 * plain), in_flight=1).any()
    assert made == []
    bounds.seconds_II(np.full(shape, -1.0), in_flight=1)
    assert made == []
    bounds.seconds_II(np.full(shape, 0.1 * plain), in_flight=1)
    few = len(made)
    assert 0 < few < BOUNDS / 2
    assert max(cap for _, _, cap in made) < 0.5 * plain
    bounds.seconds_II(np.full(shape, 0.1 * plain), in_flight=1)
    assert len(made) == few, "which are kept"
    bounds.seconds_II(np.full(shape, 0.9 * plain), in_flight=1)
    assert few < len(made) <= BOUNDS


def test_bounds_are_lower_where_their_work_is_done() -> None:
    """And as they are as soon as there is enough of it."""
    chain, shape = random_chain(random.Random(3), 30), (31, 31)
    room_II = np.full(shape, 0.6 * chain.peak_bytes(()))
    every = Work()
    best_II = Bounds(chain, every).seconds_II(room_II, in_flight=1)
    assert best_II[0, -1] > 0
    sums = []
    for share in (0, 0.2, 0.5, 1, 2, 8):
        work = Work(share * every.done)
        found_II = Bounds(chain, work).seconds_II(room_II, in_flight=1)
        assert (found_II <= best_II).all()
        assert work.done <= share * every.done / 4 + 300, "a figure more, and all spans"
        sums.append(found_II[np.isfinite(best_II)].sum())
    assert sums == sorted(sums)
    assert sums[0] == 0 < sums[2] < sums[-1] == best_II[np.isfinite(best_II)].sum()


def test_bounds_are_below_the_cheapest_choices_and_near() -> None:
    near = []
    for seed in range(30):
        rng = random.Random(seed)
        length, in_flight = rng.randint(2, 8), rng.choice([1, 2, 4])
        chain = random_chain(rng, length)
        room_II = np.full((length + 1, length + 1), rng.uniform(20, 100) * in_flight)
        bounds_II = Bounds(chain, Work()).seconds_II(room_II, in_flight=in_flight)
        for first in range(length):
            for end in range(first + 1, length + 1):
                stage = StageCost(
                    layers=chain.layers[first:end],
                    input_bytes=chain.border_bytes(first, True),
                    in_flight=in_flight,
                )
                found = cheapest(stage, limit_bytes=float(room_II[0, 0])).spans
                bound = float(bounds_II[first, end])
                if found is None:
                    continue
                time_s = stage.time_s(found)
                assert bound <= time_s * (1 + 1e-9) + 1e-9, (seed, first, end)
                assert found != () or bound == 0.0
                if time_s:
                    near.append(bound / time_s)
    assert np.mean(near) > 0.4, "else too many stages would have to be counted"
