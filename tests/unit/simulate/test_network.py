"""Which links of an inventory a plan needs."""

from __future__ import annotations

import pytest

from sparsepipe.cluster import Device, Host, Inventory, Link
from sparsepipe.errors import HardwareError, PlanError
from sparsepipe.schedule import Plan
from sparsepipe.simulate.network import ClusterNetwork
from tests.support.plans import plan_on

BETWEEN = Link(bytes_per_s=10.0)
INSIDE = Link(bytes_per_s=100.0)


def inventory(*links: Link | None, between: Link | None = BETWEEN) -> Inventory:
    """A host of three devices for each link; they are named a, b, ..."""
    device = Device(name="gpu", count=3)
    return Inventory(
        hosts=tuple(
            Host(name=name, devices=(device,), link=link)
            for name, link in zip("abc", links, strict=False)
        ),
        link=between,
    )


def placed(*stages: str) -> Plan:
    """Stages of one layer on devices such as a0."""
    return plan_on(*([f"{d[0]}/gpu/{d[1]}" for d in stage.split()] for stage in stages))


@pytest.mark.parametrize("plan", [placed("a0", "a1"), placed("a0 a1"), placed("a0 b0", "b1 a1 b2")])
def test_devices_of_a_host_that_talk_need_its_link(plan: Plan) -> None:
    with pytest.raises(HardwareError, match="the link of host a has no bandwidth") as caught:
        ClusterNetwork.of(inventory(None, INSIDE), plan)
    assert "task=bandwidth" in caught.value.remedy
    assert ClusterNetwork.of(inventory(INSIDE, INSIDE), plan).inside[0] == INSIDE


def test_hosts_need_the_link_between_them() -> None:
    with pytest.raises(HardwareError, match="the link of the inventory has no bandwidth"):
        ClusterNetwork.of(inventory(None, None, between=None), placed("a0", "b0"))
    ClusterNetwork.of(inventory(INSIDE, between=None), placed("a0", "a1"))


def test_a_device_must_be_of_the_inventory() -> None:
    with pytest.raises(PlanError, match=r"c/gpu/0 is not on any host of the hardware \(a, b\)"):
        ClusterNetwork.of(inventory(None, None), placed("a0", "c0"))
