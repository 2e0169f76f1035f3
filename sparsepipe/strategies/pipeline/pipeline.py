"""One rank's pipeline while a Trainer runs: a worker, and what is agreed on at drains."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytorch_lightning as pl
import torch
from torch import Tensor

from sparsepipe.runtime import group
from sparsepipe.runtime.mail import in_order
from sparsepipe.runtime.worker import Worker
from sparsepipe.schedule import Plan
from sparsepipe.strategies.pipeline.layers import Share
from sparsepipe.strategies.pipeline.logs import Logs, Repeater
from sparsepipe.strategies.pipeline.metrics import Metrics
from sparsepipe.strategies.pipeline.steps import ModuleSteps
from sparsepipe.strategies.pipeline.updates import Updates

_TRAINING = "training_step"


class Pipeline:
    """Trains and evaluates on one rank.

    Args:
        module: the LightningModule, reduced to this rank's share.
        plan: the stages and their ranks.
        rank: this one's number.
        steps: of the module.
        metrics: of the module.
        share: what this rank owns.
        updates: applies gradients; None where nothing is trained.
        before_backward: is told the loss.
        end: ends what this rank shares with others.
    """

    def __init__(
        self,
        module: pl.LightningModule,
        *,
        plan: Plan,
        rank: int,
        steps: ModuleSteps,
        metrics: Metrics,
        share: Share,
        updates: Updates | None,
        before_backward: Callable[[Tensor], Any],
        end: Callable[[], Any],
    ) -> None:
        self._module = module
        self._plan = plan
        self._steps = steps
        self._metrics = metrics
        self._share = share
        self._repeater = Repeater(module)
        self._mine: list[tuple[int, Logs]] = []
        last = plan.num_stages - 1
        self._last_replica = plan.replica_of(rank) if plan.stage_of(rank) == last else None
        self._worker: Worker | None = None
        self._updates = updates
        self._before_backward = before_backward
        self._end = end
        self.loss = torch.zeros((), device=module.device)

    def attach(self, worker: Worker) -> None:
        """Sets the worker, which is told of this object when it is made."""
        self._worker = worker

    @property
    def worker(self) -> Worker:
        """Runs the schedule."""
        assert self._worker is not None
        return self._worker

    def train(self, batch: Any, arguments: tuple[Any, ...], *, count: int, number: int) -> None:
        """One Lightning step: a round of stage 0 enters."""
        self._steps.choose(_TRAINING, arguments)
        assert self._updates is not None
        self._updates.note(self.worker.minibatches // self._plan.replicas(0))
        self.worker.feed(batch, count=count, number=number)

    def before_backward(self, loss: Tensor) -> None:
        """Runs the hooks for it."""
        self._before_backward(loss)

    def update(self, gradients: Mapping[str, Tensor | None], *, step: int) -> None:
        """Applies gradients."""
        assert self._updates is not None
        self._updates.apply(gradients, loss=self.loss, step=step)

    def done(self, minibatch: int, *, loss: Tensor, logs: Logs) -> None:
        """Shows what a minibatch logged, for now."""
        self.loss = loss
        if self._last_replica is not None:
            self._mine.append((minibatch, logs))
        self._repeater.show(logs, hook=_TRAINING)

    def drain(self) -> None:
        """Finishes what is under way; every rank then knows all that was logged.

        Every rank must call it. Does nothing if nothing ran since the last time.
        """
        if not self.worker.minibatches:
            return
        self.worker.drain(self._share.statistics())
        self._repeater.settle(self._exchange(), hook=_TRAINING)

    def evaluate(self, hook: str, batch: Any, arguments: tuple[Any, ...], *, count: int) -> None:
        """Sends a round forward; its results are known after :meth:`end_evaluation`."""
        self._steps.choose(hook, arguments)
        found = self.worker.evaluate(batch, count=count)
        if self._last_replica is not None:
            self._mine += found

    def predict(self, hook: str, batch: Any, arguments: tuple[Any, ...], *, count: int) -> Any:
        """Sends a round forward; the result of this rank's batch, None on other ranks."""
        self._steps.choose(hook, arguments)
        found = self.worker.evaluate(batch, count=count, answered=True)
        return found[-1][1] if found and self._reads else None

    def end_evaluation(self, hook: str) -> None:
        """After a loader's last batch: every rank gets all that was logged, and all metrics."""
        self.worker.end_evaluation()
        self._repeater.append(self._exchange(), hook=hook)

    def end(self, *, failed: bool) -> None:
        """Ends what is shared with other ranks.

        Args:
            failed: they may be gone, and nothing may wait for them.
        """
        self._metrics.attach()
        if not failed:
            self._end()

    @property
    def _reads(self) -> bool:
        return self._plan.stage_of(group.rank()) == 0

    def _exchange(self) -> list[Logs]:
        """What all minibatches logged, in order; metrics become those of all replicas."""
        mine, self._mine = self._mine, []
        replica = self._last_replica
        said = None if replica is None else (mine, self._metrics.harvest())
        everyone: list[Any] = group.gather_objects(said, what="exchanging what was logged")
        self._metrics.install([harvest for _, harvest in everyone], replica=replica)
        return in_order([logs for logs, _ in everyone])
