"""The command line as users meet it: real processes in an empty directory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from experiment_harness import SUPPORT, Shell, composed, orphans

from sparsepipe.experiment.job import run_job


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[Shell]:
    yield Shell(tmp_path)
    assert not orphans(tmp_path), "processes were left behind"


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Runs a job in this process, which is quicker where no signals or ranks matter."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(SUPPORT))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    return lambda *overrides: run_job(composed("experiment=tiny", *overrides)).path
