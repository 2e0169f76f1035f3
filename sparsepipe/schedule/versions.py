"""The weights that each minibatch uses in a schedule, and how many sets a rank holds at a time.

Version v of a rank's weights are its weights after v updates.
"""

from __future__ import annotations

from dataclasses import dataclass

from sparsepipe.schedule.actions import Action, Schedule
from sparsepipe.schedule.plan import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Passage:
    """The state of a rank's weights when it handles a minibatch.

    Args:
        forward: number of updates before the forward: the version that weight stashing uses.
        backward: number of updates before the backward.
        own: number, from 0, of the update that applies the minibatch's gradient.
    """

    forward: int
    backward: int
    own: int

    @property
    def staleness(self) -> int:
        """The number of updates between the minibatch's forward and its own update."""
        return self.own - self.forward


def passages(schedule: Schedule, rank: int) -> dict[int, Passage]:
    """The passage of every minibatch that ``rank`` handles, by minibatch, in order of forwards.

    The schedule must not split minibatches into microbatches.
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
    """The number of minibatches whose gradients stage 0 has applied before its forward of
    ``minibatch``, in the asynchronous schedule.

    Under vertical sync, every stage uses weights that include these minibatches and no later ones.
    The run may end before ``minibatch``; weights for it are then kept until the drain.
    """
    replicas = plan.replicas(0)
    return max(0, minibatch // replicas - plan.warmup(0)) * replicas


def until_return(plan: Plan, stage: int) -> int:
    """Number of updates that ``stage`` makes after a minibatch's own until the minibatch is back at
    stage 0.

    SpecTrain predicts, for both passes of a minibatch in all stages, the weights at one moment:
    when the minibatch is back. Without replicas, stage k of N looks floor(k / 2) updates ahead at
    the backward, since a stage updates once in the time of a forward and a backward and k backwards
    are left to run; and N - k - 1 more at the forward, the updates between the two passes.

    This follows a summary of the paper, not its text; the two numbers equal those counted in the
    schedule (``tests/unit/schedule``).

    With replicas, the number of ranks before the stage takes the place of k: a stage of r replicas
    takes r times as long for a minibatch and updates r times less often. The last minibatches
    before a drain are predicted in the same way, though fewer updates follow, since a rank cannot
    tell that they are the last.
    """
    return plan.ranks_of(stage).start // (2 * plan.replicas(stage))


class Tally:
    """Counts the sets of weights that a rank has in use, action by action.

    Args:
        plan: the stages and their ranks.
        rank: the rank whose actions :meth:`see` gets.

    Attributes:
        stashed: largest number of sets at a time so far under weight stashing, the newest included.
        vertical: the same under vertical sync, for asynchronous schedules. Until the drain, the
            version that the rank's next minibatch would need and all later versions are kept.
        predicted: the same under SpecTrain: the newest, and one for each minibatch in flight.
    """

    def __init__(self, plan: Plan, rank: int) -> None:
        self._plan = plan
        self._replicas = plan.replicas(plan.stage_of(rank))
        # By minibatch and microbatch: newest version at the forward, and that for vertical sync.
        self._in_flight: dict[tuple[int, int | None], tuple[int, int]] = {}
        self._updates = 0
        self._kept_from: int | None = 0
        self.stashed = self.vertical = self.predicted = 1

    def see(self, action: Action) -> None:
        """Updates the counts for the next action of the rank."""
        key = action.number, action.microbatch
        if action.kind == "U":
            self._updates += 1
        elif action.kind == "B":
            del self._in_flight[key]
        else:
            requested = included_at(self._plan, action.number) // self._replicas
            self._in_flight[key] = self._updates, requested
            if self._kept_from is not None:
                following = action.number + self._replicas
                self._kept_from = included_at(self._plan, following) // self._replicas
        self._count()

    def drain(self) -> None:
        """Stops counting weights for the rank's next minibatch, since no more come."""
        self._kept_from = None

    def _count(self) -> None:
        newest, in_flight = self._updates, self._in_flight.values()
        kept = () if self._kept_from is None else range(self._kept_from, newest)
        versions, requested = (
            {version for version, _ in in_flight},
            {requested for _, requested in in_flight},
        )
        self.stashed = max(self.stashed, len({newest, *versions}))
        self.vertical = max(self.vertical, len({newest, *kept, *requested}))
        self.predicted = max(self.predicted, 1 + len(in_flight))


def peaks(schedule: Schedule, rank: int) -> Tally:
    """Returns the most sets of weights that a rank has at a time, in each mode."""
    plan, tally = schedule.plan, Tally(schedule.plan, rank)
    kinds = [action.kind for action in schedule.actions[rank]]
    drain, forwards = 0, kinds.count("F")  # the index of the first action of the drain
    if forwards:
        # Once all forwards ahead have run, each forward is followed by a backward and an update.
        brings = 3 if forwards > plan.warmup(plan.stage_of(rank)) else 1
        drain = len(kinds) - 1 - kinds[::-1].index("F") + brings
    for place, action in enumerate(schedule.actions[rank]):
        if place == drain:
            tally.drain()
        tally.see(action)
    return tally
