"""The paper's Table III comes out of its authors' own measurements."""

from __future__ import annotations

import pytest

from sparsepipe.paper.plans import paper_problem
from sparsepipe.partition.explanation import explain
from sparsepipe.partition.problem import Problem
from sparsepipe.partition.search.algorithms import best_cuts, exact, hete_mp, mp

MP = {5: "1-2-1-1", 6: "4-1-1", 7: "4-1-1-1", 8: "4-1-1-1-1"}
HETE_MP = {
    5: ["0-23 on 4 x RTX 2080 Ti", "24-51 on 1 x TITAN V"],
    6: ["0-23 on 4 x RTX 2080 Ti", "24-33 on 1 x TITAN V", "34-51 on 1 x TITAN Xp"],
    7: ["0-23 on 2 x TITAN Xp + 4 x RTX 2080 Ti", "24-51 on 1 x TITAN V"],
    8: ["0-23 on 3 x TITAN Xp + 4 x RTX 2080 Ti", "24-51 on 1 x TITAN V"],
}


def texts(solved: Problem, stages: object) -> list[str]:
    return [stage.text(solved.pool.kinds) for stage in stages]  # type: ignore[attr-defined]


@pytest.mark.parametrize("gpus", HETE_MP)
@pytest.mark.parametrize("bandwidth", [50e6, 60e6, 65e6])
def test_hete_mp_gives_the_papers_rows(gpus: int, bandwidth: float) -> None:
    given = paper_problem(gpus, "sparsepipe_hete", bandwidth)
    assert texts(given, hete_mp(given).stages) == HETE_MP[gpus]


@pytest.mark.parametrize("gpus", MP)
@pytest.mark.parametrize("bandwidth", [55e6, 60e6, 100e6, 110e6])
def test_the_papers_rows_of_mp_are_as_good_as_ours(gpus: int, bandwidth: float) -> None:
    given = paper_problem(gpus, "sparsepipe_mp", bandwidth)
    ours = mp(given, device="RTX 2080 Ti")
    alike = ours.assumed
    assert alike is not None
    paper = best_cuts(alike, [(int(number),) for number in MP[gpus].split("-")])
    found = mp(alike, device="RTX 2080 Ti")
    assert explain(alike, paper).bottleneck_s == pytest.approx(
        explain(alike, found).bottleneck_s, rel=1e-9
    )


@pytest.mark.parametrize(("gpus", "gain"), [(7, 1.15), (8, 1.27)])
def test_exact_is_ahead_of_the_papers_order(gpus: int, gain: float) -> None:
    given = paper_problem(gpus, "4_whole", 100e6)
    heuristic, best = explain(given, hete_mp(given)), explain(given, exact(given))
    assert heuristic.bottleneck_s / best.bottleneck_s == pytest.approx(gain, abs=0.01)
