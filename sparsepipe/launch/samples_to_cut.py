"""Refuses more microbatches than a minibatch has samples, and fewer than a stage has devices."""

from __future__ import annotations

from pathlib import Path

from sparsepipe.config.division import division_of
from sparsepipe.config.recomputation import synchronous_stages_of
from sparsepipe.config.run_spec import RunSpec
from sparsepipe.config.schema import MICROBATCHES_KEY, SearchChoice
from sparsepipe.errors import ConfigError
from sparsepipe.partition.memory.microbatches import check_microbatches
from sparsepipe.tasks.train import train

_ONE_EACH = ("straight", "variance")
"""Searches for plans in which each device is a stage."""


def refuse_few_microbatches(spec: RunSpec, *, kept: Path | None = None) -> None:
    """Refuses fewer microbatches than a stage has devices, where a plan tells these.

    Args:
        spec: the configuration.
        kept: the plan that the run has, if it has one already.

    Raises:
        ConfigError: some of these would have nothing to do; or there is no such number of parts.
    """
    synchronous = spec.parallel.synchronous
    if synchronous is not None:
        division = division_of(spec, kept=kept)
        replicas = None if division is None else division.replicas
        check_microbatches(synchronous.microbatches, replicas or (), name=MICROBATCHES_KEY)


def refuse_empty_microbatches(spec: RunSpec, *, ranks: int, kept: Path | None = None) -> None:
    """Refuses microbatches of a training of which some are empty in every step.

    Before a search has found the plan, they are refused where no plan could fill them all.

    Args:
        spec: the configuration.
        ranks: of the run.
        kept: the plan that the run has, if it has one already.

    Raises:
        ConfigError: a device of the first stage reads fewer samples than it cuts them into.
    """
    synchronous, samples = spec.parallel.synchronous, spec.data.get("batch_size")
    if synchronous is None or not isinstance(samples, int) or not _trains_on_data(spec):
        return
    settled = kept is not None and kept.exists()
    division = division_of(spec, kept=kept)
    search = None if settled else spec.search
    plan = None if division is None else division.config
    readers = int((plan or "1").split("-")[0]) if search is None else _most(search, spec, ranks)
    if synchronous.microbatches <= samples * readers:
        return
    most = "" if readers == 1 else f" on each of {readers} devices"
    raise ConfigError(
        f"data.batch_size={samples}{most} gives {samples * readers} samples, and "
        f"{MICROBATCHES_KEY}={synchronous.microbatches} are to be cut of them: some "
        "would be empty in every step",
        remedy=f"set {MICROBATCHES_KEY} to {samples * readers} or fewer "
        "(data.batch_size times the devices of the first stage), or take larger batches",
    )


def _most(search: SearchChoice, spec: RunSpec, ranks: int) -> int:
    """Devices that the first stage of a plan of a search has at most."""
    if search.search in _ONE_EACH:
        return 1
    stages = synchronous_stages_of(spec.parallel, {})
    others = 0 if stages is None else max(0, stages.stages_told - 1)  # a device each at least
    return max(1, ranks - others)


def _trains_on_data(spec: RunSpec) -> bool:
    """Emulated trainings have the batches of their profiles."""
    return spec.task.locate() is train and spec.emulation is None
