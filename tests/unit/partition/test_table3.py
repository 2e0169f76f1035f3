"""The paper's Table III comes out of its authors' own measurements."""

from __future__ import annotations

from pathlib import Path

import pytest

from sparsepipe.cluster import Inventory
from sparsepipe.partition.costs.model import cost_model
from sparsepipe.partition.explanation import explain
from sparsepipe.partition.problem import Problem
from sparsepipe.partition.search.algorithms import best_cuts, exact, hete_mp, mp
from sparsepipe.profiling import Profile

PROFILES = Path(__file__).parents[3] / "sparsepipe" / "assets" / "profiles" / "paper"
FILES = {"TITAN V": "titan_v", "TITAN Xp": "titan_xp", "RTX 2080 Ti": "rtx_2080_ti"}
BANDWIDTH = 60e6

MP = {5: "1-2-1-1", 6: "4-1-1", 7: "4-1-1-1", 8: "4-1-1-1-1"}
HETE_MP = {
    5: ["0-23 on 4 x RTX 2080 Ti", "24-51 on 1 x TITAN V"],
    6: ["0-23 on 4 x RTX 2080 Ti", "24-33 on 1 x TITAN V", "34-51 on 1 x TITAN Xp"],
    7: ["0-23 on 2 x TITAN Xp + 4 x RTX 2080 Ti", "24-51 on 1 x TITAN V"],
    8: ["0-23 on 3 x TITAN Xp + 4 x RTX 2080 Ti", "24-51 on 1 x TITAN V"],
}


def problem(gpus: int, model: str, bandwidth: float = BANDWIDTH) -> Problem:
    first = [{"name": "TITAN V", "count": 1}]
    if gpus > 5:
        first.append({"name": "TITAN Xp", "count": gpus - 5})
    inventory = Inventory.from_dict(
        {
            "hosts": [
                {"name": "server1", "devices": first},
                {"name": "server2", "devices": [{"name": "RTX 2080 Ti", "count": 4}]},
            ]
        }
    )
    profiles = {name: Profile.load(PROFILES / f"{file}.json") for name, file in FILES.items()}
    return Problem.of(inventory, profiles, model=cost_model(model), bandwidth_bytes_per_s=bandwidth)


def texts(solved: Problem, stages: object) -> list[str]:
    return [stage.text(solved.pool.kinds) for stage in stages]  # type: ignore[attr-defined]


@pytest.mark.parametrize("gpus", HETE_MP)
@pytest.mark.parametrize("bandwidth", [50e6, 60e6, 65e6])
def test_hete_mp_gives_the_papers_rows(gpus: int, bandwidth: float) -> None:
    given = problem(gpus, "sparsepipe_hete", bandwidth)
    assert texts(given, hete_mp(given).stages) == HETE_MP[gpus]


@pytest.mark.parametrize("gpus", MP)
@pytest.mark.parametrize("bandwidth", [55e6, 60e6, 100e6, 110e6])
def test_the_papers_rows_of_mp_are_as_good_as_ours(gpus: int, bandwidth: float) -> None:
    given = problem(gpus, "sparsepipe_mp", bandwidth)
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
    given = problem(gpus, "4_whole", 100e6)
    heuristic, best = explain(given, hete_mp(given)), explain(given, exact(given))
    assert heuristic.bottleneck_s / best.bottleneck_s == pytest.approx(gain, abs=0.01)
