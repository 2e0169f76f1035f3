"""What users can get wrong, and what they are told."""

from __future__ import annotations

import random
from typing import Any

import pytest

from sparsepipe.cluster import Inventory
from sparsepipe.errors import ConfigError, HardwareError, PlanError, ProfileError
from sparsepipe.partition.costs.layers import chain_spans
from sparsepipe.partition.costs.model import cost_model
from sparsepipe.partition.devices import DeviceKind, DevicePool
from sparsepipe.partition.explanation import as_plan, explain
from sparsepipe.partition.memory import MemoryModel, plan_bytes
from sparsepipe.partition.problem import Problem
from sparsepipe.partition.search.algorithms import best_cuts, exact, hete_mp, kind_order, mp
from sparsepipe.profiling import Profile
from sparsepipe.schedule import Plan
from tests.support.instances import profile_of

MIB = 2**20


def profile(
    slower: float,
    parameter_bytes: float = MIB,
    activation_bytes: float = MIB,
    input_bytes: float = MIB,
) -> Profile:
    costs = {
        "forward_s": slower,
        "backward_s": 2 * slower,
        "activation_bytes": activation_bytes,
        "parameter_bytes": parameter_bytes,
    }
    return profile_of([costs] * 4, model="net", input_bytes=input_bytes)


PROFILES = {"A": profile(1.0), "B": profile(2.0)}


def inventory(link: float | None = 1e9, memory_bytes: float | None = None) -> Inventory:
    devices = [
        {"name": "A", "count": 1, "memory_bytes": memory_bytes, "tflops": 10.0},
        {"name": "B", "count": 2, "memory_bytes": memory_bytes, "tflops": 20.0},
    ]
    joined = None if link is None else {"bytes_per_s": link}
    host = {"name": "here", "devices": devices, "link": joined}
    return Inventory.from_dict({"hosts": [host]})


def problem(memory: MemoryModel | None = None, **options: object) -> Problem:
    given = {"inventory": inventory(), "profiles": PROFILES, **options}
    return Problem.of(
        given["inventory"],
        given["profiles"],
        model=cost_model("sparsepipe_hete"),
        memory=memory,
        bandwidth_bytes_per_s=given.get("bandwidth"),
    )


def test_a_device_without_a_profile_is_named() -> None:
    with pytest.raises(ProfileError, match="no profile of B") as caught:
        problem(profiles={"A": PROFILES["A"]})
    assert "task=profile" in caught.value.remedy


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"inventory": inventory(link=None)}, "no bandwidth"),
        ({"bandwidth": 0}, "is 0 bytes"),
    ],
)
def test_hardware_that_no_plan_suits_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(HardwareError, match=message) as caught:
        problem(**options)
    assert caught.value.remedy


@pytest.mark.parametrize("search", [hete_mp, exact, lambda p: mp(p, device="A")])
def test_the_least_memory_with_which_a_plan_fits(search: Any) -> None:
    """Two layers with 20 MiB of parameters and as much of input, on two devices.

    The first has two versions, a gradient, a momentum and two inputs, 120 MiB; one stage more.
    """
    layers = profile(1.0, 20 * MIB, 20 * MIB).layers[:2]
    two = Profile(layers=layers, meta={"input_bytes": 20 * MIB})
    for limit_mib in (120, 119):
        device = {"name": "A", "count": 2, "memory_bytes": limit_mib * MIB}
        host = {"name": "here", "devices": [device], "link": {"bytes_per_s": 1e9}}
        rooms = Inventory.from_dict({"hosts": [host]})
        given = problem(MemoryModel(), inventory=rooms, profiles={"A": two})
        if limit_mib == 120:
            assert search(given).config == "1-1"
        else:
            with pytest.raises(PlanError, match="no plan fits the memory"):
                search(given)


def test_a_limit_moves_the_plan() -> None:
    profiles = {
        name: profile(s, MIB / 8, input_bytes=4 * MIB) for name, s in (("A", 1.0), ("B", 2.0))
    }
    assert hete_mp(problem(profiles=profiles)).config == "1-1-1"
    # The first of three stages has three inputs of 4 MiB in flight, that of two devices two, and
    # buffers for sums of its two layers' gradients.
    room = inventory(memory_bytes=12 * MIB)
    tight = problem(MemoryModel(), inventory=room, profiles=profiles)
    held = hete_mp(tight)
    assert held.config == "2-1"
    for kept, room in plan_bytes(held.stages, tight.spans, tight.pool, MemoryModel()):
        assert room is not None
        assert kept <= room


