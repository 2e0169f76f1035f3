"""Which cores and GPUs a job of a sweep gets, and whether it may begin already. Pure.

Jobs that run at a time share no GPU and no core. They begin in their order: none is overtaken, so
that a large one is not kept waiting by small ones behind it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """A GPU of this machine.

    Args:
        token: what ``CUDA_VISIBLE_DEVICES`` calls it.
        kind: its name.
        uuid: what everybody calls it; empty where that is not known.
    """

    token: str
    kind: str
    uuid: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What jobs share.

    Args:
        cores: numbers of the cores that may be used.
        gpus: those that may be used.
        binds: jobs keep to their cores. Not where only the number of cores counts, as others of
            this host that have a quota, too, would be bound to the same ones.
    """

    cores: tuple[int, ...]
    gpus: tuple[Gpu, ...] = ()
    binds: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """What a job takes of a machine, which has that much.

    Args:
        ranks: its processes.
        cores: how many, for all of them.
        gpus: kinds of its GPUs, one for each.
    """

    ranks: int
    cores: int
    gpus: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Grant:
    """What a job was given.

    Args:
        cores: their numbers.
        gpus: their tokens.
        threads: for each of its processes.
        hides: there are GPUs that it must not see, as they are lost.
        binds: it keeps to its cores.
    """

    cores: tuple[int, ...]
    gpus: tuple[str, ...]
    threads: int
    hides: bool = False
    binds: bool = True


def demand(
    machine: Machine,
    *,
    ranks: int,
    gpus: Sequence[str] = (),
    task_cores: int | None = None,
    cores_per_rank: int | None = None,
) -> Demand:
    """What a job takes; all of the machine where it asks for more than that.

    Without GPUs a job has all cores to itself, unless its task needs fewer or somebody says how
    many: times that others disturb are none. With GPUs it has their share of the cores.

    Args:
        machine: what there is.
        ranks: processes of the job.
        gpus: kinds of the GPUs that it computes on.
        task_cores: what its task can use, where that is known.
        cores_per_rank: what the user says.
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
    """What of a machine is taken.

    Args:
        machine: what there is.
        max_jobs: how many jobs may run at a time; None: as many as find room.
        taken: by the jobs that run.
        lost: GPUs, by their tokens, that processes hold which cannot be ended.
    """

    machine: Machine
    max_jobs: int | None = None
    taken: tuple[Grant, ...] = ()
    lost: tuple[str, ...] = ()

    @property
    def gpus_used(self) -> frozenset[str]:
        """GPUs, by their tokens, that jobs have or that are lost."""
        return frozenset((*self.lost, *(token for job in self.taken for token in job.gpus)))

    def grant(self, wanted: Demand, *, elsewhere: Sequence[str] = ()) -> Grant | None:
        """What a job gets now; None where it has to wait.

        Args:
            wanted: what it takes.
            elsewhere: GPUs, by their tokens, that another sweep has for a while.
        """
        if self.max_jobs is not None and len(self.taken) >= self.max_jobs:
            return None
        cores = _free(self.machine.cores, [core for job in self.taken for core in job.cores])
        used = self.gpus_used.union(elsewhere)
        free = [gpu for gpu in self.machine.gpus if gpu.token not in used]
        gpus = _of_kinds(free, wanted.gpus)
        if gpus is None and not self.taken and not elsewhere:  # nothing to wait for
            gpus = tuple(gpu.token for gpu in free)
        if len(cores) < wanted.cores or gpus is None:
            return None
        threads = max(1, wanted.cores // wanted.ranks)
        return Grant(
            cores=cores[: wanted.cores],
            gpus=gpus,
            threads=threads,
            hides=bool(self.lost),
            binds=self.machine.binds,
        )

    def with_job(self, grant: Grant) -> Slots:
        """As it is once a job runs."""
        return replace(self, taken=(*self.taken, grant))

    def without_job(self, grant: Grant) -> Slots:
        """As it is once a job has ended."""
        left = list(self.taken)
        left.remove(grant)
        return replace(self, taken=tuple(left))

    def losing_job(self, grant: Grant) -> Slots:
        """As it is once a job is over whose processes cannot be ended.

        Its cores are free, though a driver that spins there may disturb others; its GPUs nobody
        can use.
        """
        return replace(self.without_job(grant), lost=(*self.lost, *grant.gpus))

    def regaining(self, grant: Grant) -> Slots:
        """As it is once the processes of such a job are gone."""
        return replace(self, lost=tuple(gpu for gpu in self.lost if gpu not in grant.gpus))

    def has_lost(self, wanted: Demand) -> bool:
        """Whether there were the GPUs that a job takes, and are no more."""
        left = [gpu for gpu in self.machine.gpus if gpu.token not in self.lost]
        had = _of_kinds(self.machine.gpus, wanted.gpus) is not None
        return had and _of_kinds(left, wanted.gpus) is None

    def is_whole(self, grant: Grant) -> bool:
        """Whether a job has the machine to itself, and may see it as it is."""
        every_gpu = len(grant.gpus) in (0, len(self.machine.gpus)) and not grant.hides
        return every_gpu and len(grant.cores) == len(self.machine.cores)


def _free(cores: Sequence[int], taken: Sequence[int]) -> tuple[int, ...]:
    return tuple(core for core in cores if core not in taken)


def _of_kinds(free: Sequence[Gpu], kinds: Sequence[str]) -> tuple[str, ...] | None:
    """Tokens of free GPUs of these kinds, in the machine's order; None where there are too few."""
    chosen: list[Gpu] = []
    for kind in kinds:
        alike = [gpu for gpu in free if gpu.kind == kind and gpu not in chosen]
        if not alike:
            return None
        chosen.append(alike[0])
    return tuple(gpu.token for gpu in free if gpu in chosen)


def environment(grant: Grant, *, whole: bool, inherited: Mapping[str, str]) -> dict[str, str]:
    """The variables by which a job hears of it; what the user has said of threads counts.

    Args:
        grant: of the job.
        whole: it has the machine to itself, and needs no word of it.
        inherited: variables of this process.
    """
    if whole:
        return {}
    found = {}
    if "OMP_NUM_THREADS" not in inherited:
        found["OMP_NUM_THREADS"] = str(grant.threads)
    if grant.gpus or grant.hides:
        found["CUDA_VISIBLE_DEVICES"] = ",".join(grant.gpus)
    return found
