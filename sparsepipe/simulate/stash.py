"""Which updates have to copy weights first.

Those that change what is still needed, as in the worker (:mod:`sparsepipe.runtime.weights`, modes
``stash`` and ``vertical_sync``). It follows from where a rank stands in the order of its actions,
so that runs that stand alike copy alike.
"""

from __future__ import annotations

from sparsepipe.schedule import Action, Plan, included_at
from sparsepipe.simulate.workload import Workload


class Stash:
    """Who uses the newest weights of one rank: minibatches that went forward with them.

    Attributes:
        kept: versions that stay for minibatches that are still to come.
    """

    __slots__ = ("_users", "kept")

    def __init__(self) -> None:
        self._users: set[tuple[int, int | None]] = set()
        self.kept = 0

    @property
    def in_use(self) -> bool:
        """Whether an update now would change what is still needed."""
        return bool(self._users)

    def see(self, action: Action) -> None:
        """An action of the rank, the next in its order."""
        if action.kind == "U":
            self._users.clear()
        elif action.kind == "F":
            self._users.add((action.number, action.microbatch))
        else:
            self._users.discard((action.number, action.microbatch))


class VerticalStash(Stash):
    """The same under vertical sync, where minibatches use older weights, and stages keep these.

    A version stays from when it is made until no minibatch to come will ask for it; before the
    drain a rank takes it that another one comes. For the asynchronous schedule.

    Args:
        plan: the stages and their ranks.
        rank: whose weights.
    """

    __slots__ = ("_asked", "_forwards", "_has_fed", "_newest", "_plan", "_replicas", "_warmup")

    def __init__(self, plan: Plan, rank: int) -> None:
        super().__init__()
        stage = plan.stage_of(rank)
        self._plan, self._replicas = plan, plan.replicas(stage)
        self._warmup = plan.warmup(stage)
        self._newest = 0  # version, as the next one is
        self._asked = 0  # by the minibatch that follows
        self._forwards = 0
        self._has_fed = False  # a forward ran after the last update

    @property
    def in_use(self) -> bool:
        """Whether an update now would change what is still needed."""
        return bool(self._users) or (self._asked <= self._newest and not self._drains)

    @property
    def _drains(self) -> bool:
        """Whether no more minibatches come, asked at an update.

        Each update but those of the drain follows a forward, once all forwards ahead have run.
        """
        return not self._has_fed or self._forwards <= self._warmup

    def see(self, action: Action) -> None:
        """An action of the rank, the next in its order."""
        if action.kind == "F":
            if self._version_for(action.number) == self._newest:
                self._users.add((action.number, action.microbatch))
            self._asked = self._version_for(action.number + self._replicas)
            self._forwards += 1
            self._has_fed = True
        else:
            super().see(action)
            if action.kind == "U":
                self._newest += 1
                self._has_fed = False
        self.kept = self._newest - self._asked

    def _version_for(self, minibatch: int) -> int:
        return included_at(self._plan, minibatch) // self._replicas


def stash_of(workload: Workload, rank: int) -> Stash:
    """Of a rank whose updates copy weights."""
    return VerticalStash(workload.plan, rank) if workload.vertical_sync else Stash()