def test_what_a_stage_keeps_is_that_of_its_rows_and_borders() -> None:
    rng = random.Random(0)
    names = ("saved_bytes", "begin_bytes", "end_bytes")
    for _ in range(30):
        rows = [
            [{name: float(rng.randint(0, 30)) for name in names} for _ in range(7)]
            for _ in range(2)
        ]
        spans = chain_spans(list(map(profile_of, rows)))
        most = [{n: max(a[n], b[n]) for n in names} for a, b in zip(*rows, strict=True)]
        for first in range(7):
            for end in range(first + 1, 8):
                saved = sum(row["saved_bytes"] for row in most[first:end])
                kept = most[first]["begin_bytes"] + saved + most[end - 1]["end_bytes"]
                assert spans.stored_bytes(first, end) == pytest.approx(kept)


def test_mp_does_not_promise_what_the_real_devices_cannot_hold() -> None:
    # What the first layer saves is counted on B only.
    big = {"A": profile(1.0, input_bytes=0.0), "B": profile(2.0, input_bytes=64 * MIB)}
    tight = problem(MemoryModel(), inventory=inventory(memory_bytes=60 * MIB), profiles=big)
    with pytest.raises(PlanError, match=r"stage 0 keeps \d+ MiB") as caught:
        mp(tight, device="A")
    assert "hete_mp or exact" in caught.value.remedy
    roomy = problem(MemoryModel(), inventory=inventory(memory_bytes=999 * MIB), profiles=big)
    assert mp(roomy, device="A").config


def test_orders() -> None:
    given = problem()
    names = [kind.name for kind in given.pool.kinds]
    assert names == ["A", "B"]
    for order, expected in (
        ("by_count", [1, 0]),
        ("by_speed", [0, 1]),
        ("by_tflops", [1, 0]),
        (["B", "A"], [1, 0]),
        (["here/A", "B"], [0, 1]),
    ):
        assert kind_order(order, given.pool, given.spans) == expected


def test_by_count_counts_a_model_over_all_hosts() -> None:
    layout = (("one", "A", 2), ("one", "B", 3), ("two", "A", 2), ("two", "C", 3), ("two", "B", 1))
    kinds = tuple(DeviceKind(host=host, name=name, count=n) for host, name, n in layout)
    pool = DevicePool(kinds=kinds, inside={"one": 1.0, "two": 1.0}, between=1.0)
    # Four of A and of B, A listed first; three of C. Those of a model stay together.
    assert kind_order("by_count", pool, problem().spans) == [0, 2, 1, 4, 3]


@pytest.mark.parametrize("order", ["by_price", ["A"], ["A", "A", "B"], ["A", "B", "C"]])
def test_an_unknown_order_is_refused(order: object) -> None:
    given = problem()
    with pytest.raises(ConfigError, match="order") as caught:
        kind_order(order, given.pool, given.spans)  # type: ignore[arg-type]
    assert caught.value.remedy


@pytest.mark.parametrize("groups", [[(1, 1)], [(1, 2), (0, 1)], [(1, 0)] + [(0, 1)] * 5])
def test_given_devices_must_be_those_there_are(groups: list[tuple[int, int]]) -> None:
    with pytest.raises(PlanError, match="each device once"):
        best_cuts(problem(), groups)


def test_an_explanation_adds_up_and_becomes_a_plan_file() -> None:
    given = problem(MemoryModel(), inventory=inventory(memory_bytes=1e9))
    told = explain(given, exact(given))
    times = [time for row in told.rows for time in (row.time_s, row.transfer_s)]
    assert told.bottleneck_s == max(times)
    assert max(row.utilisation for row in told.rows) == pytest.approx(1.0)
    plan = Plan.from_json(as_plan(given, told, model="net").to_json())
    assert plan.config == told.solution.config
    assert plan.details["bottleneck_s"] == told.bottleneck_s
    assert plan.details["model"] == "net"
    devices = [device for stage in plan.stages for device in stage.devices]
    assert sorted(devices) == ["here/A/0", "here/B/0", "here/B/1"]


def test_the_verdict_where_data_parallelism_is_best() -> None:
    # Hardly any parameters to reduce, and activations too large to send.
    small = {name: profile(s, 1.0, 1e12) for name, s in (("A", 1.0), ("B", 1.0))}
    given = problem(profiles=small)
    told = explain(given, hete_mp(given))
    assert told.is_dp
    assert "data parallelism is the best plan that this search looks at:" in told.verdict()
    assert "data parallelism is the best plan:" in explain(given, exact(given)).verdict()
    other = problem(profiles={n: profile(1.0, 1e12, 1.0) for n in ("A", "B")})
    assert "as fast as data parallelism" in explain(other, hete_mp(other)).verdict()
