"""The task ``fit_batch``: the largest batch whose training step fits into a budget of memory."""

from __future__ import annotations

import logging
from typing import Annotated, Any

from sparsepipe.config.build import build_data
from sparsepipe.config.run_spec import RunSpec
from sparsepipe.config.schema import Limits
from sparsepipe.errors import ConfigError
from sparsepipe.tasks.fitting.prober import Prober
from sparsepipe.tasks.fitting.search import Found, largest_that_fits
from sparsepipe.tasks.log_lines import num_shapes
from sparsepipe.tasks.result import write_result
from sparsepipe.tasks.run import Run

log = logging.getLogger(__name__)

Size = Annotated[int, Limits(1, 2**31)]


def fit_batch(
    run: Run,
    *,
    budget_bytes: Annotated[float, Limits(1, 1e15)] | None = None,
    start: Size = 8,
    most: Size = 4096,
    precision: Annotated[float, Limits(0, 1)] = 0.0,
    steps: Annotated[int, Limits(1, 1000)] = 2,
    timeout_s: Annotated[float, Limits(1, 1e6)] = 600.0,
    isolated: bool = True,
) -> None:
    """Searches by doubling, then by bisection; every size is tried by training steps of its own.

    Each trial, a fresh process unless ``isolated`` is false, trains on real batches of the training
    split, forward, backward and update. Its answers are kept in ``probes.json``, so that a search
    that was ended goes on. Of data that do not tell how many shapes there are it ends where they
    have no batch of the size; of others no batch is larger than they are.

    What the settings say, :class:`~sparsepipe.tasks.fitting.prober.Prober` tells of trials and
    :func:`~sparsepipe.tasks.fitting.search.largest_that_fits` of the search.

    Raises:
        ConfigError: the run has several processes, or data without a batch size.
        HardwareError: nobody knows what memory there is.
        SparsePipeError: a trial takes too long, is killed, or ends for another reason than memory.
        Stopped: a signal ended it.
    """
    run.assert_one_rank()
    _check(run.spec)
    prober = Prober(
        run,
        budget_bytes=budget_bytes,
        steps=steps,
        timeout_s=timeout_s,
        isolated=isolated,
        whole=True,
    )
    shapes = _shapes(run)
    top = min(most, shapes or most)
    found = largest_that_fits(
        lambda size: prober.probe(size).fits, most=top, start=start, precision=precision
    )
    limit = _limit(found, prober, limited_by_data=top == shapes)
    log.info("largest batch that fits: %d (next: %s)", found.largest, limit.replace("_", " "))
    write_result(run, {**_values(found, prober, limit), **prober.values})


# How large batches are trained on in the end, for how long and by how many threads does not matter
# to it; a limit ends a search or leaves it as it is.
fit_batch.alone = True  # type: ignore[attr-defined]
fit_batch.not_identity = (  # type: ignore[attr-defined]
    "data.batch_size",
    "task.isolated",
    "task.timeout_s",
    "threads",
    *(f"trainer.{name}" for name in ("max_epochs", "max_steps", "limit_train_batches")),
    *(f"trainer.{name}" for name in ("limit_val_batches", "limit_test_batches")),
)


def _check(spec: RunSpec) -> None:
    if "batch_size" not in spec.data.arguments:
        raise ConfigError(
            "data has no batch_size whose largest value could be searched for",
            remedy="give the data module an argument of this name, and the data group its key",
        )


def _shapes(run: Run) -> int:
    """Of the training split; 0 where it does not tell."""
    data = build_data(run.spec)
    data.setup("fit")
    return num_shapes(data.train_dataloader())


def _values(found: Found, prober: Prober, limit: str) -> dict[str, Any]:
    largest = prober.probe(found.largest) if found.largest else None
    return {
        "largest_batch": found.largest,
        "refused_batch": None if limit == "data" else found.refused,
        "limited_by": limit,
        "step_memory_bytes": None if largest is None else largest.memory_bytes,
    }


def _limit(found: Found, prober: Prober, *, limited_by_data: bool) -> str:
    """Why no larger batch was found: the outcome of the next, the data, or ``most``."""
    if found.refused is None:
        return "data" if limited_by_data else "most"
    outcome = prober.probe(found.refused).outcome
    return "data" if outcome == "too_few_shapes" else outcome
