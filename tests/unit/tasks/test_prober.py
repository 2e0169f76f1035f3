"""Probes that are killed: for what they have taken themselves, or for what others have."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import get_args

import pytest

from sparsepipe.errors import SparsePipeError
from sparsepipe.paper.chapters.trainings import OF_MEMORY, OTHERS
from sparsepipe.runs.rundir import RunDir
from sparsepipe.tasks.fitting.fit_batch import Found, _limit
from sparsepipe.tasks.fitting.memory import (
    Seen,
    limit_files,
    limit_in,
    most_bytes,
    took_much,
    total_in,
)
from sparsepipe.tasks.fitting.prober import Outcome, Prober
from sparsepipe.tasks.fitting.steps import _noting
from sparsepipe.utils.files import read_json
from tests.support.command_line import Shell, composed, wait_for
from tests.support.memory_group import memory_group
from tests.support.resolved import resolved

pytestmark = pytest.mark.usefixtures("networks_for_ranks")
MB = 10**6
STEPS = ("task=fit_batch", "model.width=2000000", "parallel=single", "hardware.accelerator=cpu")


@pytest.mark.parametrize(
    ("resident", "before", "budget", "most", "much"),
    [
        (600, 500, 2750, 20_000, False),
        (1800, 500, 2750, 20_000, False),
        (1900, 500, 2750, 20_000, True),
        (900, 500, 2750, 8000, False),  # whatever others had left of it
        (900, 500, 20_000, 1600, True),  # there is no more to be had
        (700, 500, 20_000, 1600, False),
        (0, 0, 2750, None, False),
        (2000, 500, 2750, None, True),
        (700, 500, None, 1600, False),  # a GPU's process
        (900, 500, None, 1600, True),
        (0, 0, None, None, True),  # as nothing is known
    ],
)
def test_who_had_taken_the_memory(
    resident: int, before: int, budget: int | None, most: int | None, much: bool
) -> None:
    seen = Seen(resident_bytes=resident, before_bytes=before)
    assert took_much(seen, budget_bytes=budget, most_bytes=most) == much


def test_what_a_process_has_left_of_itself(tmp_path: Path) -> None:
    path = tmp_path / "seen"
    assert Seen.read(path) == Seen()
    path.write_text("")
    assert Seen.read(path) == Seen(), "killed before it wrote"
    noted = _noting(path)
    noted(3 * 2**30)
    found = Seen.read(path)
    assert found.resident_bytes == 3 * 2**30
    assert 10 * MB < found.before_bytes < 3 * 2**30


def test_a_limit_of_any_group_above_counts() -> None:
    """As SLURM limits a job, and runs it in a group below."""
    places = ["a/job_1/step_0/task_0", "a/job_1/step_0", "a/job_1", "a"]
    v2 = [*(f"{place}/memory.max" for place in places), "memory.max"]
    assert limit_files(f"0::/{places[0]}\n") == [Path("/sys/fs/cgroup") / name for name in v2]
    v1 = ["memory/a/memory.limit_in_bytes", "memory/memory.limit_in_bytes"]
    assert limit_files("3:cpu:/b\n2:memory:/a\n") == [Path("/sys/fs/cgroup") / name for name in v1]


@pytest.mark.parametrize(
    ("text", "limit"), [("max\n", None), ("1000\n", 1000), ("", None), ("strange", None)]
)
def test_what_a_limit_says(text: str, limit: int | None) -> None:
    assert limit_in(text) == limit


def test_what_a_machine_has() -> None:
    assert total_in("MemTotal:  900 kB\nMemAvailable:    200 kB\n") == 921_600
    assert total_in("MemAvailable:  900 kB\n") is None
    found = most_bytes()
    assert found is not None
    assert 0 < found <= os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


MOST = "from sparsepipe.tasks.fitting.memory import most_bytes; print(most_bytes())"


def test_a_real_limit_above_counts() -> None:
    with memory_group(300 * MB) as within:
        below = Path(within[-1], "below")
        below.mkdir()
        try:
            command = [*within[:-1], str(below), sys.executable, "-c", MOST]
            found = subprocess.run(command, check=True, capture_output=True, text=True)
        finally:
            below.rmdir()
    assert 299 * MB < int(found.stdout) <= 300 * MB, "in whole pages"


def probes(beyond: set[int]) -> Iterator[tuple[int, Path]]:
    """Probes of any process that are not known, and the files that they note memory in."""
    for place in Path("/proc").glob("[0-9]*"):
        try:
            words = (place / "cmdline").read_bytes().decode().split("\0")
        except OSError:
            continue  # it has ended
        if "sparsepipe.tasks.fitting.probe" in words and int(place.name) not in beyond:
            yield int(place.name), Path(words[-2]).with_name("seen")


def parent(process: int) -> int:
    """As the kernel tells it; 0 where the process has ended."""
    try:
        return int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0


def is_first_victim(process: int) -> bool:
    """Whether the kernel would kill it before any other; a probe says so as it begins."""
    try:
        return Path(f"/proc/{process}/oom_score_adj").read_text().strip() == "1000"
    except OSError:
        return False


@contextmanager
def killing(count: int, *, in_steps: bool) -> Iterator[list[int]]:
    """Kills so many of this process's probes, at once or when they have begun with their steps."""
    killed: list[int] = []

    def kill() -> None:
        while len(killed) < count and not over.wait(0.005):
            for process, seen in probes(set(killed)):
                if parent(process) == os.getpid() and (seen.exists() or not in_steps):
                    killed.append(process)
                    os.kill(process, signal.SIGKILL)

    over = threading.Event()
    thread = threading.Thread(target=kill)
    thread.start()
    try:
        yield killed
    finally:
        over.set()
        thread.join(20)


