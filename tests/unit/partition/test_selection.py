"""The layers of a plan to recompute: what is in flight where, what a device has room for."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sparsepipe.errors import ConfigError
from sparsepipe.partition.activation_checkpointing.selection import RecomputedLayers, choose_spans
from sparsepipe.partition.activation_checkpointing.setting import bounds_of, spans_in_plan
from sparsepipe.partition.memory import MemoryModel, Microbatches, sizes_of
from sparsepipe.profiling import Profile
from sparsepipe.schedule import Plan
from tests.support.instances import profile_of
from tests.support.plans import plan_on

MEMORY = MemoryModel(stash=False, optimizer=1.0, gradients=1.0, reserved_bytes=50.0)


def profile(forward_s: list[float], *, saved_bytes: float = 40.0) -> Profile:
    """A profile of layers that save the given bytes; their inputs and outputs are small."""
    each = {"activation_bytes": 4.0, "parameter_bytes": 10.0, "saved_bytes": saved_bytes}
    each |= {"begin_bytes": 0.0, "end_bytes": 4.0}
    costs = [{"forward_s": s, "backward_s": 2 * s, **each} for s in forward_s]
    return profile_of(costs, input_bytes=4.0)


TWO = plan_on(["here/gpu/0"], ["here/gpu/1"], cuts=[2], num_layers=4)
EVEN = Microbatches(schedule="gpipe", count=4, batch_size=8)
GPU = {"gpu": profile([1.0, 2.0, 2.0, 1.0])}
# Stage 0 of four microbatches in flight, each a quarter: 4 (10 + 10 + 1), if it keeps all.
WEIGHTS_BYTES = 50.0 + 3 * 20.0


def chosen(
    room: float, plan: Plan = TWO, *, cut: Microbatches = EVEN, **profiles: Profile
) -> RecomputedLayers:
    devices = [device for stage in plan.stages for device in stage.devices]
    limits = dict.fromkeys(devices, WEIGHTS_BYTES + room)
    return choose_spans(plan, profiles or GPU, limits, memory=MEMORY, microbatches=cut)


def test_as_little_as_fits_by_hand() -> None:
    assert chosen(84.0).spans == ((), ())
    found = chosen(83.0)
    # Of layer 0 its input stays, 1 for each, and one microbatch's 10: 4 (1 + 10 + 1) + 10.
    assert bounds_of(found.spans) == [[0, 0], [3, 3]]
    assert found.times_s == (1.0, 1.0)
    assert found.peaks_bytes[0] == 4 * 12 + 10
    assert found.rooms_bytes == pytest.approx((83.0, 83.0))
    # Both layers as one span: 4 (1 + 1) + 20; each by itself: 4 (1 + 1 + 1) + 10.
    assert bounds_of(chosen(28.0).spans) == [[0, 1], [2, 3]]
    assert bounds_of(chosen(27.0).spans) == [[0, 0], [1, 1], [2, 2], [3, 3]]
    assert chosen(27.0).times_s == (3.0, 3.0)


def test_stages_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ConfigError, match="stage 0 does not fit its devices") as refused:
        chosen(21.0)
    for remedy in ("parallel.strategy.microbatches", "sync_1f1b", "data.batch_size"):
        assert remedy in refused.value.remedy
    with pytest.raises(ConfigError, match=r"have 0\.0 MiB"):
        chosen(-1.0)


def test_1f1b_has_less_in_flight() -> None:
    cut = replace(EVEN, schedule="1f1b")
    # Two in stage 0, one in stage 1.
    assert chosen(42.0, cut=cut).spans == ((), ())
    assert bounds_of(chosen(41.0, cut=cut).spans) == [[0, 0]]


@pytest.mark.parametrize(
    ("config", "schedule", "expected"),
    [
        ("1-1-1", "gpipe", [8, 8, 8]),
        ("1-1-1", "1f1b", [3, 2, 1]),
        ("1-1-1", "eager_1f1b", [5, 3, 1]),
        ("2-1", "gpipe", [4, 8]),
        ("2-1", "1f1b", [2, 1]),
        ("1-3", "gpipe", [8, 3]),
        ("1-3", "1f1b", [4, 1]),
        ("1-3", "eager_1f1b", [7, 1]),
    ],
)
def test_microbatches(config: str, schedule: str, expected: list[int]) -> None:
    cut = Microbatches(schedule=schedule, count=8, batch_size=None)
    plan = Plan.of(config=config, cuts=range(1, len(expected)), num_layers=4)
    assert [cut.in_flight(plan, stage) for stage in range(plan.num_stages)] == expected


def test_the_largest_microbatch_counts() -> None:
    """Of those that two devices of the first stage cut their batches into."""
    assert Microbatches(schedule="gpipe", count=5, batch_size=None).share(2) == 1 / 2
    assert Microbatches(schedule="gpipe", count=6, batch_size=None).share(2) == 1 / 3
    assert Microbatches(schedule="gpipe", count=6, batch_size=7).share(2) == 3 / 7


@pytest.mark.parametrize(("schedule", "expected"), [("gpipe", [1.0, 1.5]), ("1f1b", [1.0, 1.0])])
def test_no_device_has_the_most_and_the_largest_microbatches(
    schedule: str, expected: list[float]
) -> None:
    """Of three that read, one cuts its batch in halves; the others have a whole one each."""
    cut = Microbatches(schedule=schedule, count=4, batch_size=None)
    assert sizes_of(4, 3) == [1 / 2, 1, 1, 1 / 2]
    plan = Plan.of(config="3-2", cuts=[2], num_layers=4)
    assert cut.share(3) == 1
    assert [cut.in_flight(plan, stage) for stage in (0, 1)] == expected
    # With 1f1b the stage in the middle has the two whole ones at the same time.
    plan = Plan.of(config="3-1-1", cuts=[2, 3], num_layers=4)
    in_flight = [cut.in_flight(plan, stage) for stage in range(3)]
    assert in_flight == [1, 3, 3] if schedule == "gpipe" else [1, 2, 1]


def test_devices_of_a_stage_that_differ_recompute_the_same() -> None:
    """Of each layer the worst counts: the time of one device, the bytes of the other."""
    plan = plan_on(["here/slow/0", "here/large/0"], ["here/slow/1"], cuts=[2], num_layers=4)
    kinds = {
        "slow": profile([4.0, 2.0, 2.0, 1.0], saved_bytes=0.0),
        "large": profile([1.0, 1.0, 1.0, 1.0]),
    }
    # Each has two of four microbatches in flight, halves: 2 (20 + 20 + 2), + replicas' buffers.
    buffers = 2 * 20.0
    found = chosen(84.0 + buffers, plan, **kinds)
    assert found.spans == ((), ())
    found = chosen(83.0 + buffers, plan, **kinds)
    assert bounds_of(found.spans) == [[1, 1]]
    assert found.times_s[0] == pytest.approx(2.0)


def test_a_plan_file_has_the_spans() -> None:
    told = replace(TWO, details={"recomputed": [[0, 1], [3, 3]]})
    assert spans_in_plan(Plan.from_json(told.to_json())) == ((range(2),), (range(3, 4),))
    assert spans_in_plan(TWO) == ((), ())
