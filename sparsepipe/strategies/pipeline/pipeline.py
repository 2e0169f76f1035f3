"""One rank's pipeline while a Trainer runs: a worker, and what is agreed on at drains."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from sparsepipe.runtime import group
from sparsepipe.runtime.mail import in_order
from sparsepipe.runtime.stage_worker import StageWorker
from sparsepipe.schedule import Plan
from sparsepipe.strategies.pipeline.events import TRAINING, StepEvents
from sparsepipe.strategies.pipeline.layers import Share
from sparsepipe.strategies.pipeline.metrics import Metrics
from sparsepipe.strategies.pipeline.steps import ModuleSteps


class Pipeline:
    """Trains and evaluates on one rank.

    Args:
        worker: runs the schedule.
        plan: the stages and their ranks.
        rank: this one's number.
        steps: of the module.
        events: which the worker tells.
        metrics: of the module.
        share: what this rank owns.
        end: ends what this rank shares with others.

    Attributes:
        worker: as given.
    """

    def __init__(
        self,
        worker: StageWorker[Any],
        *,
        plan: Plan,
        rank: int,
        steps: ModuleSteps,
        events: StepEvents,
        metrics: Metrics,
        share: Share,
        end: Callable[[], Any],
    ) -> None:
        self.worker = worker
        self._plan = plan
        self._steps = steps
        self._events = events
        self._metrics = metrics
        self._share = share
        last = plan.num_stages - 1
        self._last_replica = plan.replica_of(rank) if plan.stage_of(rank) == last else None
        self._reads = plan.stage_of(rank) == 0
        self._end = end

    @property
    def loss(self) -> Tensor:
        """Of the last step, or minibatch, that came back to this rank."""
        return self._events.loss

    def train(self, batch: Any, arguments: tuple[Any, ...], *, count: int, number: int) -> None:
        """One Lightning step: a round of stage 0 enters."""
        self._steps.choose(TRAINING, arguments)
        self._events.begin(self.worker.rounds)
        self.worker.feed(batch, count=count, number=number)

    def drain(self) -> None:
        """Finishes what is under way; every rank then knows all that was logged.

        Every rank must call it. Does nothing if nothing ran since the last time.
        """
        if not self.worker.rounds:
            return
        self.worker.drain(self._share.statistics())
        logs = self._events.logs_of(self._exchange())
        self._events.repeater.settle(logs, hook=TRAINING)

    def evaluate(self, hook: str, batch: Any, arguments: tuple[Any, ...], *, count: int) -> None:
        """Sends a round forward; its results are known after :meth:`end_evaluation`."""
        self._steps.choose(hook, arguments)
        self._events.keep(self.worker.evaluate(batch, count=count))

    def predict(self, hook: str, batch: Any, arguments: tuple[Any, ...], *, count: int) -> Any:
        """Sends a round forward; the result of this rank's batch, None on other ranks."""
        self._steps.choose(hook, arguments)
        found = self.worker.evaluate(batch, count=count, answered=True)
        return found[-1][1] if found and self._reads else None

    def end_evaluation(self, hook: str) -> None:
        """After a loader's last batch: every rank gets all that was logged, and all metrics."""
        self.worker.end_evaluation()
        self._events.repeater.append(self._exchange(), hook=hook)

    def end(self, *, failed: bool) -> None:
        """Ends what is shared with other ranks.

        Args:
            failed: they may be gone, and nothing may wait for them.
        """
        self._metrics.attach()
        if not failed:
            self._end()

    def _exchange(self) -> list[Any]:
        """What was kept of all minibatches, in order; metrics become those of all replicas."""
        mine = self._events.take()
        replica = self._last_replica
        said = None if replica is None else (mine, self._metrics.harvest())
        everyone: list[Any] = group.gather_objects(said, what="exchanging what was logged")
        self._metrics.install([harvest for _, harvest in everyone], replica=replica)
        return in_order([logs for logs, _ in everyone])
