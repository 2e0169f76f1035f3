"""What a sweep's jobs have left, for what is made of them at its end."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from sparsepipe.errors import DataError
from sparsepipe.results.files import read_json

log = logging.getLogger(__name__)


def result_of(run: Path) -> dict[str, Any]:
    """What a run's ``result.json`` holds; nothing, and a warning, where it cannot be read."""
    try:
        found: dict[str, Any] = read_json(run / "result.json")
    except DataError as error:  # the other jobs have theirs
        log.warning("%s", error.message)
        return {}
    return found


def near(path: Path) -> str:
    """Relative to the working directory where it is below that."""
    absolute = Path(os.path.abspath(path))
    here = Path.cwd()
    return str(absolute.relative_to(here) if absolute.is_relative_to(here) else absolute)


def exhibit_of(config: DictConfig) -> str | None:
    """The experiment of a sweep that ends in a report, which is one of the paper's; else None."""
    experiment = OmegaConf.select(config, "hydra.runtime.choices.experiment")
    if experiment is None:
        return None
    from sparsepipe.results.report.exhibits import EXHIBITS

    return str(experiment) if experiment in EXHIBITS else None
