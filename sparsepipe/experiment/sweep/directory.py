"""Where a sweep's jobs leave their records: one directory, whichever process each runs in."""

from __future__ import annotations

import os
from pathlib import Path

from omegaconf import DictConfig

_VARIABLE = "SPARSEPIPE_SWEEP_DIR"
"""Environment variable: the sweep's own directory. A job's configuration would say another one
where what is swept is part of its name."""


def announce(config: DictConfig) -> None:
    """Lets the processes of a sweep know its directory."""
    os.environ[_VARIABLE] = str(sweep_directory(config))


def sweep_directory(config: DictConfig) -> Path:
    """As the sweep's configuration says."""
    return Path(str(config.hydra.sweep.dir)).absolute()


def announced(otherwise: str) -> Path:
    """As the sweep has announced it, else what a job's configuration says."""
    return Path(os.environ.get(_VARIABLE) or otherwise).absolute()
