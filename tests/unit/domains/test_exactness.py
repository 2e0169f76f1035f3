"""Domains over ranks train as one process does, in double precision."""

from __future__ import annotations

from typing import Any

import pytest
import pytorch_lightning as pl

from tests.support.domain_cases import Case, gap, parallel, plain
from tests.support.processes import run_shared

BOUND = 1e-12


def check(case: Case, **settings: Any) -> None:
    expected, logged = plain(case, **settings)
    for rank, (state, values) in enumerate(run_shared(parallel, case.ranks, case, settings)):
        found = gap(state, expected)
        assert max(found.values()) <= BOUND, (rank, found)
        assert values.keys() == logged.keys()
        assert all(values[name] == pytest.approx(logged[name], rel=1e-6) for name in logged)


@pytest.mark.parametrize("similarity", ["dann", "mmd", "mmd_unbiased"])
@pytest.mark.parametrize("kind", ["2d", "sparse"])
def test_one_rank_a_domain(kind: str, similarity: str) -> None:
    check(Case(kind=kind, similarity=similarity))


@pytest.mark.parametrize(
    ("targets", "ranks", "roles"),
    [(2, 2, "equal"), (2, 3, "equal"), (1, 4, "equal"), (1, 3, "separate"), (2, 3, "separate")],
)
@pytest.mark.parametrize("norm", ["none", "domain", "all"])
def test_placements(targets: int, ranks: int, roles: str, norm: str) -> None:
    check(Case(targets=targets, ranks=ranks, roles=roles, norm=norm))


@pytest.mark.parametrize(
    ("targets", "ranks", "roles", "kind", "similarity"),
    [
        pytest.param(4, 3, "equal", "2d", "mmd", id="four on three ranks"),
        pytest.param(4, 4, "separate", "sparse", "dann", id="four on three ranks and the losses"),
        pytest.param(7, 4, "equal", "2d", "dann", id="seven, two domains a rank"),
        pytest.param(
            7,
            4,
            "equal",
            "sparse",
            "mmd",
            id="seven shapes, two domains a rank",
            marks=pytest.mark.full,
        ),
    ],
)
def test_many_targets(targets: int, ranks: int, roles: str, kind: str, similarity: str) -> None:
    check(Case(targets=targets, ranks=ranks, roles=roles, kind=kind, similarity=similarity))


@pytest.mark.full
@pytest.mark.parametrize("similarity", ["dann", "mmd"])
@pytest.mark.parametrize("kind", ["2d", "sparse"])
@pytest.mark.parametrize(
    ("targets", "ranks", "roles"),
    [(4, 5, "equal"), (4, 6, "separate"), (7, 8, "equal"), (7, 9, "separate"), (4, 10, "equal")],
)
def test_many_targets_on_many_ranks(
    targets: int, ranks: int, roles: str, kind: str, similarity: str
) -> None:
    """A rank a domain, one more for the losses, and at last two ranks a domain."""
    check(Case(targets=targets, ranks=ranks, roles=roles, kind=kind, similarity=similarity))


def test_loaders_are_read_in_their_own_order() -> None:
    check(Case(), use_distributed_sampler=True)


class Clamping(pl.Callback):
    """Changes gradients in hooks of parameters, and after each backward pass."""

    def on_fit_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        for parameter in pl_module.parameters():
            parameter.register_hook(lambda gradient: gradient.clamp(-0.005, 0.005))

    def on_after_backward(self, trainer: pl.Trainer, pl_module: Any) -> None:
        for parameter in pl_module.parameters():
            if parameter.grad is not None:
                parameter.grad.clamp_(-0.003, 0.003)


def test_code_sees_gradients_of_all_domains() -> None:
    check(Case(accumulate=2), callbacks=[Clamping()])
    check(Case(ranks=2, grid=(1, 2)), callbacks=[Clamping()])


def test_clipping_and_accumulation() -> None:
    check(Case(targets=2, ranks=3, clip=0.1, accumulate=2))
    check(Case(targets=1, ranks=3, roles="separate", clip=0.1))


@pytest.mark.parametrize(
    ("kind", "grid", "ranks", "roles"),
    [
        ("2d", (1, 2), 2, "equal"),
        ("2d", (1, 2), 4, "equal"),
        ("2d", (2, 1), 6, "separate"),
        ("3d", (1, 1, 2), 4, "equal"),
        pytest.param("3d", (1, 2, 1), 8, "equal", marks=pytest.mark.full),
    ],
)
@pytest.mark.parametrize("norm", ["domain", pytest.param("all", marks=pytest.mark.full)])
def test_encoders_on_grids(
    kind: str, grid: tuple[int, ...], ranks: int, roles: str, norm: str
) -> None:
    """Domains x spatial, and with eight ranks replicas of domains besides."""
    check(Case(kind=kind, grid=grid, ranks=ranks, roles=roles, norm=norm, clip=0.1))
