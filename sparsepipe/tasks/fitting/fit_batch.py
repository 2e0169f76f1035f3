"""The task ``fit_batch``: the largest batch whose training step fits into a memory budget."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, ClassVar

from pydantic import Field

from sparsepipe.config.build import build_data
from sparsepipe.errors import ConfigError
from sparsepipe.tasks.fitting.prober import Prober
from sparsepipe.tasks.presentation import num_shapes
from sparsepipe.tasks.result import write_result
from sparsepipe.tasks.task import ResolvedRun, Task

log = logging.getLogger(__name__)

Size = Annotated[int, Field(ge=1, le=2**31)]


@dataclass(frozen=True, slots=True, kw_only=True)
class FitBatch(Task):
    """Searches by doubling, then by bisection, for the largest batch whose training step fits.

    Each size is tried with a few training steps on real batches of the training split: forward,
    backward and update, in a fresh process unless ``isolated`` is false. The outcomes are kept in
    ``probes.json``, so that an interrupted search can continue. No batch is larger than the data;
    if their number of shapes is unknown, a size of which they have no full batch does not fit.

    ``conf/task/fit_batch.yaml`` describes the settings.
    """

    alone: ClassVar[bool] = True
    # The answer does not depend on the batch size, length and threads of the later training; a
    # time limit ends a search or has no effect.
    not_identity: ClassVar[tuple[str, ...]] = (
        "data.batch_size",
        "task.isolated",
        "task.timeout_s",
        "threads",
        *(f"trainer.{name}" for name in ("max_epochs", "max_steps", "limit_train_batches")),
        *(f"trainer.{name}" for name in ("limit_val_batches", "limit_test_batches")),
    )

    budget_bytes: Annotated[float, Field(ge=1, le=1e15)] | None = None
    start: Size = 8
    most: Size = 4096
    precision: Annotated[float, Field(ge=0, le=1)] = 0.0
    steps: Annotated[int, Field(ge=1, le=1000)] = 2
    timeout_s: Annotated[float, Field(ge=1, le=1e6)] = 600.0
    isolated: bool = True

    def run(self, run: ResolvedRun) -> None:
        """Searches for the largest batch size, and writes it to ``result.json``."""
        if "batch_size" not in run.spec.data.arguments:
            raise ConfigError(
                "data has no batch_size, but task=fit_batch searches for its largest value",
                remedy="give the data module an argument batch_size, and set batch_size in its "
                "file in the config group data",
            )
        prober = Prober(
            run,
            budget_bytes=self.budget_bytes,
            steps=self.steps,
            timeout_s=self.timeout_s,
            isolated=self.isolated,
            whole=True,
        )
        data = build_data(run.spec)
        data.setup("fit")
        shapes = num_shapes(data.train_dataloader())  # 0: unknown
        top = min(self.most, shapes or self.most)
        found = largest_that_fits(
            lambda size: prober.probe(size).fits,
            most=top,
            start=self.start,
            precision=self.precision,
        )
        if found.refused is None:
            limit = "data" if top == shapes else "most"
        else:
            outcome = prober.probe(found.refused).outcome
            limit = "data" if outcome == "too_few_shapes" else outcome
        log.info("largest batch that fits: %d (limit: %s)", found.largest, limit.replace("_", " "))
        largest = prober.probe(found.largest) if found.largest else None
        values = {
            "largest_batch": found.largest,
            "refused_batch": None if limit == "data" else found.refused,
            "limited_by": limit,
            "step_memory_bytes": None if largest is None else largest.memory_bytes,
        }
        write_result(run, {**values, **prober.values})


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """The result of a search.

    Attributes:
        largest: the largest size that was found to fit; 0: none did.
        refused: the smallest size that was found not to fit; None: all that were tried fit.
    """

    largest: int
    refused: int | None


def largest_that_fits(
    fits: Callable[[int], bool], *, most: int, start: int = 1, precision: float = 0.0
) -> Found:
    """Doubles the size from ``start``, up to ``most``, until it does not fit, then bisects.

    The sizes depend only on what ``fits`` returns, so a search with stored answers continues where
    it ended. Even if fitting is not monotonic, ``largest`` fits and ``refused`` does not. They
    differ by at most the share ``precision`` of ``largest``, or by 1.
    """
    low, high = 0, None
    size = min(start, most)
    while high is None and low < most:
        if fits(size):
            low, size = size, min(2 * size, most)
        else:
            high = size
    while high is not None and high - low > max(1, int(precision * low)):
        middle = (low + high) // 2
        if fits(middle):
            low = middle
        else:
            high = middle
    return Found(largest=low, refused=high)
