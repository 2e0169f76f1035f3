"""Loader workers whose training is killed: they end at once, whatever they are reading."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support.data_helpers import assert_session_ends

SCRIPT = """
import sys, time
from pathlib import Path

from sparsepipe.data.dataloaders import make_loader


class Stuck:
    def __len__(self):
        return 1

    def __getitem__(self, key):
        Path(sys.argv[1]).touch()
        time.sleep(300)


if __name__ == "__main__":
    loader = make_loader(Stuck(), sampler=[(0, 0)], batch_size=1, num_workers=1, collate=list)
    next(iter(loader))
"""


@pytest.mark.full
def test_a_worker_ends_with_the_training_that_it_reads_for(tmp_path: Path) -> None:
    script, reads = tmp_path / "train.py", tmp_path / "reads"
    script.write_text(SCRIPT)
    process = subprocess.Popen(
        [sys.executable, str(script), str(reads)], stderr=subprocess.PIPE, start_new_session=True
    )
    deadline_s = time.monotonic() + 120
    while not reads.exists():
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < deadline_s, "no worker has begun to read"
        time.sleep(0.02)
    process.kill()
    process.wait(60)
    assert_session_ends(process.pid)
