"""Which cores and GPUs jobs of a sweep get, as literal tables."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sparsepipe.sweep.slots import (
    Demand,
    Gpu,
    Grant,
    Machine,
    Slots,
    demand,
    environment,
)

CPU = Machine(cores=(0, 1, 2, 3))
GPUS = Machine(
    cores=tuple(range(16)),
    gpus=tuple(Gpu(token=str(n), kind=k) for n, k in enumerate(("RTX", "RTX", "TITAN", "RTX"))),
)


@pytest.mark.parametrize(
    ("ranks", "settings", "cores"),
    [
        # Undisturbed, unless somebody says otherwise.
        *((ranks, {}, 4) for ranks in (1, 2, 8)),
        *((ranks, {"cores_per_rank": 1}, min(ranks, 4)) for ranks in (1, 2, 8)),
        *((1, {"cores_per_rank": cores}, min(cores, 4)) for cores in (3, 9)),
        (1, {"task_cores": 1}, 1),
        (1, {"task_cores": 1, "cores_per_rank": 2}, 2),
    ],
)
def test_cores_of_a_job_without_gpus(ranks: int, settings: dict[str, int], cores: int) -> None:
    assert demand(CPU, ranks=ranks, **settings) == Demand(ranks=ranks, cores=cores)


@pytest.mark.parametrize(
    ("gpus", "settings", "cores"),
    [
        (("RTX",), {}, 4),
        (("RTX", "TITAN"), {}, 8),
        (("RTX",) * 3 + ("TITAN",), {}, 16),
        (("RTX",), {"cores_per_rank": 2}, 2),
    ],
)
def test_a_job_with_gpus_gets_their_share_of_the_cores(
    gpus: tuple[str, ...], settings: dict[str, int], cores: int
) -> None:
    found = demand(GPUS, ranks=len(gpus), gpus=gpus, **settings)
    assert found == Demand(ranks=len(gpus), cores=cores, gpus=gpus)


def start(slots: Slots, *wanted: Demand) -> tuple[Slots, list[Grant | None]]:
    grants = []
    for one in wanted:
        grant = slots.grant(one)
        grants.append(grant)
        slots = slots if grant is None else replace(slots, taken=(*slots.taken, grant))
    return slots, grants


def test_jobs_share_no_core() -> None:
    slots, grants = start(
        Slots(machine=CPU),
        Demand(ranks=1, cores=1),
        Demand(ranks=2, cores=2),
        Demand(ranks=1, cores=2),
        Demand(ranks=1, cores=1),
    )
    assert grants == [
        Grant(cores=(0,), gpus=(), threads=1),
        Grant(cores=(1, 2), gpus=(), threads=1),
        None,
        Grant(cores=(3,), gpus=(), threads=1),
    ]
    slots = replace(slots, taken=tuple(each for each in slots.taken if each != grants[1]))
    assert slots.grant(Demand(ranks=1, cores=2)) == Grant(cores=(1, 2), gpus=(), threads=2)


def test_jobs_share_no_gpu_and_get_the_kinds_that_they_need() -> None:
    slots, grants = start(
        Slots(machine=GPUS),
        Demand(ranks=1, cores=4, gpus=("RTX",)),
        Demand(ranks=2, cores=8, gpus=("TITAN", "RTX")),
        Demand(ranks=1, cores=4, gpus=("TITAN",)),
        Demand(ranks=1, cores=4, gpus=("RTX",)),
        Demand(ranks=1, cores=1),
    )
    assert grants == [
        Grant(cores=(0, 1, 2, 3), gpus=("0",), threads=4),
        Grant(cores=tuple(range(4, 12)), gpus=("1", "2"), threads=4),  # in the machine's order
        None,
        Grant(cores=(12, 13, 14, 15), gpus=("3",), threads=4),
        None,
    ]
    assert [job.gpus for job in slots.taken] == [("0",), ("1", "2"), ("3",)]


def test_cores_that_only_count_bind_no_job() -> None:
    wanted = Demand(ranks=1, cores=2)
    _, grants = start(Slots(machine=replace(CPU, binds=False)), wanted, wanted, wanted)
    assert grants == [
        Grant(cores=(0, 1), gpus=(), threads=2, binds=False),
        Grant(cores=(2, 3), gpus=(), threads=2, binds=False),
        None,
    ]


def test_no_more_jobs_than_the_user_says() -> None:
    one = Demand(ranks=1, cores=1)
    slots, grants = start(Slots(machine=CPU, max_jobs=2), one, one, one)
    assert [grant is not None for grant in grants] == [True, True, False]
    assert replace(slots, taken=slots.taken[1:]).grant(one) is not None


def test_a_job_larger_than_the_machine_runs_alone() -> None:
    large = demand(CPU, ranks=16, cores_per_rank=1)
    _, grants = start(Slots(machine=CPU), large, Demand(ranks=1, cores=1))
    assert grants == [Grant(cores=(0, 1, 2, 3), gpus=(), threads=1), None]
    _, grants = start(Slots(machine=CPU), Demand(ranks=1, cores=1), large)
    assert grants[1] is None


def test_a_job_that_wants_other_gpus_than_there_are_gets_all_and_finds_out() -> None:
    odd = Demand(ranks=1, cores=4, gpus=("H100",))
    _, grants = start(Slots(machine=GPUS), odd)
    assert grants == [Grant(cores=(0, 1, 2, 3), gpus=("0", "1", "2", "3"), threads=4)]


@pytest.mark.parametrize(
    ("grant", "inherited", "variables"),
    [
        (Grant(cores=(0, 1), gpus=(), threads=2), {}, {"OMP_NUM_THREADS": "2"}),
        (Grant(cores=(0, 1), gpus=(), threads=2), {"OMP_NUM_THREADS": "1"}, {}),
        (
            Grant(cores=(4, 5), gpus=("1", "3"), threads=1),
            {},
            {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "1,3"},
        ),
    ],
)
def test_environment_variables_of_a_grant(
    grant: Grant, inherited: dict[str, str], variables: dict[str, str]
) -> None:
    assert environment(grant, whole=False, inherited=inherited) == variables
    assert environment(grant, whole=True, inherited=inherited) == {}


def test_who_has_the_machine_to_itself() -> None:
    slots = Slots(machine=GPUS)
    whole = tuple(range(16))
    assert slots.is_whole(Grant(cores=whole, gpus=("0", "1", "2", "3"), threads=4))
    assert slots.is_whole(Grant(cores=whole, gpus=(), threads=16)), "it computes on none"
    assert not slots.is_whole(Grant(cores=whole, gpus=("0",), threads=16))
    assert not slots.is_whole(Grant(cores=(0,), gpus=(), threads=1))
