"""The next action of a rank and its end, and which updates have to copy weights first.

These are the updates that change what is still needed, as in the worker
(:mod:`sparsepipe.runtime.weights`, modes ``stash`` and ``vertical_sync``). It follows from where a
rank is in the order of its actions, so that runs in the same state copy alike.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from sparsepipe.schedule import Action, Plan, Span, included_at
from sparsepipe.simulate.flows import Events
from sparsepipe.simulate.messages import AnyQueue, Messages
from sparsepipe.simulate.sums import Sums
from sparsepipe.simulate.workload import Workload


class Stash:
    """Minibatches that use the newest weights of one rank: they went forward with them.

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

    A version stays until no later minibatch will need it; before the drain a rank assumes that
    another one comes. For the asynchronous schedule.
    """

    __slots__ = ("_forwards", "_has_fed", "_newest", "_plan", "_replicas", "_requested", "_warmup")

    def __init__(self, plan: Plan, rank: int) -> None:
        super().__init__()
        stage = plan.stage_of(rank)
        self._plan, self._replicas = plan, plan.replicas(stage)
        self._warmup = plan.warmup(stage)
        self._newest = 0  # version, as the next one is
        self._requested = 0  # version that the next minibatch will need
        self._forwards = 0
        self._has_fed = False  # a forward ran after the last update

    @property
    def in_use(self) -> bool:
        return bool(self._users) or (self._requested <= self._newest and not self._drains)

    @property
    def _drains(self) -> bool:
        """Whether no more minibatches come, at an update.

        Each update but those of the drain follows a forward, once all forwards ahead have run.
        """
        return not self._has_fed or self._forwards <= self._warmup

    def see(self, action: Action) -> None:
        if action.kind == "F":
            if self._version_for(action.number) == self._newest:
                self._users.add((action.number, action.microbatch))
            self._requested = self._version_for(action.number + self._replicas)
            self._forwards += 1
            self._has_fed = True
        else:
            super().see(action)
            if action.kind == "U":
                self._newest += 1
                self._has_fed = False
        self.kept = self._newest - self._requested

    def _version_for(self, minibatch: int) -> int:
        return included_at(self._plan, minibatch) // self._replicas


def stash_of(workload: Workload, rank: int) -> Stash:
    """The weights in use on a rank whose updates copy weights."""
    return VerticalStash(workload.plan, rank) if workload.vertical_sync else Stash()


class Rank:
    """A rank, and its next action or the one under way.

    A rank that looks ahead schedules an action's end as soon as what that needs is on its way, and
    counts on an update's end from its beginning: neither that a message has come nor that an
    update is over is an event then, but that end may change until the action has
    begun (:mod:`.messages`).

    A rank that begins with an update has no part of any minibatch: a schedule has more replicas
    than microbatches. It comes to sums as the others do. Where there are none it does nothing, as
    it has no gradient to update with, and would be through all updates before the others.

    Args:
        copy_s: of a copy of the weights, where an update makes one first.
        stash: of the weights in use, by which updates copy; None: they never do.
        sums: of its stage; None: that has no other replica.
        looks_ahead: see above.
        updates: called with each update as it begins; None: it is not called.
        returned: called with each minibatch that is back from all stages.

    Attributes:
        action: that is next or under way; None: nothing is left to do, or ever was.
        end_s: when that ends; None: it is not known.
        free_s: from when on it could begin that; with nothing left to do, since when.
        busy_s: that all actions before that took.
        spans: of these, if they are written down.
    """

    __slots__ = (
        "_copy_s",
        "_events",
        "_keep",
        "_looks_ahead",
        "_messages",
        "_number",
        "_puts",
        "_returned",
        "_seconds",
        "_sent",
        "_stash",
        "_sums",
        "_takes",
        "_todo",
        "_updates",
        "action",
        "busy_s",
        "end_s",
        "free_s",
        "spans",
    )

    def __init__(
        self,
        events: Events,
        number: int,
        actions: Iterable[Action],
        *,
        seconds: Mapping[str, float],
        copy_s: float,
        stash: Stash | None,
        messages: Messages,
        sums: Sums | None,
        looks_ahead: bool,
        keep: bool,
        updates: Callable[[Action], None] | None,
        returned: Callable[[int], None],
    ) -> None:
        self._events, self._number, self._seconds = events, number, seconds
        self._copy_s, self._stash = copy_s, stash
        self._messages, self._sums = messages, sums
        self._takes, self._puts = messages.takes[number], messages.puts[number]
        self._looks_ahead, self._keep = looks_ahead, keep
        self._updates, self._returned = updates, returned
        self._todo = iter(actions)
        self._sent: AnyQueue | None = None  # on which it sent last
        first = next(self._todo, None)
        has_part = first is not None and (first.kind != "U" or sums is not None)
        self.action = first if has_part else None
        self.end_s: float | None = None
        self.free_s = self.busy_s = 0.0
        self.spans: list[Span] = []

    @property
    def keeps(self) -> int:
        """How many versions of the weights stay for minibatches that are still to come."""
        return 0 if self._stash is None else self._stash.kept

    @property
    def is_held_up(self) -> bool:
        """Whether what it has sent must go on its way before it does anything else."""
        return self._sent is not None and self._sent.is_full

    def go_on(self) -> None:
        """Schedules the end of the next action, once its beginning is known."""
        while True:
            action = self.action
            if action is None or self.end_s is not None:
                return
            if self._sent is not None and self._sent.is_full:
                return
            kind = action.kind
            if kind != "U":
                break
            if not self._update(action):
                return  # woken later
        there_s = 0.0
        if lines := self._takes[kind]:
            number, microbatch = action.number, action.microbatch
            replica = (number if microbatch is None else microbatch) % len(lines)
            line = lines[replica] or self._messages.line_to(self._number, kind, replica)
            now_s = self._events.now_s  # an update may be under way
            ready_s = self.free_s if self.free_s > now_s else now_s
            comes_s = line.take((number, microbatch), ready_s)
            if comes_s is None:
                return  # woken later
            there_s = comes_s
        if kind == "B" and self._sums is not None:
            self._sums.backward_begins(self._number, action.number)
        self.free_s = max(self.free_s, self._events.now_s)  # an update may be under way
        self.schedule_end(there_s)

    def schedule_end(self, there_s: float) -> None:
        """Sets when an action ends, given when what it needs comes or came."""
        action = self.action
        assert action is not None
        begin_s = self.free_s if self.free_s > there_s else there_s
        self.end_s = end_s = begin_s + self._lasts_s(action.kind)
        self._events.at(end_s, self._end, None)

    def _update(self, action: Action) -> bool:
        """Begins an update, if it may now; whether the rank can go on to its next action."""
        now_s = self._events.now_s
        if self.free_s > now_s:  # another update is under way
            self._events.at(self.free_s, self._free, None)
            return False
        if self._sums is not None and not self._sums.reached(self._number, action.number):
            return False
        if self._updates is not None:
            self._updates(action)
        self.free_s = now_s
        seconds = self._lasts_s("U")
        if self._looks_ahead or not seconds:
            self._over(action, now_s + seconds)
            return True
        self.schedule_end(now_s)
        return False

    def _lasts_s(self, kind: str) -> float:
        """Seconds of the action that is next, if it is of a kind."""
        seconds = self._seconds[kind]
        if kind == "U" and self._stash is not None and self._stash.in_use:
            return seconds + self._copy_s
        return seconds

    def _free(self, nothing: None) -> None:
        self.go_on()

    def _end(self, nothing: None) -> None:
        now_s, action = self._events.now_s, self.action
        if self.end_s != now_s or action is None:
            return  # rescheduled since
        self.end_s = None
        self._over(action, now_s)
        kind = action.kind
        if lines := self._puts[kind]:
            number, microbatch = action.number, action.microbatch
            replica = (number if microbatch is None else microbatch) % len(lines)
            line = lines[replica] or self._messages.line_from(self._number, kind, replica)
            if not self._looks_ahead:
                self._sent = line
            line.put((number, microbatch))
        elif kind == "B":
            self._returned(action.number)
        self.go_on()

    def _over(self, action: Action, end_s: float) -> None:
        """Notes an action that is over, and which one comes next."""
        self.busy_s += self._lasts_s(action.kind)
        if self._stash is not None:
            self._stash.see(action)
        if self._keep:
            self.spans.append(Span(self._number, action, self.free_s, end_s))
        self.free_s = end_s
        self.action = next(self._todo, None)
