"""Which weights every minibatch meets, and how many sets of them are alive, from a schedule.

Versions count the updates of a rank: version v is what v updates made.
"""

from __future__ import annotations

from dataclasses import dataclass

from sparsepipe.schedule.actions import Schedule


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


def included(schedule: Schedule) -> dict[int, int]:
    """Minibatches that stage 0's weights include at each minibatch's forward, in number.

    Vertical sync lets every stage use weights that include these and no later ones.
    """
    replicas = schedule.plan.replicas(0)
    return {
        minibatch: passage.forward * replicas
        for rank in schedule.plan.ranks_of(0)
        for minibatch, passage in passages(schedule, rank).items()
    }


def peak_stashed(schedule: Schedule, rank: int) -> int:
    """Most sets of weights that stashing keeps at a time, the newest included."""
    return _peak(schedule, rank, None)


def peak_vertical(schedule: Schedule, rank: int) -> int:
    """Most sets of weights that vertical sync keeps at a time, the newest included.

    All versions stay from the one on that this rank's next minibatch will ask for.
    """
    return _peak(schedule, rank, included(schedule))


def _peak(schedule: Schedule, rank: int, wanted: dict[int, int] | None) -> int:
    actions = schedule.actions[rank]
    replicas = schedule.plan.replicas(schedule.plan.stage_of(rank))
    coming = [action.number for action in reversed(actions) if action.kind == "F"]
    used: dict[int, int] = {}  # version of each minibatch in flight
    updates, peak = 0, 1
    for action in actions:
        if action.kind == "U":
            updates += 1
        elif action.kind == "B":
            del used[action.number]
        else:
            coming.pop()
            version = updates if wanted is None else wanted[action.number] // replicas
            used[action.number] = version
        kept_from = wanted[coming[-1]] // replicas if wanted and coming else updates
        peak = max(peak, len({updates, *used.values(), *range(kept_from, updates)}))
    return peak
