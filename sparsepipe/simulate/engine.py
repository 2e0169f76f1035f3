"""Runs ranks through their actions, message by message: the discrete-event simulator.

What the pipeline's worker does, on costs: a rank takes its actions in order; a forward waits for
the activation, a backward for the gradient, an update for the sum over the replicas; messages and
sums are on their way while ranks compute, on links that they share. A gradient goes upstream
before the replicas meet.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from sparsepipe.errors import ScheduleError
from sparsepipe.schedule import Action, Schedule, check
from sparsepipe.simulate.cycles import EQUAL, CycleDetector, RunState
from sparsepipe.simulate.flows import Events, Flows
from sparsepipe.simulate.messages import Messages
from sparsepipe.simulate.network import AS_IN_TRAINING, Algorithm, Network, Sends
from sparsepipe.simulate.ranks import Rank, stash_of
from sparsepipe.simulate.record import Record, Reduction
from sparsepipe.simulate.sums import Sums
from sparsepipe.simulate.workload import Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """How ranks communicate.

    Args:
        sends: how messages are handed over.
        algorithm: of sums over replicas.
        bucket_bytes: sums overlap with the backward, in parts of so many bytes; None: they do
            not.
    """

    network: Network
    sends: Sends = AS_IN_TRAINING
    algorithm: Algorithm = "ordered"
    bucket_bytes: float | None = None


class Engine:
    """One run.

    Ranks look ahead where the conditions for that hold (:mod:`.messages`).

    Args:
        keep: whether spans, transfers and reductions are recorded.
    """

    def __init__(
        self,
        workload: Workload,
        actions: Sequence[Iterable[Action]],
        setting: Setting,
        *,
        keep: bool,
        detector: CycleDetector | None,
    ) -> None:
        plan = self._plan = workload.plan
        self._workload, self._setting = workload, setting
        self._keep, self._detector = keep, detector
        self.record = Record(plan=plan, minibatches=0)
        self._events = Events()
        self._flows = Flows(self._events, setting.network.bytes_per_s)
        may_look_ahead = setting.sends.outbox is None and setting.sends.inbox != 0
        self._looks_ahead = may_look_ahead and setting.bucket_bytes is None and not keep
        self._sums = [self._sums_of(stage) for stage in range(plan.num_stages)]
        self._messages, self._ranks = self._lined_up(actions)
        self._working = [rank for rank in self._ranks if rank.action is not None]
        first = [rank.action for rank in self._working]
        self._is_split = any(a is not None and a.microbatch is not None for a in first)
        self._seen = 0, 0.0  # the last update of the first rank: its first minibatch, and when

    def _sums_of(self, stage: int) -> Sums | None:
        """None: there is nothing to sum, and no rank waits, as in training."""
        ranks, costs = self._plan.ranks_of(stage), self._workload.stages[stage]
        if len(ranks) == 1 or not costs.parameter_bytes:
            return None

        def summed(number: int, part: int, start_s: float, size: float) -> None:
            if self._keep:
                now_s = self._events.now_s
                self.record.reductions.append(Reduction(stage, number, part, start_s, now_s, size))

        return Sums(
            self._events,
            self._flows,
            self._setting.network,
            costs,
            ranks,
            algorithm=self._setting.algorithm,
            bucket_bytes=self._setting.bucket_bytes,
            summed=summed,
            wake=lambda rank: self._ranks[rank].go_on(),
        )

    def _lined_up(self, actions: Sequence[Iterable[Action]]) -> tuple[Messages, list[Rank]]:
        """The ranks, and the lines between them: either knows the other."""
        wakes: list[Callable[[], None]] = []
        reschedules: list[Callable[[float], None]] = []
        messages = Messages(
            self._workload,
            self._setting.network,
            self._setting.sends,
            self._events,
            self._flows,
            transfers=self.record.transfers if self._keep else None,
            wakes=wakes,
            reschedules=reschedules if self._looks_ahead else None,
        )
        ranks = [self._rank(number, each, messages) for number, each in enumerate(actions)]
        wakes += [rank.go_on for rank in ranks]
        reschedules += [rank.schedule_end for rank in ranks]
        return messages, ranks

    def _rank(self, number: int, actions: Iterable[Action], messages: Messages) -> Rank:
        stage, replica = self._plan.stage_of(number), self._plan.replica_of(number)
        costs = self._workload.stages[stage]
        return Rank(
            self._events,
            number,
            actions,
            seconds={
                "F": costs.forward_s[replica],
                "B": costs.backward_s[replica],
                "U": costs.update_s,
            },
            copy_s=costs.copy_s,
            stash=stash_of(self._workload, number) if costs.copy_s else None,
            messages=messages,
            sums=self._sums[stage],
            looks_ahead=self._looks_ahead,
            keep=self._keep,
            updates=self._updates if number == 0 and self._detector is not None else None,
            returned=self._returned,
        )

    def run(self) -> Record:
        """Lets everything happen."""
        for rank in self._ranks:
            rank.go_on()
        self._events.run()
        if stuck := [
            f"rank {number} at {rank.action}"
            for number, rank in enumerate(self._ranks)
            if rank.action is not None
        ]:
            raise ScheduleError(
                f"deadlock: {'; '.join(stuck[:8])} would wait for ever",
                remedy="let lines hold more messages (outbox, inbox), or choose another schedule",
            )
        # Since when all have nothing left to do; the queue's last call may have been void.
        self.record.end_s = max(rank.free_s for rank in self._ranks)
        self.record.busy_s = [rank.busy_s for rank in self._ranks]
        self.record.spans = [span for rank in self._ranks for span in rank.spans]
        return self.record

    def _returned(self, minibatch: int) -> None:
        returns_s = self.record.returns_s
        returns_s.extend([0.0] * (minibatch + 1 - len(returns_s)))
        returns_s[minibatch] = self._events.now_s
        self.record.minibatches = len(returns_s)

    def _updates(self, action: Action) -> None:
        """Called as the first rank begins an update, at which the detector may need the state."""
        assert self._detector is not None
        number, now_s = self._turn(0, action), self._events.now_s
        if self._detector.needs_state(number, now_s):
            self._seen = number, now_s
            self._events.before_time_goes_on(self._look)

    def _look(self) -> None:
        """Hands the detector the run's state, once nothing else is about to happen."""
        assert self._detector is not None
        if any(rank.action is None for rank in self._working):
            return  # the run comes to its end: what repeats itself now is not what others did
        number, time_s = self._seen
        self._flows.update_rates()
        horizon_s = self._events.now_s + EQUAL * time_s / (number + 1)
        if self._events.next_s <= horizon_s:
            self._events.before_time_goes_on(self._look)
            return
        self._detector.add_state(self._state(number, time_s, horizon_s))

    def _state(self, number: int, time_s: float, horizon_s: float) -> RunState:
        places: list[object] = []
        ends_s: list[float] = []
        for rank, each in enumerate(self._ranks):
            action, end_s, updates = each.action, each.end_s, each.free_s > horizon_s
            turn = None if action is None else self._turn(rank, action) - number
            part = None if action is None else (action.kind, action.microbatch)
            places.append((turn, part, updates, end_s is None, each.is_held_up, each.keeps))
            ends_s += [each.free_s] if updates else []
            ends_s += [] if end_s is None else [end_s]
        for key, state in self._messages.states(number, horizon_s):
            if state is not None:
                places.append((key, state[0]))
                ends_s += [] if state[1] is None else [state[1]]
        for stage, sums in enumerate(self._sums):
            if sums is not None:
                first = number if self._is_split else number // self._plan.replicas(stage)
                place, due_s = sums.state(first, horizon_s)
                places.append((stage, place))
                ends_s += due_s
        since_s = tuple(end_s - time_s for end_s in ends_s)
        busy_s = tuple(rank.busy_s for rank in self._ranks)
        return RunState(number, time_s, tuple(places), since_s, busy_s)

    def _turn(self, rank: int, action: Action) -> int:
        """The minibatch of an action; of an update the first of its minibatches."""
        if action.kind != "U" or self._is_split:
            return action.number
        return action.number * self._plan.replicas(self._plan.stage_of(rank))


def simulate(schedule: Schedule, workload: Workload, setting: Setting) -> Record:
    """Runs a schedule to its end, and records everything; the workload is of microbatches where the
    schedule has some.

    Raises:
        ScheduleError: the schedule cannot be run.
        PlanError: sums overlap with the backward, and the costs of layers are not known.
    """
    check(schedule)
    return run_actions(workload, schedule.actions, setting, keep=True)


def run_actions(
    workload: Workload,
    actions: Sequence[Iterable[Action]],
    setting: Setting,
    *,
    keep: bool,
    detector: CycleDetector | None = None,
) -> Record:
    """Lets every rank do its actions in order; with ``keep`` spans, transfers and reductions are
    recorded.
    """
    return Engine(workload, actions, setting, keep=keep, detector=detector).run()
