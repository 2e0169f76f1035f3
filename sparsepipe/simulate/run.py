"""Runs a schedule on costs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from sparsepipe.schedule import Action, Schedule, check
from sparsepipe.simulate.engine import Engine
from sparsepipe.simulate.links import AS_IN_TRAINING, Algorithm, Sends
from sparsepipe.simulate.network import Network
from sparsepipe.simulate.record import Record
from sparsepipe.simulate.standing import Lookout
from sparsepipe.simulate.workload import Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """How ranks talk.

    Args:
        network: that they talk over.
        sends: how messages are handed over.
        algorithm: of sums over replicas.
        bucket_bytes: sums overlap with the backward, in parts of so many bytes; None: they do
            not.
    """

    network: Network
    sends: Sends = AS_IN_TRAINING
    algorithm: Algorithm = "ordered"
    bucket_bytes: float | None = None


def simulate(schedule: Schedule, workload: Workload, setting: Setting) -> Record:
    """Runs a schedule to its end, and records everything.

    Args:
        schedule: what every rank does.
        workload: what that costs; of microbatches where the schedule has some.
        setting: how ranks talk.

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
    lookout: Lookout | None = None,
) -> Record:
    """Lets every rank do its actions in order.

    Args:
        workload: what they cost.
        actions: of each rank; told as they are needed.
        setting: how ranks talk.
        keep: whether spans, transfers and reductions are recorded.
        lookout: looks for a cycle meanwhile.

    Raises:
        ScheduleError: ranks wait for one another for ever.
        PlanError: sums overlap with the backward, and the costs of layers are not known.
    """
    engine = Engine(
        workload,
        actions,
        setting.network,
        sends=setting.sends,
        algorithm=setting.algorithm,
        bucket_bytes=setting.bucket_bytes,
        keep=keep,
        lookout=lookout,
    )
    return engine.run()
