"""What jobs of a sweep leave behind about themselves."""

from __future__ import annotations

import os
from pathlib import Path

import pytorch_lightning as pl


class Present(pl.Callback):
    """Each rank's process, and how many it counts, in the run's directory."""

    def on_train_start(self, trainer, pl_module):
        place = Path(trainer.default_root_dir) / f"present-{trainer.global_rank}"
        place.write_text(f"{os.getpid()} {trainer.world_size} {sorted(os.sched_getaffinity(0))}")
