"""What the stages of a plan that a search has found recompute, on the devices that there are."""

from __future__ import annotations

from collections.abc import Sequence

from sparsepipe.partition.layer_tables import LayerTables
from sparsepipe.partition.problem import Problem
from sparsepipe.partition.recompute.layers import StageSpans, recomputed_spans
from sparsepipe.partition.recompute.plan import Chosen, cheapest_of, counted
from sparsepipe.partition.recompute.second_runs import SecondRuns
from sparsepipe.partition.ties import Choice
from sparsepipe.schedule import Plan


def chosen_of(plan: Sequence[Choice], problem: Problem, spans: StageSpans | None = None) -> Chosen:
    """The layers that the setting names, or the cheapest ones that fit; and what comes of it.

    Args:
        plan: stages of a chain of layers.
        problem: with what is recomputed.
        spans: that a search has chosen for these stages already.

    Raises:
        ConfigError: the plan has no such layers or stages; or layers are to be chosen, and a stage
            does not fit, whatever is recomputed.
        PlanError: as much was looked at as may be before it was known whether all stages fit.
    """
    assert problem.synchronous is not None
    runs = SecondRuns(LayerTables(problem), problem.memory)
    each = zip(runs.classes_of(plan), plan, strict=True)
    stages = [runs.held(own, stage.first, stage.end) for own, stage in each]
    if spans is None and problem.synchronous.is_automatic:
        return cheapest_of(stages, problem.memory)
    return counted(stages, problem.memory, _named(plan, problem) if spans is None else spans)


def _named(plan: Sequence[Choice], problem: Problem) -> StageSpans:
    assert problem.synchronous is not None
    made = Plan.of(
        config="-".join(str(sum(stage.counts)) for stage in plan),
        cuts=[stage.first for stage in plan[1:]],
        num_layers=plan[-1].end,
    )
    return recomputed_spans(problem.synchronous.setting, made)
