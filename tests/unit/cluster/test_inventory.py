from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any

import pytest

from sparsepipe.cluster import Device, Host, Inventory, Link, local
from sparsepipe.errors import ConfigError, HardwareError
from sparsepipe.utils.host import usable_cores


def two_hosts(name: str = "a") -> Inventory:
    gpu = Device(name="TITAN V", count=2, memory_bytes=12 * 2**30, tflops=14.9)
    other = Device(name="RTX 2080 Ti", count=3, profile={"sparse_vgg16_bn": "rtx.json"})
    return Inventory(
        hosts=(
            Host(name=name, devices=(gpu,), link=Link(bytes_per_s=12e9)),
            Host(name="b", devices=(other,)),
        ),
        link=Link(bytes_per_s=125e6, latency_s=1e-4),
    )


def test_yaml_round_trip(tmp_path: Path) -> None:
    path = tmp_path / "servers.yaml"
    path.write_text(two_hosts().to_yaml())
    assert Inventory.from_yaml(path) == two_hosts()


def test_counts_and_fingerprint() -> None:
    inventory = two_hosts()
    assert inventory.num_devices == 5
    assert inventory.accelerator == "cuda"
    assert inventory.fingerprint() == two_hosts("renamed").fingerprint()
    slower = Inventory(hosts=inventory.hosts, link=Link(bytes_per_s=1e6))
    assert inventory.fingerprint() != slower.fingerprint()


def test_slowdown_1_has_the_fingerprint_of_runs_without_slowdowns() -> None:
    hosts = (Host(name="a", devices=(Device(name="x", count=2, accelerator="cpu"),)),)
    then = (
        '{"hosts": [{"devices": [{"accelerator": "cpu", "count": 2, "memory_bytes": 0, '
        '"memory_bytes_per_s": null, "name": "x", "tflops": null}], "link": null}], "link": null}'
    )
    assert Inventory(hosts=hosts).fingerprint() == hashlib.sha256(then.encode()).hexdigest()[:16]


def test_devices_of_which_there_are_none_are_left_out() -> None:
    def host(name: str, **counts: int) -> dict[str, Any]:
        devices = [{"name": key, "count": count} for key, count in counts.items()]
        return {"name": name, "devices": devices}

    given = {"hosts": [host("a", x=2, y=0), host("b", x=0), host("c", z=1)]}
    used = {"hosts": [host("a", x=2), host("c", z=1)]}
    inventory = Inventory.from_dict(given)
    assert inventory == Inventory.from_dict(used)
    assert inventory.devices_per_host(2) == 1
    with pytest.raises(HardwareError, match="no device"):
        Inventory.from_dict({"hosts": [host("a", x=0), host("b", y=0)]})


def test_devices_are_counted_by_host() -> None:
    inventory = two_hosts()
    assert [inventory.devices_per_host(count) for count in (1, 2)] == [2, 2]
    inventory.require(2, num_hosts=2)
    with pytest.raises(HardwareError, match=r"3 devices are requested, .* has 2 \(2 x TITAN V\)"):
        inventory.require(3)
    with pytest.raises(HardwareError, match=r"on each host, .* \(2 x TITAN V, 3 x RTX") as error:
        inventory.require(3, num_hosts=2)
    assert "parallel.devices=4 or less" in error.value.remedy
    with pytest.raises(HardwareError, match="3 hosts are requested"):
        inventory.require(1, num_hosts=3)
    alone = Inventory(hosts=inventory.hosts[:1])
    assert alone.devices_per_host(3) == 2, "one host stands for all of its kind"


HOST = "hosts: [{name: a, devices: [{name: x, count: 2"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("devices: []", "hosts: Field required"),
        (
            "hosts: [{name: a, devices: [{name: x, count: -1}]}]",
            r"devices.0.count: .* -1 should be",
        ),
        ("hosts: [{name: a, devices: [{name: x, count: 0.5}]}]", "a whole number"),
        ("hosts: [{name: a, devices: [{name: x, count: 1, colour: red}]}]", "colour"),
        (f"{HOST}, memory_bytes: 0}}]}}]", "memory_bytes: .* above 0"),
        (f"{HOST}, tflops: 0.0}}]}}]", "tflops: .* above 0"),
        (f"{HOST}, memory_bytes_per_s: 0}}]}}]", "memory_bytes_per_s: .* above 0"),
        (f"{HOST}}}]}}]\nlink: {{bytes_per_s: 0}}", r"link.bytes_per_s: .* above 0"),
        (f"{HOST}}}], link: {{bytes_per_s: 0.0}}}}]", r"link.bytes_per_s: .* above 0"),
        (f"{HOST}}}]}}]\nlnik: {{bytes_per_s: 1}}", "lnik"),
        (f"{HOST}}}], lnik: {{bytes_per_s: 1}}}}]", "lnik"),
        (
            "hosts: [{name: a, devices: [{name: x, count: 1}, {name: x, count: 2}]}]",
            "a has several entries with the same name: x",
        ),
    ],
)
def test_bad_files(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "servers.yaml"
    path.write_text(text)
    with pytest.raises(HardwareError, match=message):
        Inventory.from_yaml(path)


def test_numbers_that_yaml_takes_for_text(tmp_path: Path) -> None:
    path = tmp_path / "servers.yaml"
    path.write_text(
        "hosts: [{name: a, devices: [{name: x, count: '2', memory_bytes: 12e9, tflops: '1.5'}], "
        "link: {bytes_per_s: 125e6}}]"
    )
    host = Inventory.from_yaml(path).hosts[0]
    assert (host.devices[0].count, host.devices[0].memory_bytes) == (2, 12e9)
    assert host.devices[0].tflops == 1.5
    assert host.link == Link(bytes_per_s=125e6)


def test_local_cpu() -> None:
    inventory = local(accelerator="cpu")
    assert inventory.num_devices == usable_cores()
    assert inventory.accelerator == "cpu"
    assert inventory.fingerprint() == local(accelerator="cpu").fingerprint()


def test_a_cpu_counts_as_the_given_number_of_devices() -> None:
    five, one = (local(accelerator="cpu", cpu_devices=n) for n in (5, 1))
    assert (five.num_devices, one.num_devices) == (5, 1)
    memory = one.hosts[0].devices[0].memory_bytes
    assert memory is not None
    assert five.hosts[0].devices[0].memory_bytes == memory // 5
    assert five.fingerprint() != one.fingerprint()
    for wrong in ({"cpu_devices": 0}, {"accelerator": "tpu"}):
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            local(**wrong)  # type: ignore[arg-type]


@pytest.mark.skipif(os.path.exists("/dev/nvidia0"), reason="there is a GPU")
def test_local_without_gpu() -> None:
    with pytest.raises(HardwareError, match="no CUDA device"):
        local(accelerator="cuda")
    assert local().accelerator == "cpu"
