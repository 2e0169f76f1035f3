"""A synchronous schedule: GPipe with backwards in the order of forwards.

Used by ``parallel=gpipe parallel.strategy.schedule=pipeline_schedule.first_in_first_out``, or by
``task=simulate task.schedule=pipeline_schedule.first_in_first_out``.
"""

from collections.abc import Iterator

from sparsepipe.schedule import Action, MinibatchSupply, Plan


def first_in_first_out(
    plan: Plan, rank: int, intake: MinibatchSupply, microbatches: int
) -> Iterator[Action]:
    """What one rank does: all forwards, all backwards, the update."""
    parts = plan.microbatches_of(rank, microbatches)
    for minibatch, _ in enumerate(intake.portions(1)):
        yield from (Action("F", minibatch, part) for part in parts)
        yield from (Action("B", minibatch, part) for part in parts)
        yield Action("U", minibatch)
