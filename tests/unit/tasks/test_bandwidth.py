"""The task bandwidth: from the command line to the inventory that it writes."""

from __future__ import annotations

import csv
import json
import os
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from sparsepipe.cluster import Device, Host, Inventory, Link
from sparsepipe.config.build import build_inventory
from sparsepipe.errors import ConfigError, HardwareError, SparsePipeError
from sparsepipe.runtime.bandwidth import MessageTime, ReductionTime
from sparsepipe.tasks.bandwidth import Links, as_json, as_rows, as_text
from sparsepipe.utils.files import read_json
from tests.integration.test_hosts import on_hosts
from tests.support.command_line import Shell, composed

SIZES = [4096, 262144]
QUICK = ("task=bandwidth", f"task.sizes_bytes={SIZES}", "task.repeats=3", "task.warmups=1")


@pytest.mark.full
def test_the_command_measures_and_writes_an_inventory(
    job: Callable[..., Path], capfd: pytest.CaptureFixture[str]
) -> None:
    """With the configuration's own parallel=single: the task takes all devices."""
    run = job(*QUICK, "hardware.accelerator=cpu", "hardware.cpu_devices=2")
    told = json.loads((run / "bandwidth.json").read_text())
    assert told.keys() == {"hosts", "between", "pairs", "all_reduce"}
    assert told["between"] is None
    (link,) = told["hosts"].values()
    assert link.keys() == {"bytes_per_s", "latency_s"}
    assert all(0 < value < float("inf") for value in link.values())
    ways = [(p["source"], p["target"], p["bytes"], p["both_ways"]) for p in told["pairs"]]
    assert sorted(ways) == [
        (0, 1, SIZES[0], False),
        (0, 1, SIZES[1], False),
        (0, 1, SIZES[1], True),
        (1, 0, SIZES[0], False),
        (1, 0, SIZES[1], False),
    ]
    for pair in told["pairs"]:
        assert pair["bytes_per_s"] == pytest.approx(pair["bytes"] / pair["seconds"])
        assert pair["seconds"] > 0
        assert pair["repeats"] == 3
    sums = [(entry["how"], entry["ranks"], entry["bytes"]) for entry in told["all_reduce"]]
    assert sums == [(how, [0, 1], size) for how in ("all_reduce", "replicas") for size in SIZES]
    with (run / "bandwidth.csv").open() as stream:
        assert len(list(csv.DictReader(stream))) == len(ways) + len(sums)
    result = read_json(run / "result.json")
    (host,) = told["hosts"]
    assert result["kind"] == "measured"
    assert result["ranks"] == 2
    assert result[f"inside/{host}/bytes_per_s"] == link["bytes_per_s"]
    assert result["all_reduce_over_eq4"] > 0
    assert "| 0 to 1 " in capfd.readouterr().err
    again = composed("hardware=file", f"hardware.source={run / 'hardware.yaml'}")
    detected = composed("hardware.accelerator=cpu", "hardware.cpu_devices=2")
    without = build_inventory(detected)
    hosts = tuple(replace(host, link=Link(**link)) for host in without.hosts)
    assert build_inventory(again) == replace(without, hosts=hosts)


@pytest.mark.full
def test_hosts_of_unequal_size(shell: Shell) -> None:
    """An agent for each, the first one with one device and the other one with two."""
    before = Inventory(
        hosts=tuple(
            Host(name=name, devices=(Device(name="cpu", count=count, accelerator="cpu"),))
            for name, count in (("a", 1), ("b", 2))
        )
    )
    (shell.cwd / "hardware.yaml").write_text(before.to_yaml())
    done = on_hosts(shell, (1, 2), *QUICK, "hardware=file")
    assert [agent.code for agent in done] == [0, 0], done
    (run,) = shell.runs()
    told = json.loads((run / "bandwidth.json").read_text())
    assert told["hosts"].keys() == {"b"}, "nothing to measure inside a"
    assert told["between"]["bytes_per_s"] > 0
    hosts = {
        (p["source"], p["target"]): (p["source_host"], p["target_host"]) for p in told["pairs"]
    }
    assert hosts == {
        (0, 1): ("a", "b"), (1, 0): ("b", "a"), (0, 2): ("a", "b"),
        (2, 0): ("b", "a"), (1, 2): ("b", "b"), (2, 1): ("b", "b"),
    }  # fmt: skip
    b = replace(before.hosts[1], link=Link(**told["hosts"]["b"]))
    after = Inventory(hosts=(before.hosts[0], b), link=Link(**told["between"]))
    assert Inventory.from_yaml(run / "hardware.yaml") == after
    refused = on_hosts(shell, (2, 1), *QUICK, "hardware=file", "force=true")
    assert all(agent.code for agent in refused)
    # Whose rank says so before the others are ended is not told.
    assert any("the run needs 1 on a, 2 on b" in agent.err for agent in refused), refused


