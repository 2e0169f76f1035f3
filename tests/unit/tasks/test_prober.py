"""Probes that are killed: for what they have taken themselves, or for what others have."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import get_args

import pytest

from sparsepipe.errors import HardwareError, SparsePipeError
from sparsepipe.paper.chapters.trainings import OF_MEMORY
from sparsepipe.runs.rundir import RunDir
from sparsepipe.tasks.fitting import prober as module
from sparsepipe.tasks.fitting.prober import Outcome, Prober
from sparsepipe.utils.files import read_json
from tests.support.command_line import Shell, composed
from tests.support.control_groups import memory_group
from tests.support.resolved import resolved

pytestmark = pytest.mark.usefixtures("networks_for_ranks")
MB = 10**6
STEPS = ("task=fit_batch", "model.width=2000000", "parallel=single", "hardware.accelerator=cpu")


def probes() -> Iterator[int]:
    """Numbers of the probes of all processes."""
    for place in Path("/proc").glob("[0-9]*"):
        try:
            words = (place / "cmdline").read_bytes().decode().split("\0")
        except OSError:
            continue  # it has ended
        if "sparsepipe.tasks.fitting.probe" in words:
            yield int(place.name)


def parent(process: int) -> int:
    """As the kernel tells it; 0 where the process has ended."""
    try:
        return int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0


@contextmanager
def killing() -> Iterator[list[int]]:
    """Kills the first of this process's probes as it begins."""
    killed: list[int] = []

    def kill() -> None:
        while not killed and not over.wait(0.005):
            for process in probes():
                if parent(process) == os.getpid():
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
def prober(workplace: Path) -> Callable[..., Prober]:
    """Of a run of this process; all that it does is real."""

    def make(budget_bytes: float | None = 3000 * MB) -> Prober:
        config = composed("experiment=tiny", *STEPS)
        run = resolved(config, directory=RunDir(workplace))
        return Prober(run, budget_bytes=budget_bytes, steps=2, timeout_s=300)

    return make


def test_a_probe_that_somebody_kills_is_no_answer(
    prober: Callable[..., Prober], workplace: Path
) -> None:
    with killing() as killed, pytest.raises(SparsePipeError, match="ended with signal 9") as told:
        prober().probe(1)
    assert len(killed) == 1
    assert "the same command continues" in told.value.remedy
    assert not (workplace / "probes.json").exists(), "nobody is to find it there again"


@pytest.mark.parametrize(("asked", "expected"), [(3e8, 300 * MB), (None, 8 * MB)])
def test_the_budget_is_the_requested_one_or_the_memory_of_a_processor(
    prober: Callable[..., Prober],
    monkeypatch: pytest.MonkeyPatch,
    asked: float | None,
    expected: int,
) -> None:
    monkeypatch.setattr(module, "memory_of", lambda *_: 8 * MB)
    assert prober(budget_bytes=asked).values["budget_bytes"] == expected
    monkeypatch.setattr(module, "memory_of", lambda *_: None)
    with pytest.raises(HardwareError, match="does not say") as error:
        prober(budget_bytes=None)
    assert error.value.remedy == "set task.budget_bytes"


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


def test_reports_know_the_reasons_that_searches_give() -> None:
    assert {*get_args(Outcome)} - {"fits", "too_few_shapes"} == OF_MEMORY  # that one is of data
