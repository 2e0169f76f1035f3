"""No rank outlives the first one for long, whatever it is at."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from sparsepipe.strategies import orphans
from tests.support.paths import environment

PATIENCE_S = 5.0  # what the first rank's end leaves the others

SLOW = """
first, *others = map(int, sys.argv[1:])
open("begun", "w").close()
while os.getppid() == first:
    time.sleep(0.02)
time.sleep(0.5)

def state(pid):
    try:
        return open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()[0]
    except OSError:
        return "gone"

states = [*map(state, others)]
with open("written", "w") as file:
    file.write(" ".join(states))
"""

FIRST = f"""
import os, runpy, signal, subprocess, sys, time
from types import SimpleNamespace

def start(code, *arguments):
    code = "import os, signal, sys, time\\n" + code
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL)

stopped = start("os.kill(os.getpid(), signal.SIGSTOP)")
busy = start("while True: pass")
slow = start({SLOW!r}, os.getpid(), stopped.pid, busy.pid)
ended = start("")
ended.wait()
os.waitid(os.P_PID, stopped.pid, os.WSTOPPED)
while not os.path.exists("begun"):
    time.sleep(0.02)
names = runpy.run_path({orphans.__file__!r})
for procs in ([stopped, busy], [slow, ended], []):
    names["register_ranks"](SimpleNamespace(procs=procs))
names["register_ranks"](None)
names["end_orphans"]()
names["end_orphans"]()
print(time.monotonic(), stopped.pid, busy.pid, slow.pid, flush=True)
if sys.argv[1] == "killed":
    os.kill(os.getpid(), signal.SIGKILL)
"""


def runs(pid: int) -> bool:
    """Whether a process has not ended; its parent may not have reaped it yet."""
    with suppress(FileNotFoundError, ProcessLookupError):
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        return state not in "ZX"
    return False


def wait_for_end(pids: list[int], *, limit_s: float) -> bool:
    deadline_s = time.monotonic() + limit_s
    while any(map(runs, pids)) and time.monotonic() < deadline_s:
        time.sleep(0.02)
    return not any(map(runs, pids))


@pytest.mark.parametrize("how", [pytest.param("exits", marks=pytest.mark.full), "killed"])
def test_those_that_do_not_end_are_killed_others_have_their_time(tmp_path: Path, how: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", FIRST, how],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode == 0) is (how == "exits")
    before_end_s, *pids = done.stdout.split()
    *_, slow = others = [*map(int, pids)]
    assert wait_for_end([slow], limit_s=60)
    lived_s = time.monotonic() - float(before_end_s)
    assert wait_for_end(others, limit_s=60)
    # When the slow one ended, the others were there still; unless it was held up for so long
    # that they had been killed by then, or it was itself.
    written = tmp_path / "written"
    states = set(written.read_text().split() if written.exists() else []) or {"killed"}
    assert states <= {"T", "R", "S"} or lived_s >= PATIENCE_S, states


SCRIPT = """
import os, signal, sys
from pathlib import Path
import pytorch_lightning as pl
from tests.support.pipeline_cases import QUIET, make_loader, make_net
from sparsepipe.strategies import DataParallelStrategy, PipelineStrategy

class Stands(pl.Callback):
    def on_train_batch_end(self, trainer, *_):
        if trainer.global_rank == 1 and trainer.global_step == 3:
            Path("pid").write_text(str(os.getpid()))
            os.kill(os.getpid(), signal.SIGSTOP)

strategy = {
    "pipeline": lambda: PipelineStrategy(config="1-1", cuts=[3], timeout_s=20),
    "dp": lambda: DataParallelStrategy(process_group_backend="gloo", timeout_s=20),
}[sys.argv[1]]()
pl.Trainer(**QUIET, devices=2, strategy=strategy, max_epochs=1, callbacks=[Stands()]).fit(
    make_net("dense"), make_loader("dense", batches=60)
)
"""


@pytest.mark.full
@pytest.mark.parametrize(
    ("parallel", "says"), [("pipeline", "rank 1 (stage 1)"), ("dp", "Timed out waiting")]
)
def test_lightnings_launcher_leaves_no_rank_that_stands_still(
    tmp_path: Path, parallel: str, says: str
) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    with (tmp_path / "told").open("w") as told:  # no pipe, whose end the other rank would hold
        done = subprocess.run(
            [sys.executable, "script.py", parallel],
            cwd=tmp_path,
            env=environment(GLOO_SOCKET_IFNAME="lo"),
            stderr=told,
            timeout=120,
            check=False,
        )
    stopped = int((tmp_path / "pid").read_text())
    try:
        text = (tmp_path / "told").read_text()
        assert done.returncode == 1, text
        assert says in text
        # It is no later than the first one's end that this was told.
        told_s = time.time() - (tmp_path / "told").stat().st_mtime
        assert runs(stopped) or told_s >= PATIENCE_S
        assert wait_for_end([stopped], limit_s=60)
    finally:
        with suppress(ProcessLookupError):
            os.kill(stopped, signal.SIGKILL)
