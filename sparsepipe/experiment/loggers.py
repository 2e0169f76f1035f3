"""Loggers beside the metrics file that every run has."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from pytorch_lightning.loggers import WandbLogger

from sparsepipe.errors import ConfigError


def wandb_logger(
    *,
    project: str,
    run_id: str,
    run_dir: Path,
    job_type: str,
    offline: bool = True,
    entity: str | None = None,
    group: str | None = None,
    tags: Sequence[str] = (),
) -> WandbLogger:
    """A Weights & Biases logger that writes into the run directory.

    A resumed run goes on under the same id.

    Args:
        project: project on the server.
        run_id: the run's identity, there as here.
        run_dir: the run's directory.
        job_type: the task.
        offline: write files only, ask for no login, use no network.
        entity: user or team; None is the account's default.
        group: what belongs together, such as a sweep.
        tags: words to find the run by.

    Raises:
        ConfigError: online without a login.
    """
    if not offline and not _has_login():
        raise ConfigError(
            "logger=wandb needs a Weights & Biases login",
            remedy="run `wandb login`, set WANDB_API_KEY, or use logger=wandb_offline",
        )
    os.environ.setdefault("WANDB_SILENT", "true")  # the run directory is the last line printed
    return WandbLogger(
        project=project,
        entity=entity,
        save_dir=str(run_dir),
        id=run_id,
        name=run_id,
        resume=None if offline else "allow",
        offline=offline,
        group=group,
        job_type=job_type,
        tags=list(tags),
    )


def _has_login() -> bool:
    if os.environ.get("WANDB_API_KEY"):
        return True
    netrc = Path(os.environ.get("NETRC", "~/.netrc")).expanduser()
    return netrc.is_file() and "wandb" in netrc.read_text(errors="replace")
