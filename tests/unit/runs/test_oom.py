"""How many processes the OOM killer has ended."""

from __future__ import annotations

from pathlib import Path

from sparsepipe.runs.out_of_memory import counters, kills_in, kills_since, oom_kills


def test_where_the_kernel_counts() -> None:
    v1 = "9:name=systemd:/\n4:memory:/box/a\n1:cpu:/\n"
    assert counters(v1) == [
        Path("/sys/fs/cgroup/memory/box/a/memory.oom_control"),
        Path("/sys/fs/cgroup/memory/box/memory.oom_control"),
        Path("/sys/fs/cgroup/memory/memory.oom_control"),
    ]
    v2 = "0::/user.slice/job:1\n"
    assert counters(v2) == [
        Path("/sys/fs/cgroup/user.slice/job:1/memory.events"),
        Path("/sys/fs/cgroup/user.slice/memory.events"),
        Path("/sys/fs/cgroup/memory.events"),
    ]
    assert counters("0::/\n") == [Path("/sys/fs/cgroup/memory.events")]


def test_what_it_counts() -> None:
    assert kills_in("low 0\nhigh 0\nmax 3\noom 1\noom_kill 2\noom_group_kill 0\n") == 2
    assert kills_in("oom_kill_disable 0\nunder_oom 0\noom_kill 5\n") == 5
    assert kills_in("oom_kill_disable 0\nunder_oom 0\n") is None
    here = oom_kills()
    assert here is None or here >= 0
    assert kills_since(None) is None
    assert kills_since(0) == here
