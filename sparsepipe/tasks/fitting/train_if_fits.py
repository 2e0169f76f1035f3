"""The task ``train_if_fits``: trains where a step fits into a budget of memory, else says so."""

from __future__ import annotations

import logging
from typing import Annotated, Any, Literal

from sparsepipe.config.schema import Limits
from sparsepipe.tasks.fitting.prober import Probe, Prober
from sparsepipe.tasks.result import write_result
from sparsepipe.tasks.run import Run
from sparsepipe.tasks.train import train_with

log = logging.getLogger(__name__)


def train_if_fits(
    run: Run,
    *,
    budget_bytes: Annotated[float, Limits(1, 1e15)] | None = None,
    steps: Annotated[int, Limits(1, 1000)] = 2,
    timeout_s: Annotated[float, Limits(1, 1e6)] = 600.0,
    isolated: bool = True,
    warmup_batches: Annotated[int, Limits(0, 1_000_000)] = 2,
    timed_batches: Annotated[int, Limits(1, 1_000_000)] = 20,
    test: bool = True,
    monitor: str | None = None,
    mode: Literal["max", "min"] = "max",
    gallery: int = 24,
) -> None:
    """Takes a few training steps first, as ``task=fit_batch`` does.

    Where they do not fit, the run is finished, and its result says ``fits: false``; nothing is
    trained. Else it is a training that measures also how fast the network infers.

    What the settings say, :class:`~sparsepipe.tasks.fitting.prober.Prober` tells of the steps,
    :func:`~sparsepipe.tasks.evaluate.evaluate` of the forwards and
    :func:`~sparsepipe.tasks.train.train` of the others.

    Raises:
        ConfigError: the run has several processes; and what a training raises.
        HardwareError: nobody knows what memory there is.
        SparsePipeError: the steps take too long, are killed, or end for another reason than memory.
        Stopped: a signal ended it.
    """
    run.assert_one_rank()
    prober = Prober(
        run, budget_bytes=budget_bytes, steps=steps, timeout_s=timeout_s, isolated=isolated
    )
    found = prober.probe(int(run.spec.data.arguments["batch_size"]))
    told = {**_told(found), **prober.values}
    if not found.fits:
        log.info("a training step does not fit (%s): nothing is trained", found.outcome)
        write_result(run, told)
        return
    forwards = {"warmup": warmup_batches, "timed": timed_batches}
    train_with(
        run, test=test, monitor=monitor, mode=mode, gallery=gallery, forwards=forwards, told=told
    )


def _told(found: Probe) -> dict[str, Any]:
    """Of a ``result.json``: whether the steps fit."""
    return {
        "fits": found.fits,
        "limited_by": None if found.fits else found.outcome,
        "step_memory_bytes": found.memory_bytes,
    }


# A limit ends a run or leaves it as it is.
train_if_fits.alone = True  # type: ignore[attr-defined]
train_if_fits.not_identity = ("task.isolated", "task.timeout_s")  # type: ignore[attr-defined]
