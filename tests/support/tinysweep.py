"""What jobs of a sweep leave behind about themselves."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytorch_lightning as pl

PIECE_BYTES = 20_000_000


class Present(pl.Callback):
    """Each rank's process, and how many it counts, in the run's directory."""

    def on_train_start(self, trainer, pl_module):
        place = Path(trainer.default_root_dir) / f"present-{trainer.global_rank}"
        place.write_text(f"{os.getpid()} {trainer.world_size} {sorted(os.sched_getaffinity(0))}")
        victim = Path("/proc/self/oom_score_adj").read_text()
        place.with_name(f"victim-{trainer.global_rank}").write_text(victim)


class Hungry(pl.Callback):
    """Takes more and more memory and writes into it, until somebody ends the process."""

    def __init__(self, *, most_bytes: int) -> None:
        self.most_bytes = most_bytes

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        held = []
        for _ in range(self.most_bytes // PIECE_BYTES):
            held.append(bytearray(b"x") * PIECE_BYTES)
        raise AssertionError("memory did not run out")


class Commits(pl.Callback):
    """Commits a change of the package while a run goes on, as somebody who works on it does."""

    def __init__(self, *, checkout: str) -> None:
        self.checkout = Path(checkout)

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if trainer.global_rank or trainer.global_step:
            return
        changed = self.checkout / "sparsepipe" / "version.txt"
        changed.write_text("second\n")
        git = ("git", "-C", str(self.checkout), "-c", "user.name=a", "-c", "user.email=a@b.c")
        subprocess.run([*git, "add", "--all"], check=True)
        subprocess.run([*git, "commit", "--quiet", "-m", "second"], check=True)
