"""Devices one by one: their names, which rank has which, and which GPU each is."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import yaml

from sparsepipe.cluster import Device, Host, Inventory, place_of, places_for
from sparsepipe.cluster.places import device_name, gpu_indices, places, ranks_of_nodes
from sparsepipe.errors import HardwareError, PlanError
from sparsepipe.partition.devices import Choice, DevicePool
from sparsepipe.partition.explanation import device_names


def cpu(name: str, count: int, **more: Any) -> Device:
    return Device(name=name, count=count, accelerator="cpu", **more)


def host(name: str, *devices: Device) -> Host:
    return Host(name=name, devices=devices)


ONE = Inventory(hosts=(host("a", cpu("full", 2), cpu("half", 1, slowdown=2.0)),))
UNEVEN = Inventory(hosts=(host("a", cpu("slow", 1)), host("b", cpu("quick", 2))))
TWO = Inventory(hosts=(*ONE.hosts, host("b", cpu("quick", 3))))


def texts(inventory: Inventory, devices: list[str] | None, *, ranks: int, nodes: int) -> list[str]:
    return [place.text for place in places_for(inventory, devices, ranks=ranks, nodes=nodes)]


@pytest.mark.parametrize("name", ["full", "RTX 2080 Ti", "Xeon w/ AMX"])
def test_profiles_are_by_the_name_of_a_device_in_a_plan(name: str) -> None:
    (place,) = places(Inventory(hosts=(host("a", cpu(name, 1)),)))
    assert device_name(place.text) == name
    assert device_name("rank 0") == "rank 0", "of a plan by hand"


def test_devices_one_by_one() -> None:
    assert [place.text for place in places(TWO)] == [
        "a/full/0", "a/full/1", "a/half/0", "b/quick/0", "b/quick/1", "b/quick/2",
    ]  # fmt: skip
    assert [place.slowdown for place in places(ONE)] == [1.0, 1.0, 2.0]
    assert place_of(TWO, "a/half/0").slowdown == 2.0


def test_plans_call_devices_by_the_same_names() -> None:
    pool = DevicePool.of(TWO, bandwidth_bytes_per_s=1e9)
    stages = [Choice(first=0, end=1, counts=(1, 1, 0)), Choice(first=1, end=2, counts=(1, 0, 3))]
    named = [name for stage in device_names(stages, pool) for name in stage]
    assert sorted(named) == sorted(place.text for place in places(TWO))
    assert [place_of(TWO, name).text for name in named] == named


def test_a_device_that_is_not_there() -> None:
    with pytest.raises(HardwareError, match="a/half/1") as caught:
        place_of(ONE, "a/half/1")
    assert "a/half/0" in caught.value.remedy


@pytest.mark.parametrize(
    ("inventory", "devices", "ranks", "nodes", "expected"),
    [
        (ONE, None, 2, 1, ["a/full/0", "a/full/1"]),
        (ONE, ["a/half/0", "a/full/1"], 2, 1, ["a/half/0", "a/full/1"]),
        (ONE, ["rank 0", "rank 1"], 2, 1, ["a/full/0", "a/full/1"]),
        (ONE, ["server1/TITAN V/0", "a/half/0"], 2, 1, ["a/full/0", "a/full/1"]),
        # A single host stands for any number of its kind.
        (ONE, None, 4, 2, ["a/full/0", "a/full/1", "a/full/0", "a/full/1"]),
        (TWO, None, 4, 2, ["a/full/0", "a/full/1", "b/quick/0", "b/quick/1"]),
        (TWO, ["b/quick/2", "b/quick/0", "a/half/0", "a/full/0"], 4, 2,
         ["b/quick/2", "b/quick/0", "a/half/0", "a/full/0"]),
        (TWO, ["b/quick/2", "b/quick/0"], 2, 1, ["b/quick/2", "b/quick/0"]),
        # Unevenly on the hosts, and one stage after another.
        (TWO, ["b/quick/1", "a/half/0", "b/quick/0"], 3, 2,
         ["b/quick/1", "a/half/0", "b/quick/0"]),
        (UNEVEN, None, 3, 2, ["a/slow/0", "b/quick/0", "b/quick/1"]),
        # The single host was called otherwise when the plan was made.
        (ONE, ["old/half/0", "old/full/1"], 2, 1, ["a/half/0", "a/full/1"]),
        (ONE, ["old/full/0", "old/full/0"], 2, 2, ["a/full/0", "a/full/0"]),
    ],
)  # fmt: skip
def test_the_device_of_each_rank(
    inventory: Inventory, devices: list[str] | None, ranks: int, nodes: int, expected: list[str]
) -> None:
    assert texts(inventory, devices, ranks=ranks, nodes=nodes) == expected


@pytest.mark.parametrize(
    ("devices", "nodes", "message"),
    [
        (["a/full/0", "a/full/0"], 1, "each rank, 2 in all"),
        (["a/full/0"], 1, "each rank, 2 in all"),
        (["a/full/0", "b/quick/0"], 1, r"devices are on a, b, but parallel.num_nodes=1"),
        (["a/full/0", "a/half/0"], 2, r"devices are on a, but parallel.num_nodes=2"),
    ],
)
def test_plans_that_ranks_cannot_follow(devices: list[str], nodes: int, message: str) -> None:
    with pytest.raises(PlanError, match=message) as caught:
        places_for(TWO, devices, ranks=2, nodes=nodes)
    assert caught.value.remedy


@pytest.mark.parametrize(
    ("inventory", "devices", "others"),
    [
        (TWO, ["old/full/0", "b/quick/0"], "old/full/0"),
        (ONE, ["a/full/0", "a/full/2"], "a/full/2"),
        (ONE, ["server1/TITAN V/0", "server2/TITAN V/0"], "server1/TITAN V/0, server2"),
    ],
)
def test_a_plan_that_was_searched_for_is_for_its_devices(
    inventory: Inventory, devices: list[str], others: str
) -> None:
    nodes = len(inventory.hosts)
    with pytest.raises(PlanError, match=f"the plan is for {others}") as caught:
        places_for(inventory, devices, ranks=2, nodes=nodes, searched=True)
    assert "parallel.plan.cuts" in caught.value.remedy
    by_hand = places_for(inventory, ["rank 0", "rank 1"], ranks=2, nodes=nodes, searched=True)
    assert by_hand == places_for(inventory, None, ranks=2, nodes=nodes)


@pytest.mark.parametrize(
    ("inventory", "devices", "nodes", "expected"),
    [
        (TWO, ["b/quick/2", "a/half/0", "b/quick/0", "a/full/1"], 2, [[1, 3], [0, 2]]),
        (TWO, ["a/full/0", "b/quick/0", "b/quick/1"], 2, [[0], [1, 2]]),
        (TWO, ["b/quick/0", "b/quick/1"], 1, [[0, 1]]),
        (ONE, ["a/half/0", "a/full/0"], 1, [[0, 1]]),
        (ONE, None, 2, [[0, 1], [2, 3]]),
    ],
)
def test_the_ranks_of_each_node(
    inventory: Inventory, devices: list[str] | None, nodes: int, expected: list[list[int]]
) -> None:
    ranks = 2 * nodes if devices is None else len(devices)
    chosen = places_for(inventory, devices, ranks=ranks, nodes=nodes)
    found = ranks_of_nodes(chosen, inventory, nodes=nodes)
    assert [list(ranks) for ranks in found] == expected


def gpus(*devices: tuple[str, int]) -> Inventory:
    return Inventory(hosts=(host("g", *(Device(name=n, count=c) for n, c in devices)),))


HERE = ["NVIDIA GeForce RTX 2080 Ti", "NVIDIA TITAN V", "NVIDIA GeForce RTX 2080 Ti",
        "NVIDIA GeForce RTX 2080"]  # fmt: skip


@pytest.mark.parametrize(
    ("devices", "names", "indices"),
    [
        ((("TITAN V", 1), ("RTX 2080 Ti", 2)), HERE, [1, 0, 2]),
        ((("NVIDIA TITAN V", 1), ("RTX 2080 Ti", 1)), HERE, [1, 0]),
        # As whole words, and of several the longest.
        ((("RTX 2080", 1), ("RTX 2080 Ti", 2)), HERE, [3, 0, 2]),
        ((("TITAN V", 1),), ["NVIDIA TITAN Vx", "NVIDIA TITAN V"], [1]),
        ((("A100", 2),), ["A100-PCIE-40GB", "NVIDIA A100-SXM4-80GB"], [0, 1]),
    ],
)
def test_gpus_by_name(
    devices: tuple[tuple[str, int], ...], names: list[str], indices: list[int]
) -> None:
    inventory = gpus(*devices)
    assert gpu_indices(places(inventory), names, host=inventory.hosts[0]) == indices
    backwards = places(inventory)[::-1]
    assert gpu_indices(backwards, names, host=inventory.hosts[0]) == indices[::-1]


@pytest.mark.parametrize("names", [[], ["NVIDIA H200"], HERE[:2]])
def test_gpus_that_are_not_here(names: list[str]) -> None:
    inventory = gpus(("RTX 2080 Ti", 2))
    with pytest.raises(HardwareError, match="g/RTX 2080 Ti/") as caught:
        gpu_indices(places(inventory), names, host=inventory.hosts[0])
    assert all(name in caught.value.message for name in names)
    assert "hardware=local" in caught.value.remedy


@pytest.mark.parametrize("slowdown", ["0.5", ".inf", ".nan", "quick", "true", "null"])
def test_invalid_slowdowns(slowdown: str) -> None:
    device = {"name": "x", "count": 1, "accelerator": "cpu", "slowdown": yaml.safe_load(slowdown)}
    with pytest.raises(HardwareError, match="slowdown") as caught:
        Inventory.from_dict({"hosts": [{"name": "a", "devices": [device]}]})
    assert caught.value.remedy
    with pytest.raises(HardwareError, match="accelerator cuda"):
        Device(name="H200", count=1, slowdown=2.0)


def test_a_name_has_one_speed() -> None:
    def devices(slowdown: float) -> list[dict[str, Any]]:
        return [{"name": "x", "count": 1, "accelerator": "cpu", "slowdown": slowdown}]

    hosts = [{"name": name, "devices": devices(s)} for name, s in (("a", 1.0), ("b", 2.0))]
    with pytest.raises(HardwareError, match="slowdown 1 on one host and 2 on another"):
        Inventory.from_dict({"hosts": hosts})


def test_another_speed_is_other_hardware() -> None:
    slower = dataclasses.replace(ONE.hosts[0].devices[1], slowdown=3.0)
    other = Inventory(hosts=(host("a", ONE.hosts[0].devices[0], slower),))
    assert other.fingerprint() != ONE.fingerprint()
