"""Every layer on a grid of ranks equals one process, in double precision."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from sparsepipe.errors import SparsePipeError
from sparsepipe.runtime.collectives.halo import Pending
from sparsepipe.spatial.grid import GiveBack, Grid
from sparsepipe.spatial.intervals import Interval, Window
from tests.support.processes import run, run_shared
from tests.support.spatial_cases import adjoint_gap, cases, error, errors

GRIDS = [(2,), (3,), (4,), (1, 2), (2, 2), (2, 1, 2)]
BOUND = 1e-12


def test_there_are_at_least_600_cases() -> None:
    assert sum(len(cases(len(grid))) for grid in GRIDS) >= 600


@pytest.mark.parametrize(
    "overlap", [True, pytest.param(False, marks=pytest.mark.full)], ids=["overlapped", "plain"]
)
@pytest.mark.parametrize(
    "grid",
    [
        pytest.param(g, marks=pytest.mark.full if math.prod(g) > 3 and g != (2, 2) else ())
        for g in GRIDS
    ],
    ids=str,
)
def test_layers_equal_one_process(grid: tuple[int, ...], overlap: bool) -> None:
    if not overlap and len(grid) > 1:
        pytest.skip("the order of computing is that of one axis")
    everyone = run_shared(errors, math.prod(grid), grid, len(grid), overlap)
    for found in everyone:
        assert {name: error for name, error in found.items() if not error <= BOUND} == {}


@pytest.mark.parametrize("grid", [(3,), (2, 2)], ids=str)
def test_moves_have_their_adjoints(grid: tuple[int, ...]) -> None:
    windows = [(k, s, d) for k in (1, 3, 7) for s in (1, 2) for d in (1, 2)]
    ranks = 3 if grid == (3,) else 4
    for gaps in run_shared(adjoint_gap, ranks, grid, windows):
        assert max(gaps) < 1e-11


def errors_of_a_mutant(rank: int, mutant: str) -> dict[str, float]:
    if mutant == "halo":
        needs = Window.needs

        def fewer(self: Window, outputs: Interval, size: int) -> Interval:
            found = needs(self, outputs, size)
            return Interval(found.start, max(found.start, found.stop - (found.stop < size)))

        Window.needs = fewer  # type: ignore[method-assign]
    elif mutant == "order":
        wait = Pending.wait
        Pending.wait = lambda self: wait(self)[::-1]  # type: ignore[method-assign]
    elif mutant == "adjoint":

        def kept(self: GiveBack, *args: Any, **kwargs: Any) -> Tensor:
            """What other ranks send is left out."""
            self.pending.received = [torch.zeros_like(each) for each in self.pending.wait()]
            return given(self, *args, **kwargs)

        given = GiveBack.wait
        GiveBack.wait = kept  # type: ignore[method-assign]
    grid, found = Grid((3,), overlap=False), {}
    for case in cases(1):
        # Of these all ranks see shapes that do not fit, or none does: they stay in step.
        if case.name.startswith("convolution kernel 3 stride 1 dilation 1"):
            try:
                found[case.name] = error(case, grid)
            except (RuntimeError, AssertionError, SparsePipeError):
                found[case.name] = math.inf
    return found


@pytest.mark.parametrize("mutant", ["none", "halo", "order", "adjoint"])
def test_mutants_are_found(mutant: str) -> None:
    everyone = run(errors_of_a_mutant, 3, mutant)
    is_found = any(error > BOUND for found in everyone for error in found.values())
    assert is_found == (mutant != "none")
