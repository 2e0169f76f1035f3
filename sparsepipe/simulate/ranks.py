"""Ranks, which run one action after another; an update copies the weights first if they are still
needed, as in :mod:`sparsepipe.runtime.weights`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from sparsepipe.schedule import Action, Plan, Span, included_at
from sparsepipe.simulate.flows import EventQueue
from sparsepipe.simulate.messages import MessageQueue, Messages
from sparsepipe.simulate.sums import Sums


class WeightsInUse:
    """Tracks which minibatches have run the forward with a rank's newest weights, but not yet the
    backward: while there are any, an update copies the weights first.

    Attributes:
        kept: number of older versions that are kept for later minibatches.
    """

    def __init__(self) -> None:
        self._users: set[tuple[int, int | None]] = set()
        self.kept = 0

    @property
    def in_use(self) -> bool:
        """Whether an update now would change weights that are still needed."""
        return bool(self._users)

    def see(self, action: Action) -> None:
        """Takes an action into account that the rank has just finished."""
        if action.kind == "U":
            self._users.clear()
        elif action.kind == "F":
            self._users.add((action.number, action.microbatch))
        else:
            self._users.discard((action.number, action.microbatch))


class OlderWeightsInUse(WeightsInUse):
    """Tracks weights in use under vertical sync, where minibatches use older weights.

    A version is kept until no later minibatch will need it; until the drain, a rank assumes that
    another minibatch will come.
    """

    def __init__(self, plan: Plan, rank: int) -> None:
        super().__init__()
        stage = plan.stage_of(rank)
        self._plan, self._replicas = plan, plan.replicas(stage)
        self._warmup = plan.warmup(stage)
        self._newest = 0  # number of the newest version
        self._requested = 0  # number of the version that the next minibatch will need
        self._forwards = 0
        self._has_fed = False  # a forward ran after the last update

    @property
    def in_use(self) -> bool:
        # Once all forwards ahead have run, each update follows a forward, except in the drain.
        drains = not self._has_fed or self._forwards <= self._warmup
        return bool(self._users) or (self._requested <= self._newest and not drains)

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


class Rank:
    """A simulated rank, which runs its actions one after another.

    A rank whose first action is an update has no part of any minibatch, since its stage has more
    replicas than there are microbatches: it only takes part in sums.

    Args:
        number: number of the rank.
        actions: the rank's actions in order.
        seconds: seconds of an action, by its kind.
        copy_s: seconds of a copy of the weights, which an update makes if they are in use.
        weights: tracks whether the weights are in use; None: updates never copy.
        sums: sums of gradients of the rank's stage; None: the stage has nothing to sum.
        spans: list to which spans of actions are added; None: they are not recorded.
        updates: called with each update when it begins; None: nothing is called.
        returned: called in stage 0 with the number of a minibatch when a backward of it ends.

    Attributes:
        action: the next action or the one under way; None: no action is left.
        end_s: when the action under way ends; None: none is under way.
        since_s: when the action under way began, or the last one ended.
        busy_s: seconds of all finished actions.
    """

    def __init__(
        self,
        events: EventQueue,
        number: int,
        actions: Iterable[Action],
        *,
        seconds: Mapping[str, float],
        copy_s: float,
        weights: WeightsInUse | None,
        messages: Messages,
        sums: Sums | None,
        spans: list[Span] | None,
        updates: Callable[[Action], None] | None,
        returned: Callable[[int], None],
    ) -> None:
        self._events, self._number, self._seconds = events, number, seconds
        self._copy_s, self._weights = copy_s, weights
        self._messages, self._sums, self._spans = messages, sums, spans
        self._updates, self._returned = updates, returned
        self._todo = iter(actions)
        self._sent: MessageQueue | None = None  # the queue of its last message
        self._takes_s = 0.0  # seconds of the action under way
        first = next(self._todo, None)
        has_part = first is not None and (first.kind != "U" or sums is not None)
        self.action = first if has_part else None
        self.end_s: float | None = None
        self.since_s = self.busy_s = 0.0

    @property
    def state(self) -> tuple[object, ...]:
        """Whether the rank computes, whether the queue of its last message makes it wait, and how
        many weight versions it keeps for later minibatches.
        """
        is_held_up = self._sent is not None and self._sent.is_full
        kept = 0 if self._weights is None else self._weights.kept
        return self.end_s is not None, is_held_up, kept

    def go_on(self) -> None:
        """Begins the next action if possible; otherwise this is called again once it may be."""
        while (action := self.action) is not None and self.end_s is None:
            if self._sent is not None and self._sent.is_full:
                return
            if action.kind == "U":
                if self._sums is not None and not self._sums.reached(self._number, action.number):
                    return
                if self._updates is not None:
                    self._updates(action)
            else:
                queue = self._messages.queue_of(self._number, action, incoming=True)
                if queue is not None and not queue.take((action.number, action.microbatch)):
                    return
                if action.kind == "B" and self._sums is not None:
                    self._sums.backward_begins(self._number, action.number)
            self.since_s = self._events.now_s
            self._takes_s = self._seconds[action.kind]
            if action.kind == "U" and self._weights is not None and self._weights.in_use:
                self._takes_s += self._copy_s
            if action.kind != "U" or self._takes_s:
                self.end_s = self.since_s + self._takes_s
                self._events.at(self.end_s, self._end)
            else:
                self._finish(action)

    def _end(self) -> None:
        action = self.action
        assert action is not None
        self.end_s = None
        self._finish(action)
        if action.kind != "U":
            queue = self._messages.queue_of(self._number, action, incoming=False)
            if queue is not None:
                self._sent = queue
                queue.put((action.number, action.microbatch))
            elif action.kind == "B":
                self._returned(action.number)
        self.go_on()

    def _finish(self, action: Action) -> None:
        now_s = self._events.now_s
        self.busy_s += self._takes_s
        if self._weights is not None:
            self._weights.see(action)
        if self._spans is not None:
            self._spans.append(Span.of(action, self._number, self.since_s, now_s))
        self.since_s = now_s
        self.action = next(self._todo, None)
