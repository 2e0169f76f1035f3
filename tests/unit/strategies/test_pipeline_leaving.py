"""How a process ends after a pipeline has failed in it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.paths import environment
from tests.support.processes import new_store

SCRIPT = """
import atexit, os, signal, sys, threading
from pytorch_lightning.utilities.exceptions import SIGTERMException
from sparsepipe.strategies.distributed import exit_if_blocked

def end(case):
    name, error, blocked, after = case
    atexit.register(lambda: print(name, "cleans up", flush=True))
    exit_if_blocked(error, blocked=lambda: blocked)
    if after == "later":
        atexit.register(lambda: print(name, "cleans up later", flush=True))
    if blocked:  # not a daemon's end: Python would wait for it, or abort in it
        threading.Thread(target=threading.Event().wait, daemon=True).start()
    if after == "raise":
        raise error

CASES = (
    ("uncaught", ValueError("mine"), True, "raise"),
    ("caught, free", ValueError("mine"), False, "return"),
    ("caught, blocked", ValueError("mine"), True, "later"),
    ("interrupted", KeyboardInterrupt(), True, "return"),
    ("terminated", SIGTERMException(), True, "raise"),
    ("exits", SystemExit(7), True, "raise"),
    ("exits, free", SystemExit(7), False, "raise"),
)
for case in CASES:
    child = os.fork()
    if not child:
        end(case)
        sys.exit()
    _, status = os.waitpid(child, 0)
    print(case[0], "ends with", os.waitstatus_to_exitcode(status), flush=True)
"""


@pytest.mark.full
def test_the_status_is_the_errors_and_others_clean_up_first(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        capture_output=True,
        text=True,
        timeout=180,
        check=True,
        cwd=tmp_path,
    )
    assert done.stdout.splitlines() == [
        "uncaught cleans up",
        "uncaught ends with 1",
        "caught, free cleans up",
        "caught, free ends with 0",
        "caught, blocked cleans up later",
        "caught, blocked ends with 1",
        "interrupted cleans up",
        "interrupted ends with 130",
        "terminated cleans up",
        "terminated ends with 143",
        "exits cleans up",
        "exits ends with 7",
        "exits, free cleans up",
        "exits, free ends with 7",
    ]
    assert "ValueError: mine" in done.stderr


RANKS = """
import atexit, os, signal, sys
import pytorch_lightning as pl
from tests.support.pipeline_cases import make_loader, make_net, pipeline_trainer
atexit.register(lambda: print("cleaned up", flush=True))

class Ends(pl.Callback):
    def on_train_batch_end(self, trainer, *_):
        if trainer.global_rank == 1 and trainer.global_step == 3:
            if sys.argv[1] == "error":
                raise ValueError("mine")
            os.kill(os.getpid(), getattr(signal, sys.argv[1]))

pipeline_trainer("1-1", [3], max_epochs=1, callbacks=[Ends()]).fit(
    make_net("dense"), make_loader("dense", batches=60)
)
"""


@pytest.mark.full
@pytest.mark.parametrize(("how", "status"), [("error", 1), ("SIGINT", 130), ("SIGTERM", 143)])
def test_a_rank_that_ends_early(tmp_path: Path, how: str, status: int) -> None:
    """The other one waits for it: here the first loses a peer, or hears of the signal."""
    (tmp_path / "script.py").write_text(RANKS)
    store = new_store()
    place = {
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    ranks = [
        subprocess.Popen(
            [sys.executable, "script.py", how],
            cwd=tmp_path,
            env=environment(**place, RANK=str(rank), LOCAL_RANK=str(rank), GLOO_SOCKET_IFNAME="lo"),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    told = [rank.communicate(timeout=90) for rank in ranks]
    assert ranks[1].returncode == status, told
    assert ranks[0].returncode == (143 if how == "SIGTERM" else 1), told
    assert all("cleaned up" in out for out, _ in told)