def rank_process(parent: int, rank: int) -> int:
    """The process of a rank, among the children of a command."""
    for child in Path(f"/proc/{parent}/task").glob("*/children"):
        for process in map(int, child.read_text().split()):
            environment = Path(f"/proc/{process}/environ").read_bytes().split(b"\0")
            if f"RANK={rank}".encode() in environment:
                return process
    raise AssertionError(f"no rank {rank}")


@pytest.mark.full
def test_a_killed_rank_ends_the_command(shell: Shell) -> None:
    endless = ("task.repeats=1000000", "task.most_s=1000")
    started = shell.start(*QUICK, *endless, "hardware.accelerator=cpu", "hardware.cpu_devices=2")
    assert started.stderr is not None
    for line in started.stderr:
        if "timing 1 of 1 pairs" in line:
            break
    os.kill(rank_process(started.pid, 1), signal.SIGKILL)
    done = shell.wait(started)
    assert done.code > 0
    assert "rank 1" in done.err
    assert done.err.count("remedy:") == 1


@pytest.mark.parametrize(
    ("overrides", "error", "message"),
    [
        (
            ("hardware.accelerator=cpu", "hardware.cpu_devices=1"),
            HardwareError,
            "the inventory has only one",
        ),
        (("hardware=paper_8gpu",), ConfigError, "num_nodes=2"),
        (("hardware=cores", "task.repeats=0"), ConfigError, "task.repeats"),
        (("hardware=cores", "task.sizes_bytes=[0]"), ConfigError, "task.sizes_bytes"),
    ],
)
def test_what_cannot_be_measured_is_refused(
    job: Callable[..., Path], overrides: tuple[str, ...], error: type[SparsePipeError], message: str
) -> None:
    with pytest.raises(error, match=message) as caught:
        job(*QUICK, *overrides)
    assert caught.value.remedy


def sending(source: int, target: int, rate: float, *, size: int = 1000, latency: float = 1e-4,
            both_ways: bool = False) -> MessageTime:  # fmt: skip
    return MessageTime(source=source, target=target, size_bytes=size, both_ways=both_ways,
                   seconds=size / rate, latency_s=latency, repeats=1)  # fmt: skip


LINKS = Links(
    host_of=["a", "a", "b", "b"],
    sendings=[
        sending(0, 1, 100.0),
        sending(1, 0, 300.0),
        sending(0, 1, 5.0, size=10),
        sending(0, 1, 7.0, both_ways=True),
        sending(2, 3, 50.0),
        sending(3, 2, 50.0),
        sending(0, 2, 12.0, latency=1e-3),
        sending(2, 0, 8.0, latency=3e-3),
        sending(1, 3, 11.0, latency=2e-3),
    ],
    reductions=[
        ReductionTime(
            ranks=(0, 1, 2, 3), how="all_reduce", size_bytes=440, seconds=90.0, repeats=1
        ),
        ReductionTime(ranks=(0, 1), how="replicas", size_bytes=1000, seconds=10.0, repeats=1),
    ],
)


def test_links_are_medians_of_the_largest_messages() -> None:
    assert LINKS.inside == {
        "a": Link(bytes_per_s=200.0, latency_s=1e-4),
        "b": Link(bytes_per_s=50.0, latency_s=1e-4),
    }
    assert LINKS.between == Link(bytes_per_s=11.0, latency_s=2e-3)


def test_eq4_is_taken_at_the_slowest_link() -> None:
    everyone, host = as_json(LINKS)["all_reduce"]
    assert everyone["eq4_s"] == pytest.approx(2 * 3 * 440 / (4 * 11))  # 60
    assert everyone["over_eq4"] == pytest.approx(1.5)
    assert host["eq4_s"] == pytest.approx(1000 / 200)  # 2 (2 - 1) P / (2 BW)
    assert host["over_eq4"] == pytest.approx(2.0)


def test_a_host_that_stands_for_several_becomes_them() -> None:
    alike = Inventory(hosts=(Host(name="any", devices=(Device(name="GPU", count=2),)),))
    found = LINKS.put_into(alike)
    devices = alike.hosts[0].devices
    assert [(host.name, host.devices) for host in found.hosts] == [("a", devices), ("b", devices)]
    three = Inventory(hosts=tuple(Host(name=name, devices=devices) for name in ("a", "b", "c")))
    links = [host.link and host.link.bytes_per_s for host in LINKS.put_into(three).hosts]
    assert links == [200.0, 50.0, None]
    assert LINKS.put_into(three).link == LINKS.between


def test_every_measurement_has_a_row() -> None:
    rows = as_rows(LINKS)
    assert [row["what"] for row in rows].count("one way") == 8
    assert [row["what"] for row in rows].count("both ways") == 1
    assert rows[-1]["ranks"] == "0 1"
    assert rows[-1]["over_eq4"] == pytest.approx(2.0)
    text = as_text(Links(host_of=["a", "a"], sendings=[
        sending(0, 1, 2e6), sending(1, 0, 4e6), sending(0, 1, 1e6, both_ways=True)
    ], reductions=LINKS.reductions[1:]))  # fmt: skip
    assert "| 0 to 1 | a    |  2.0 |" in text
    assert "inside a: 3 MB/s (median of 2 to 4), latency 100 us" in text
