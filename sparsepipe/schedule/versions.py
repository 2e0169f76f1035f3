"""Which weights every minibatch meets, and how many sets of them are alive, from a schedule.

Versions count the updates of a rank: version v is what v updates made.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from sparsepipe.schedule.actions import Schedule
from sparsepipe.schedule.plan import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Passage:
    """How a minibatch passes a rank.

    Args:
        forward: updates applied before its forward: the version that weight stashing uses.
        backward: updates applied before its backward.
        own: updates applied before the one that its gradient is part of.
    """

    forward: int
    backward: int
    own: int

    @property
    def staleness(self) -> int:
        """Updates between its forward and its own update: d of SpecTrain's prediction."""
        return self.own - self.forward


def passages(schedule: Schedule, rank: int) -> dict[int, Passage]:
    """The passage of every minibatch that ``rank`` handles, in the order of their forwards.

    For schedules of whole minibatches.
    """
    replicas = schedule.plan.replicas(schedule.plan.stage_of(rank))
    updates = 0
    forward: dict[int, int] = {}
    found: dict[int, Passage] = {}
    for action in schedule.actions[rank]:
        if action.kind == "F":
            forward[action.number] = updates
        elif action.kind == "B":
            found[action.number] = Passage(
                forward=forward[action.number], backward=updates, own=action.number // replicas
            )
        else:
            updates += 1
    return {minibatch: found[minibatch] for minibatch in forward if minibatch in found}


def included_at(plan: Plan, minibatch: int) -> int:
    """Minibatches that stage 0's weights include at a minibatch's forward there, in number.

    Vertical sync lets every stage use weights that include these and no later ones. Told for
    the asynchronous schedule, and also for minibatches that may never come: what a rank's next
    minibatch will ask for must be kept until it is known that there is none.
    """
    replicas = plan.replicas(0)
    return max(0, minibatch // replicas - plan.warmup(0)) * replicas


def until_return(plan: Plan, stage: int) -> int:
    """Updates that a stage makes after a minibatch's own until the minibatch is back at stage 0.

    The idea of SpecTrain is to predict, for both passes of a minibatch in all stages, the
    weights of one moment: the end of its way. At stage k of N without replicas it looks
    floor(k / 2) updates ahead at the backward, and N - k - 1 more at the forward, which are those
    that come between the two: a stage updates once in the time of a forward and a backward, and k
    backwards are left to run.

    The paper's own text was not at hand: the idea is known from a summary, and the two numbers
    are those that counting the updates of the drawn schedule gives (``tests/schedule``).

    With replicas, ranks before the stage take the place of stages (as they do for the forwards
    ahead): a stage of r replicas takes r times as long for its part, and updates r times less
    often. The last minibatches before a drain are predicted in the same way, though fewer updates
    follow: nobody knows yet that they are the last.
    """
    return plan.ranks_of(stage).start // (2 * plan.replicas(stage))


def peak_stashed(schedule: Schedule, rank: int) -> int:
    """Most sets of weights that stashing keeps at a time, the newest included."""
    return _peak(schedule, rank, vertical=False)


def peak_vertical(schedule: Schedule, rank: int) -> int:
    """Most sets of weights that vertical sync keeps at a time, the newest included.

    All versions stay from the one on that this rank's next minibatch will ask for, whether it
    comes or not, until the drain begins. For asynchronous schedules.
    """
    return _peak(schedule, rank, vertical=True)


def peak_predicted(schedule: Schedule, rank: int) -> int:
    """Most sets of weights at a time under SpecTrain: one for each minibatch in flight, and one."""
    in_flight = itertools.accumulate(_FLIGHTS[a.kind] for a in schedule.actions[rank])
    return 1 + max(in_flight, default=0)


_FLIGHTS = {"F": 1, "B": -1, "U": 0}


def _peak(schedule: Schedule, rank: int, *, vertical: bool) -> int:
    plan, actions = schedule.plan, schedule.actions[rank]
    replicas = plan.replicas(plan.stage_of(rank))
    drain = _begin_of_drain(schedule, rank)
    used: dict[int, int] = {}  # version of each minibatch in flight
    updates = kept_from = 0
    peak = 1
    for place, action in enumerate(actions):
        if action.kind == "U":
            updates += 1
        elif action.kind == "B":
            del used[action.number]
        else:
            asked = included_at(plan, action.number) // replicas
            used[action.number] = asked if vertical else updates
            kept_from = included_at(plan, action.number + replicas) // replicas
        kept = range(kept_from, updates) if vertical and place < drain else ()
        peak = max(peak, len({updates, *used.values(), *kept}))
    return peak


def _begin_of_drain(schedule: Schedule, rank: int) -> int:
    """Place of the first action that a rank does when no more minibatches come."""
    kinds = [action.kind for action in schedule.actions[rank]]
    forwards = kinds.count("F")
    if not forwards:
        return 0
    last = len(kinds) - 1 - kinds[::-1].index("F")
    # The last forward, as those before it, brings a backward and an update once all forwards
    # ahead have run.
    return last + (3 if forwards > schedule.plan.warmup(schedule.plan.stage_of(rank)) else 1)
