"""The paper's MP as plans: how its Table III splits, with the best cuts for that, on its GPUs.

The paper prints how many GPUs each stage has. ``conf/plans/paper`` holds these plans, which
``experiment=table3`` writes.
"""

from __future__ import annotations

from sparsepipe.paper.paper_problem import MODEL, MP_DEVICE, paper_problem
from sparsepipe.paper.table3_paper import PAPER
from sparsepipe.partition.explanation import as_plan, explain
from sparsepipe.partition.problem import Problem, Solution, alike_as, taken_in_order
from sparsepipe.partition.search.algorithms import best_cuts
from sparsepipe.schedule import Plan


def best_paper_cuts(problem: Problem, gpus: int) -> Solution:
    """The best plan that splits as Table III prints.

    Args:
        problem: all of whose devices count as alike.
        gpus: how many.
    """
    return best_cuts(problem, [(int(number),) for number in PAPER[gpus].mp.split("-")])


def paper_mp_plan(
    gpus: int, *, model: str = "sparsepipe_mp", bandwidth_bytes_per_s: float = 60e6
) -> Plan:
    """The paper's MP on its GPUs.

    Stages take them in the order in which Table III lists them, as MP by our own search does:
    TITAN V, TITAN Xp, RTX 2080 Ti.

    Args:
        gpus: how many.
        model: of costs, by which cuts are best.
        bandwidth_bytes_per_s: of all links.
    """
    problem = paper_problem(gpus, model, bandwidth_bytes_per_s)
    best = best_paper_cuts(alike_as(problem, MP_DEVICE), gpus)
    stages = taken_in_order(best.stages, problem.fleet, range(len(problem.fleet.kinds)))
    solution = Solution(stages=tuple(stages), strategy="paper_mp")
    return as_plan(
        problem,
        explain(problem, solution),
        model=MODEL,
        device=MP_DEVICE,
        bandwidth_bytes_per_s=bandwidth_bytes_per_s,
        hardware=f"paper_{gpus}gpu",
        source=f"Zhai et al., SparsePipe, Table III, MP on {gpus} GPUs: {PAPER[gpus].mp}; cuts "
        "are the best for it",
    )
