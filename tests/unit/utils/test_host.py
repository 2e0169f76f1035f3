"""What this process may use of its machine."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser

from sparsepipe.utils.host import (
    CPU_QUOTA,
    cores_of_quota,
    cpu_name,
    group_files,
    plain_name,
    usable_core_numbers,
    usable_cores,
)
from tests.support.control_groups import quota_group

COUNT = "from sparsepipe.utils import host as m; print(m.usable_cores(), m.quota_limits())"
BOUND = "import os; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})"


def test_only_the_cores_of_this_process_count() -> None:
    if not hasattr(os, "sched_setaffinity"):
        pytest.skip("this system does not bind processes to cores")
    command = [sys.executable, "-c", f"{BOUND}; {COUNT}"]
    found = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    assert found.startswith("1 ")
    assert set(usable_core_numbers()) <= os.sched_getaffinity(0)
    assert len(usable_core_numbers()) == usable_cores()


@pytest.mark.parametrize(
    ("text", "cores"),
    [
        ("200000 100000\n", 2),
        ("150000 100000", 2),
        ("200001\n 100000\n", 3),
        ("1000 100000", 1),
        ("6400000 50000", 128),
        ("max 100000\n", None),
        ("-1\n 100000\n", None),
        ("200000 0", None),
        ("200000", None),
        ("", None),
        ("strange", None),
    ],
)
def test_cores_of_a_quota(text: str, cores: int | None) -> None:
    assert cores_of_quota(text) == cores


@pytest.mark.parametrize(
    ("own", "groups"),
    [
        ("0::/\n", ["cpu.max"]),
        ("0::/system.slice/docker-1\n", ["system.slice/docker-1/cpu.max", "system.slice/cpu.max",
                                         "cpu.max"]),
        ("0::/../other\n", ["cpu.max"]),
        ("2:cpu:/a\n1:cpuset:/b\n", ["cpu/a/cpu.cfs_quota_us", "cpu/cpu.cfs_quota_us"]),
        ("4:cpu,cpuacct:/\n", ["cpu/cpu.cfs_quota_us", "cpu,cpuacct/cpu.cfs_quota_us"]),
        ("5:memory:/x\n3:cpuacct:/x\n1:name=systemd:/x\n", []),
        ("", []),
    ],
)  # fmt: skip
def test_files_with_quotas(own: str, groups: list[str]) -> None:
    """Of each group and of those above it, in either version of control groups."""
    found = group_files("cpu", *CPU_QUOTA, own=own)
    assert [files[0] for files in found] == [Path("/sys/fs/cgroup") / each for each in groups]
    periods = [files[1].name for files in found if len(files) > 1]
    assert set(periods) <= {"cpu.cfs_period_us"}


@pytest.mark.skipif(usable_cores() < 2, reason="one core is no less with a quota")
@pytest.mark.parametrize(("bound", "says"), [("", "1 True\n"), (BOUND, "1 False\n")])
def test_a_real_quota_counts(bound: str, says: str) -> None:
    """Of a group above that of the process, where it may run on more cores."""
    with quota_group(0.5) as within:
        command = [*within, sys.executable, "-c", f"{bound}; {COUNT}" if bound else COUNT]
        assert subprocess.run(command, check=True, capture_output=True, text=True).stdout == says


@pytest.mark.parametrize(
    ("model", "plain"),
    [
        ("Intel(R) Xeon(R) Processor", "Intel Xeon Processor"),
        ("Intel(R) Core(TM) i7-8700 CPU @ 3.20GHz", "Intel Core i7-8700 CPU @ 3.20GHz"),
        (" AMD EPYC 7B13 64-Core Processor ", "AMD EPYC 7B13 64-Core Processor"),
        ("Neoverse-N1, rev 1", "Neoverse-N1 rev 1"),
        ("ARMv8 Processor rev 1 [v8l]", "ARMv8 Processor rev 1 v8l"),
    ],
)
def test_a_processor_has_a_name_that_an_override_takes(model: str, plain: str) -> None:
    assert plain_name(model) == plain
    override = OverridesParser.create().parse_override(f"task.profiles={{{plain}: profile.json}}")
    assert override.value() == {plain: "profile.json"}


def test_the_processor_here_has_such_a_name() -> None:
    assert cpu_name() == plain_name(cpu_name()) != ""
