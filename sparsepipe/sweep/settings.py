"""The launcher's settings: ``hydra.launcher``."""

from __future__ import annotations

from dataclasses import dataclass

from sparsepipe.errors import ConfigError

WAIT_LIMIT_S = 86_400.0
"""A day: a job may wait for another command that trains the same run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How many jobs run at a time, on how many cores, and for how long.

    Args:
        max_jobs: the most jobs at a time; None: as many as find cores and GPUs.
        cores_per_rank: cores of each process of a job; None: a job's share of the machine, see
            :func:`sparsepipe.sweep.slots.demand`.
        job_limit_s: a job that takes longer is ended, whatever it does or waits for; None: no
            limit.
        wait_limit_s: how long a job waits for another process that works on the same run; None: no
            limit.

    Raises:
        ConfigError: a number is too small.
    """

    max_jobs: int | None = None
    cores_per_rank: int | None = None
    job_limit_s: float | None = None
    wait_limit_s: float | None = WAIT_LIMIT_S

    def __post_init__(self) -> None:
        for name in ("max_jobs", "cores_per_rank"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(
                    f"hydra.launcher.{name}={value}", remedy="set it to 1 or more, or null"
                )
        for name in ("job_limit_s", "wait_limit_s"):
            limit_s = getattr(self, name)
            if limit_s is not None and not limit_s > 0:
                raise ConfigError(
                    f"hydra.launcher.{name}={limit_s}",
                    remedy="set it to a number of seconds above 0, or null",
                )
