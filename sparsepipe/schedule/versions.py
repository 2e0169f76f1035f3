"""Which weights every minibatch meets, and how many sets of them are alive, from a schedule.

Versions count the updates of a rank: version v is what v updates made.
"""

from __future__ import annotations

from dataclasses import dataclass

from sparsepipe.schedule.actions import Action, Schedule
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

    Vertical sync lets every stage use weights that include these and no later ones. For
    the asynchronous schedule. The minibatch need not come: the weights for a rank's next one are
    kept until it is known that there is none.
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
    are those that counting the updates of the drawn schedule gives (``tests/unit/schedule``).

    With replicas, ranks before the stage take the place of stages (as they do for the forwards
    ahead): a stage of r replicas takes r times as long for its part, and updates r times less
    often. The last minibatches before a drain are predicted in the same way, though fewer updates
    follow: it is not known yet that they are the last.
    """
    return plan.ranks_of(stage).start // (2 * plan.replicas(stage))


class Tally:
    """Sets of weights that a rank has in use, counted action by action while a schedule runs.

    Args:
        plan: the stages and their ranks.
        rank: whose actions are given.

    Attributes:
        stashed: the most at a time so far under weight stashing, the newest included.
        vertical: under vertical sync, for asynchronous schedules. Until the drain begins, all
            versions stay from the one on that this rank's next minibatch would need.
        predicted: under SpecTrain: one for each minibatch in flight, and one.
    """

    def __init__(self, plan: Plan, rank: int) -> None:
        self._plan = plan
        self._replicas = plan.replicas(plan.stage_of(rank))
        # Versions, by minibatch and microbatch.
        self._in_flight: dict[tuple[int, int | None], tuple[int, int]] = {}
        self._updates = 0
        self._kept_from: int | None = 0
        self.stashed = self.vertical = self.predicted = 1

    def see(self, action: Action) -> None:
        """An action of the rank, the next in its order."""
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
        """No more minibatches come after what has been seen."""
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


def peak_stashed(schedule: Schedule, rank: int) -> int:
    """See :attr:`Tally.stashed`."""
    return _tally(schedule, rank).stashed


def peak_vertical(schedule: Schedule, rank: int) -> int:
    """See :attr:`Tally.vertical`."""
    return _tally(schedule, rank).vertical


def peak_predicted(schedule: Schedule, rank: int) -> int:
    """See :attr:`Tally.predicted`."""
    return _tally(schedule, rank).predicted


def _tally(schedule: Schedule, rank: int) -> Tally:
    plan, tally = schedule.plan, Tally(schedule.plan, rank)
    kinds = [action.kind for action in schedule.actions[rank]]
    drain, forwards = 0, kinds.count("F")  # the first action when no more minibatches come
    if forwards:
        # The last forward, as those before it, brings a backward and an update once all forwards
        # ahead have run.
        brings = 3 if forwards > plan.warmup(plan.stage_of(rank)) else 1
        drain = len(kinds) - 1 - kinds[::-1].index("F") + brings
    for place, action in enumerate(schedule.actions[rank]):
        if place == drain:
            tally.drain()
        tally.see(action)
    return tally
