"""The task ``train_if_fits``: trains if a step fits into a memory budget."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Annotated, ClassVar

from pydantic import Field

from sparsepipe.tasks.fitting.prober import Prober
from sparsepipe.tasks.result import write_result
from sparsepipe.tasks.task import ResolvedRun
from sparsepipe.tasks.train import Train

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainIfFits(Train):
    """Trains if a few training steps fit into a memory budget, and measures inference.

    If they do not fit, the run ends as finished, and its result has ``fits: false``. The budget is
    that of :class:`~sparsepipe.tasks.fitting.prober.Prober`; inference is timed over
    ``timed_batches`` forward passes after ``warmup_batches`` others.
    """

    alone: ClassVar[bool] = True
    # A time limit ends a run or has no effect.
    not_identity: ClassVar[tuple[str, ...]] = ("task.isolated", "task.timeout_s")

    budget_bytes: Annotated[float, Field(ge=1, le=1e15)] | None = None
    steps: Annotated[int, Field(ge=1, le=1000)] = 2
    timeout_s: Annotated[float, Field(ge=1, le=1e6)] = 600.0
    isolated: bool = True
    warmup_batches: Annotated[int, Field(ge=0, le=1_000_000)] = 2
    timed_batches: Annotated[int, Field(ge=1, le=1_000_000)] = 20

    def run(self, run: ResolvedRun) -> None:
        """Takes a few training steps, as ``task=fit_batch`` does, then trains if they fit."""
        prober = Prober(
            run,
            budget_bytes=self.budget_bytes,
            steps=self.steps,
            timeout_s=self.timeout_s,
            isolated=self.isolated,
        )
        found = prober.probe(int(run.spec.data.arguments["batch_size"]))
        values = {
            "fits": found.fits,
            "limited_by": None if found.fits else found.outcome,
            "step_memory_bytes": found.memory_bytes,
            **prober.values,
        }
        if not found.fits:
            log.info("a training step does not fit (%s): nothing is trained", found.outcome)
            write_result(run, values)
            return
        forwards = {"warmup": self.warmup_batches, "timed": self.timed_batches}
        self.train(run, forwards=forwards, more=values)
