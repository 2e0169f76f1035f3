"""How a rank tells what went wrong where its report cannot be written."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from sparsepipe.errors import SparsePipeError
from sparsepipe.runtime.launch import launch

SCRIPT = """
import os, time
from sparsepipe.errors import DataError
from sparsepipe.runtime.failures.rank_reports import exit_immediately
if os.environ["RANK"] == "0":
    time.sleep(60)
os.environ["SPARSEPIPE_RANK_REPORTS"] = "nowhere"  # writing there raises an OSError
try:
    raise DataError("the disk is full", remedy="free space")
except DataError as error:
    exit_immediately(error)
"""


def test_what_cannot_be_reported_is_printed(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    command = [sys.executable, str(tmp_path / "script.py")]
    with pytest.raises(SparsePipeError, match="rank 1 ended with exit code 3"):
        launch(command, ranks=2, threads_per_rank=1, reports=tmp_path / "reports", grace_s=5)
    printed = capfd.readouterr().err
    assert "DataError: the disk is full" in printed
    assert "remedy: free space" in printed
    assert "FileNotFoundError" not in printed


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
def test_a_stream_that_cannot_be_written_does_not_keep_it() -> None:
    """What clean-up there would be could wait for ever: here a thread that does not end."""
    script = """
import sys, threading
from sparsepipe.runtime.failures.rank_reports import exit_immediately
threading.Thread(target=threading.Event().wait).start()
print("so far")
exit_immediately(ValueError("wrong"), exit_code=9)
"""
    buffered = {**os.environ, "PYTHONUNBUFFERED": ""}
    command = [sys.executable, "-c", script]
    with Path("/dev/full").open("w") as full:
        ended = subprocess.run(
            command, stdout=full, stderr=full, env=buffered, timeout=60, check=False
        )
    assert ended.returncode == 9
