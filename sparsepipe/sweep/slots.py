"""The launcher's settings, and which cores and GPUs a sweep's job gets when. Pure functions.

Jobs that run at the same time share no GPU and no core. Jobs begin in order, so that a large one
does not wait while smaller ones overtake it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sparsepipe.errors import ConfigError

WAIT_LIMIT_S = 86_400.0
"""A day: the default limit on a job's wait for another command that works on the same run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How many jobs run at a time, on how many cores, and for how long: ``hydra.launcher``, whose
    class in ``hydra_plugins`` explains the keys. Raises a ConfigError for a number not above 0.
    """

    max_jobs: int | None = None
    cores_per_rank: int | None = None
    job_limit_s: float | None = None
    wait_limit_s: float | None = WAIT_LIMIT_S

    def __post_init__(self) -> None:
        for name in ("max_jobs", "cores_per_rank", "job_limit_s", "wait_limit_s"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ConfigError(
                    f"hydra.launcher.{name}={value} is not above 0",
                    remedy="set it to a number above 0, or to null",
                )


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """A GPU: ``token`` names it in ``CUDA_VISIBLE_DEVICES``, ``kind`` is its model."""

    token: str
    kind: str
    uuid: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Cores and GPUs that jobs share.

    Args:
        cores: numbers of the cores that may be used.
        gpus: GPUs that may be used.
        binds: whether jobs are bound to their cores. They are not where a quota limits the number
            of cores: containers of the host that have quotas would all be bound to the same cores.
    """

    cores: tuple[int, ...]
    gpus: tuple[Gpu, ...] = ()
    binds: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """Numbers of ranks and cores that a job needs, and the kind of each GPU."""

    ranks: int
    cores: int
    gpus: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Grant:
    """Numbers of cores and tokens of GPUs that a job gets, and how many threads each rank runs."""

    cores: tuple[int, ...]
    gpus: tuple[str, ...]
    threads: int
    binds: bool = True


def demand(
    machine: Machine,
    *,
    ranks: int,
    gpus: Sequence[str] = (),
    task_cores: int | None = None,
    cores_per_rank: int | None = None,
) -> Demand:
    """The demand of a job, with at most all cores of the machine.

    A job gets ``cores_per_rank`` for each rank if the user sets it, else ``task_cores``, which its
    task needs. With neither, a job with GPUs gets their share of the cores, and one without GPUs
    all cores, so that other jobs do not disturb the times that it measures.
    """
    all_cores = len(machine.cores)
    if cores_per_rank is not None:
        cores = ranks * cores_per_rank
    elif task_cores is not None:
        cores = task_cores
    elif gpus and machine.gpus:
        cores = max(ranks, all_cores * len(gpus) // len(machine.gpus))
    else:
        cores = all_cores
    return Demand(ranks=ranks, cores=min(cores, all_cores), gpus=tuple(gpus))


@dataclass(frozen=True, slots=True, kw_only=True)
class Slots:
    """A machine, the largest number of jobs at a time, and the grants of its running jobs."""

    machine: Machine
    max_jobs: int | None = None
    taken: tuple[Grant, ...] = ()

    def grant(self, needed: Demand) -> Grant | None:
        """The grant that a job with this demand gets now; None if it has to wait."""
        if self.max_jobs is not None and len(self.taken) >= self.max_jobs:
            return None
        used_cores = {core for job in self.taken for core in job.cores}
        cores = tuple(core for core in self.machine.cores if core not in used_cores)
        used = {token for job in self.taken for token in job.gpus}
        free = [gpu for gpu in self.machine.gpus if gpu.token not in used]
        chosen: list[Gpu] = []
        for kind in needed.gpus:
            chosen += [gpu for gpu in free if gpu.kind == kind and gpu not in chosen][:1]
        if len(chosen) < len(needed.gpus) and not self.taken:  # no job to wait for
            chosen = free
        elif len(chosen) < len(needed.gpus):
            return None
        if len(cores) < needed.cores:
            return None
        gpus = tuple(gpu.token for gpu in free if gpu in chosen)
        threads = max(1, needed.cores // needed.ranks)
        cores = cores[: needed.cores]
        return Grant(cores=cores, gpus=gpus, threads=threads, binds=self.machine.binds)

    def is_whole(self, grant: Grant) -> bool:
        """Whether a grant has all cores, and all GPUs or none, so that it needs no limits."""
        every_gpu = len(grant.gpus) in (0, len(self.machine.gpus))
        return every_gpu and len(grant.cores) == len(self.machine.cores)


def environment(grant: Grant, *, whole: bool, inherited: Mapping[str, str]) -> dict[str, str]:
    """Environment variables that limit a job to its grant: none if it has the ``whole`` machine, no
    ``OMP_NUM_THREADS`` if ``inherited`` has it.
    """
    if whole:
        return {}
    threads = {} if "OMP_NUM_THREADS" in inherited else {"OMP_NUM_THREADS": str(grant.threads)}
    gpus = {"CUDA_VISIBLE_DEVICES": ",".join(grant.gpus)} if grant.gpus else {}
    return threads | gpus
