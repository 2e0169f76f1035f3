"""What the stages of a plan that a search has found recompute, on the devices that there are."""

from __future__ import annotations

from collections.abc import Sequence

from sparsepipe.partition.problem import Problem
from sparsepipe.partition.recomputed_layers import StageSpans, recomputed_spans
from sparsepipe.partition.recomputed_plan import Chosen, HeldStage, cheapest_of, counted
from sparsepipe.partition.ties import Choice
from sparsepipe.schedule import Plan


def chosen_of(plan: Sequence[Choice], problem: Problem) -> Chosen:
    """The layers that the setting names, or the cheapest ones that fit; and what comes of it.

    Args:
        plan: stages of a chain of layers.
        problem: with what is recomputed.

    Raises:
        ConfigError: the plan has no such layers or stages; or layers are to be chosen, and a stage
            does not fit, whatever is recomputed.
    """
    assert problem.recomputing is not None
    stages = _held(plan, problem)
    if problem.recomputing.is_automatic:
        return cheapest_of(stages, problem.memory)
    return counted(stages, problem.memory, _named(plan, problem))


def _named(plan: Sequence[Choice], problem: Problem) -> StageSpans:
    assert problem.recomputing is not None
    made = Plan.of(
        config="-".join(str(sum(stage.counts)) for stage in plan),
        cuts=[stage.first for stage in plan[1:]],
        num_layers=plan[-1].end,
    )
    return recomputed_spans(problem.recomputing.setting, made)


def _held(plan: Sequence[Choice], problem: Problem) -> list[HeldStage]:
    assert problem.recomputing is not None
    parts = problem.recomputing.parts
    readers = sum(plan[0].counts)
    share = parts.share_of(parts.pieces(readers)) * problem.recomputing.batch_share
    left, found = sum(sum(stage.counts) for stage in plan), []
    for stage in plan:
        present = [kind for kind, count in enumerate(stage.counts) if count]
        limits = [problem.fleet.kinds[kind].memory_bytes for kind in present]
        replicas = sum(stage.counts)
        found.append(
            HeldStage(
                first=stage.first,
                last=stage.end - 1,
                profiles=tuple(problem.profiles[kind] for kind in present),
                replicas=replicas,
                limit_bytes=min((n for n in limits if n is not None), default=float("inf")),
                in_flight=parts.flying(replicas, left, readers=readers),
                share=share,
            )
        )
        left -= replicas
    return found
