"""The pattern of an inventory and its list of common GPUs."""

from __future__ import annotations

import re

import pytest
import yaml

from sparsepipe.cluster import Device, Inventory
from sparsepipe.config.build import build_inventory
from sparsepipe.config.compose import config_dir
from tests.support.command_line import composed

TEMPLATE = config_dir() / "hardware" / "template.yaml"
LISTED = yaml.safe_load("\n".join(re.findall(r"^# (- \{.*)$", TEMPLATE.read_text(), re.MULTILINE)))
CHIPS = {  # float32 cores, boost clock in GHz, and the memory's bits a transfer and Gbit/s a pin
    "H200": (16896, 1.98, 6144, 6.25),
    "H100 80GB HBM3": (16896, 1.98, 5120, 5.23),
    "H100 PCIe": (14592, 1.755, 5120, 3.13),
    "A100-SXM4-80GB": (6912, 1.41, 5120, 3.186),
    "A100 80GB PCIe": (6912, 1.41, 5120, 3.023),
    "A100-SXM4-40GB": (6912, 1.41, 5120, 2.43),
    "A100-PCIE-40GB": (6912, 1.41, 5120, 2.43),
    "V100-SXM2-32GB": (5120, 1.53, 4096, 1.754),
    "V100-SXM2-16GB": (5120, 1.53, 4096, 1.754),
    "L40S": (18176, 2.52, 384, 18.0),
    "RTX 4090": (16384, 2.52, 384, 21.0),
    "RTX 3090": (10496, 1.695, 384, 19.5),
    "RTX 2080 Ti": (4352, 1.545, 352, 14.0),
}


def devices() -> list[Device]:
    used = build_inventory(composed("hardware=template"))
    listed = Inventory.from_dict({"hosts": [{"name": "all", "devices": LISTED}]})
    return [device for host in (*used.hosts, *listed.hosts) for device in host.devices]


def test_every_gpu_is_there_once() -> None:
    names = [device.name for device in devices()]
    assert len(names) == len(set(names)) == len(CHIPS)


@pytest.mark.parametrize("chip", CHIPS)
def test_figures_are_those_of_the_chip(chip: str) -> None:
    """Peaks follow from cores, clocks and the memory's bus; data sheets round them."""
    cores, clock_ghz, bits, gbit_per_s = CHIPS[chip]
    (device,) = [device for device in devices() if device.name.endswith(chip)]
    assert device.tflops == pytest.approx(2 * cores * clock_ghz / 1000, rel=0.01)
    assert device.memory_bytes_per_s == pytest.approx(bits * gbit_per_s / 8 * 1e9, rel=0.01)
    gigabytes = re.search(r"(\d+)GB", device.name)
    if gigabytes:
        assert device.memory_bytes == int(gigabytes[1]) * 1e9
