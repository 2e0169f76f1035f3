"""The command line as users meet it: real processes in an empty directory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from experiment_harness import Shell, composed, orphans, python_path
from fault_cases import Point

from sparsepipe.launch.job import run_job


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[Shell]:
    yield Shell(tmp_path)
    assert not orphans(tmp_path), "processes were left behind"


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Point], Path]:
    """The run of a plan that nothing happens to."""
    found: dict[tuple[str, ...], Path] = {}

    def run(point: Point) -> Path:
        if point.undisturbed not in found:
            shell = Shell(tmp_path_factory.mktemp("undisturbed"))
            found[point.undisturbed] = shell(*point.undisturbed).run
        return found[point.undisturbed]

    return run


@pytest.fixture
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty directory, in which this process is."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def networks_for_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes that this one starts find the small networks as it does."""
    monkeypatch.setenv("PYTHONPATH", python_path())


@pytest.fixture
def job(workplace: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Runs a job in this process, which is quicker where no signals or ranks matter."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    return lambda *overrides: run_job(composed("experiment=tiny", *overrides)).path