@pytest.fixture
def prober(workplace: Path) -> Callable[[], Prober]:
    """Of a run of this process; all that it does is real."""

    def make() -> Prober:
        config = composed("experiment=tiny", *STEPS)
        run = resolved(config, directory=RunDir(workplace))
        return Prober(run, budget_bytes=3000 * MB, steps=2, timeout_s=300)

    return make


def test_a_probe_that_is_killed_while_it_is_small_is_no_answer(
    prober: Callable[[], Prober], workplace: Path
) -> None:
    asked, message = prober(), r"killed \(signal 9\) 2 times, .*: whether they fit is not known"
    with (
        killing(2, in_steps=False) as killed,
        pytest.raises(SparsePipeError, match=message) as told,
    ):
        asked.probe(1)
    assert len(killed) == 2
    assert "the same command goes on" in told.value.remedy
    assert not (workplace / "probes.json").exists(), "nobody is to find it there again"


@pytest.mark.full
def test_a_killed_probe_is_repeated_once(prober: Callable[[], Prober], workplace: Path) -> None:
    asked = prober()
    with killing(1, in_steps=True) as killed:
        found = asked.probe(1)
    assert len(killed) == 1
    assert found.outcome == "fits"
    assert [each["outcome"] for each in read_json(workplace / "probes.json")] == ["fits"]


GROUP_BYTES = 2500 * MB


@pytest.mark.full
def test_one_that_the_kernel_kills_for_its_own_memory_does_not_fit(tmp_path: Path) -> None:
    """In a control group that has less than the budget."""
    with memory_group(GROUP_BYTES) as within:
        shell = Shell(tmp_path, before=within)
        large = ("task=train_if_fits", "model.width=8000000", "data.batch_size=32")
        done = shell(*STEPS[2:], *large, "task.budget_bytes=20e9")
    result = read_json(done.run / "result.json")
    assert (result["fits"], result["limited_by"]) == (False, "killed_for_memory")


HOG = """
import os, sys, time
held = []
victim = int(sys.argv[1])
while os.path.exists(f"/proc/{victim}"):
    held.append(bytearray(b"x") * 10_000_000)
"""


@pytest.mark.full
def test_a_probe_that_is_killed_for_the_memory_of_others_is_repeated_once(
    tmp_path: Path,
) -> None:
    """They take all of a control group while it begins."""
    with memory_group(GROUP_BYTES) as within:
        shell = Shell(tmp_path, before=within)
        asked = ("task.budget_bytes=2e9", "task.start=1", "task.most=1")
        command = shell.start(*STEPS, *asked)
        known = {process for process, _ in probes(set())}
        found: list[int] = []

        def begun() -> bool:
            started = [p for p, _ in probes(known) if parent(p) == command.pid]
            found[:] = [p for p in started if is_first_victim(p)]
            return bool(found) or command.poll() is not None

        wait_for(begun)
        assert found, command.communicate()
        hog = [*within, sys.executable, "-S", "-c", HOG, str(found[0])]
        assert subprocess.run(hog, timeout=120, check=False).returncode == 0
        done = shell.wait(command)
    assert "batch size 1: a process that tried it out was killed" in done.err
    result = read_json(done.run / "result.json")
    assert (result["largest_batch"], result["probed_outcomes"]) == (1, ["fits"])


DOCS = Path(__file__).parents[3] / "docs"


def test_reports_know_the_reasons_that_searches_give() -> None:
    assert {*get_args(Outcome)} - {"fits", "too_few_shapes"} == OF_MEMORY  # that one is of data
    ended = Found(largest=4, refused=None)
    given = {_limit(ended, None, limited_by_data=by_data) for by_data in (False, True)}  # type: ignore[arg-type]
    assert given == set(OTHERS)


def test_other_reasons_are_documented() -> None:
    (told,) = re.findall(r"another reason \(`limited_by` is ([^)]*)\)", read("reports.md"))
    assert {*re.findall(r"`(\w+)`", told)} == set(OTHERS)
    for name in ("results.md", "experiments.md"):
        (row,) = re.findall(r"^\| `limited_by` \|(.*)\|$", read(name), re.MULTILINE)
        assert OF_MEMORY | set(OTHERS) <= {*re.findall(r"`(\w+)`", row)}


def read(name: str) -> str:
    return (DOCS / name).read_text(encoding="utf-8")
