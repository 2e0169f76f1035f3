"""Two ranks of a script, launched as ours are."""

from __future__ import annotations

import os
import sys
import textwrap
from pathlib import Path

import pytest

from sparsepipe.runtime.launch import launch

PROLOGUE = """
import os, signal, sys, time
from pathlib import Path
rank = int(os.environ["RANK"])
Path(f"pid{rank}").write_text(str(os.getpid()))
while not all(Path(f"pid{r}").exists() and Path(f"pid{r}").read_text() for r in range(2)):
    time.sleep(0.02)  # else the agent may end a rank before it has begun
"""


@pytest.fixture
def ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Launches two ranks of a script in an empty directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)

    def start(script: str, *, grace_s: float = 60) -> None:
        path = tmp_path / "script.py"
        path.write_text(PROLOGUE + textwrap.dedent(script))
        launch(
            [sys.executable, str(path)],
            ranks=2,
            threads_per_rank=3,
            reports=tmp_path / "reports",
            grace_s=grace_s,
        )

    yield start
    for rank in range(2):
        pid = int((tmp_path / f"pid{rank}").read_text())
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
