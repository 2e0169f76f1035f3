"""One job of a sweep, from its overrides to its checked configuration."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from hydra.core.config_loader import ConfigLoader
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, open_dict

from sparsepipe.config import compose
from sparsepipe.config.run_spec import RunSpec
from sparsepipe.config.sweep_environment import sweep_directory
from sparsepipe.sweep.record import SweptJob


@dataclass(slots=True, kw_only=True)
class ComposedJob:
    """A job with its configuration, ``hydra`` and all, and what is made of that."""

    job: SweptJob
    whole: DictConfig
    spec: RunSpec | None = None
    refused: Exception | None = None


def compose_job(
    loader: ConfigLoader, sweep: DictConfig, overrides: Sequence[str], *, number: int
) -> ComposedJob:
    """Composes a job, and keeps the error where its configuration is refused.

    Args:
        loader: knows the groups.
        sweep: configuration of the whole sweep.
        overrides: of the job.
        number: of the job, from 0.

    Raises:
        HydraException, OmegaConfBaseException: Hydra cannot compose it.
    """
    whole = loader.load_sweep_config(sweep, list(overrides))
    with open_dict(whole):
        whole.hydra.job.id = str(number)
        whole.hydra.job.num = number
    job = SweptJob(
        number=number,
        overrides=tuple(map(str, whole.hydra.overrides.task)),
        sweep=sweep_directory(sweep),
    )
    found = ComposedJob(job=job, whole=whole)
    try:
        with hydra_config(whole):
            found.spec = compose.resolve(task_config(whole))
    except Exception as error:
        found.refused = error
    return found


@contextmanager
def hydra_config(config: DictConfig) -> Iterator[None]:
    """Lets ``${hydra:...}`` be resolved from a configuration while the block runs."""
    before = HydraConfig.instance().cfg
    HydraConfig.instance().set_config(config)
    try:
        yield
    finally:
        HydraConfig.instance().cfg = before


def task_config(whole: DictConfig) -> DictConfig:
    """A copy without ``hydra``."""
    config = copy.deepcopy(whole)
    with open_dict(config):
        del config["hydra"]
    return config
