"""The cheapest layers to recompute against all choices."""

from __future__ import annotations

import random

import numpy as np
import pytest

from sparsepipe.partition.activation_checkpointing.selection import SpanChoices
from sparsepipe.partition.activation_checkpointing.stage_memory import LayerCost, StageCost
from sparsepipe.profiling import Profile
from tests.support.instances import profile_of
from tests.support.recomputing_instances import every_choice


def spans_of(stage: StageCost, limit_bytes: float) -> tuple[range, ...] | None:
    """The layers that are cheapest to recompute; None where none fit."""
    choices = SpanChoices(stage)
    found = choices.cheapest(0, len(stage.layers), limit_bytes, in_flight=stage.in_flight)
    return None if found is None else tuple(found)


def random_stage(rng: random.Random, length: int) -> StageCost:
    """Small whole numbers, so that many choices are as good."""
    large = rng.choice([2, 9])
    layers = []
    for _ in range(length):
        output = float(rng.randint(0, large))
        layers.append(
            LayerCost(
                forward_s=float(rng.randint(0, large)),
                saved_bytes=float(rng.randint(0, 2 * large)),
                begin_bytes=float(rng.randint(0, large)),
                end_bytes=float(rng.randint(0, int(output))),
                output_bytes=output,
            )
        )
    return StageCost(
        layers=tuple(layers),
        input_bytes=float(rng.randint(0, large)),
        in_flight=rng.choice([1, 1, 2, 4, 32]),
    )


@pytest.mark.parametrize("seed", range(0, 300, 50))
def test_a_choice_is_found_where_one_fits(seed: int) -> None:
    """By trying all choices; costs of small whole numbers, so that many choices are as good."""
    outcomes, exact = set(), 0
    for number in range(seed, seed + 50):
        rng = random.Random(number)
        stage = random_stage(rng, rng.randint(1, 7))
        peaks = {spans: stage.peak_bytes(spans) for spans in every_choice(len(stage.layers))}
        least = min(peaks.values())
        limit = rng.uniform(least - 1, max(stage.peak_bytes(()), least + 1))
        fitting = [spans for spans, peak in peaks.items() if peak <= limit]
        found = spans_of(stage, limit)
        outcomes.add((bool(fitting), bool(found)))
        assert (found in fitting) if fitting else (found is None), number
        if found is None:
            continue
        # Where nothing need be recomputed nothing is, though it might cost no time.
        assert () not in fitting or found == (), number
        best_s = min(map(stage.time_s, fitting))
        exact += stage.time_s(found) == best_s
        assert longer(stage, found, best_s) <= 1.05, number
    assert outcomes == {(False, False), (True, False), (True, True)}
    assert exact > 30


@pytest.mark.parametrize("seed", range(0, 48, 16))
def test_a_plan_takes_at_most_five_percent_longer_than_with_the_best_layers(seed: int) -> None:
    """By trying all choices of 9 layers whose costs differ much."""
    recomputed = 0
    for number in range(seed, seed + 16):
        rng = random.Random(number)
        sizes = [rng.lognormvariate(0.0, 0.5) for _ in range(9)]
        layers = tuple(
            LayerCost(
                forward_s=rng.lognormvariate(0.0, 1.0),
                saved_bytes=size,
                begin_bytes=rng.uniform(0.0, size),
                end_bytes=rng.choice([0.0, size]),
                output_bytes=size,
            )
            for size in sizes
        )
        stage = StageCost(layers=layers, input_bytes=1.0, in_flight=rng.choice([1, 2, 4, 8]))
        choices = {spans: stage.peak_bytes(spans) for spans in every_choice(9)}
        limit = rng.uniform(min(choices.values()), stage.peak_bytes(()))
        best_s = min(stage.time_s(spans) for spans, peak in choices.items() if peak <= limit)
        every = SpanChoices(stage)
        seconds_II = every.seconds_II(np.full((10, 10), limit), in_flight=stage.in_flight)
        found = every.cheapest(0, 9, limit, in_flight=stage.in_flight)
        assert found is not None, number
        assert choices[tuple(found)] <= limit * (1 + 1e-8)
        time_s = stage.time_s(found)
        assert time_s <= seconds_II[0, 9] * (1 + 1e-12), "layers are given back only"
        assert longer(stage, tuple(found), best_s) <= 1.05
        recomputed += best_s > 0
    assert recomputed > 8


def longer(stage: StageCost, spans: tuple[range, ...], best_s: float) -> float:
    """Time of a minibatch over that with the best choice; backwards take twice as long."""
    passes_s = 3 * sum(layer.forward_s for layer in stage.layers)
    return (passes_s + stage.time_s(spans)) / ((passes_s + best_s) or 1.0)


def test_bytes_and_seconds_by_hand() -> None:
    # A convolution that keeps its input, a norm its own, a ReLU its output; twice.
    block = [
        LayerCost(forward_s=5, saved_bytes=0, begin_bytes=8, end_bytes=8, output_bytes=8),
        LayerCost(forward_s=1, saved_bytes=8, begin_bytes=0, end_bytes=8, output_bytes=8),
        LayerCost(forward_s=1, saved_bytes=8, begin_bytes=0, end_bytes=0, output_bytes=8),
    ]
    stage = StageCost(layers=(*block, *block), input_bytes=4, in_flight=3)
    assert stage.kept_bytes(()) == 8 + 4 * 8
    assert stage.kept_bytes([range(6)]) == 4 + 8  # its input and its output
    assert stage.peak_bytes([range(6)]) == 3 * 12 + (4 + 4 * 8)
    # The norm's input stays, the ReLU keeps its own, and what is between them goes.
    assert stage.kept_bytes([range(1, 2)]) == 8 + 8 + (8 + 0) + 2 * 8
    assert stage.kept_bytes([range(3), range(3, 6)]) == 4 + 8 + 8
    assert stage.inside_bytes(range(3, 6)) == 2 * 8
    assert stage.time_s([range(1, 3), range(4, 6)]) == 4
    assert spans_of(stage, 3 * 40) == ()
    assert spans_of(stage, 1) is None
    # The last ReLU keeps what is the output anyway.
    assert stage.peak_bytes([range(5)]) == 3 * 12 + (4 + 3 * 8)
    assert spans_of(stage, 3 * 12 + 28) == (range(5),)


def profile(*, counted: bool) -> Profile:
    rows = [(1.0, 10.0, 3.0), (2.0, 20.0, 5.0), (4.0, 30.0, 7.0)]
    costs = [
        {
            "forward_s": seconds,
            "activation_bytes": activation,
            **({"saved_bytes": saved, "begin_bytes": 1.0, "end_bytes": 2.0} if counted else {}),
        }
        for seconds, activation, saved in rows
    ]
    return profile_of(costs, input_bytes=6.0)


def test_a_stage_of_a_profile() -> None:
    stage = StageCost.of(profile(counted=True), first=1, last=2, in_flight=3, share=0.5)
    assert (stage.input_bytes, stage.in_flight) == (5.0, 3)
    assert stage.layers[0] == LayerCost(
        forward_s=1.0, saved_bytes=2.5, begin_bytes=0.5, end_bytes=1.0, output_bytes=10.0
    )
    # Nobody counted what layers save: their inputs.
    stage = StageCost.of(profile(counted=False), first=0, last=2, in_flight=1)
    assert [layer.saved_bytes for layer in stage.layers] == [6.0, 10.0, 20.0]
    assert stage.kept_bytes(()) == 6 + 10 + 20 + 30
    assert stage.kept_bytes([range(1, 3)]) == 6 + 10 + 30
