"""The process group of a run."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sparsepipe.cluster import Inventory
from sparsepipe.config.run_spec import RunSpec
from sparsepipe.planning.placing import cuda_devices, places_of_ranks
from sparsepipe.runtime.collectives import process_group
from sparsepipe.tasks.run import num_ranks


@contextlib.contextmanager
def joined(spec: RunSpec, inventory: Inventory, *, kept: Path | None = None) -> Iterator[None]:
    """All ranks in one group, until the block ends well.

    Args:
        spec: the configuration.
        inventory: the hardware.
        kept: the plan with which the run has begun, if it has.
    """
    cuda = inventory.accelerator == "cuda"
    backend = spec.parallel.argument("process_group_backend") or ("nccl" if cuda else "gloo")
    process_group.join(
        backend,
        timeout_s=_timeout_s(spec),
        device=_cuda_device(spec, inventory, kept) if cuda and "nccl" in backend else None,
    )
    yield
    process_group.leave()  # not after an error: it could wait for ranks that are gone


def meet(spec: RunSpec) -> None:
    """Lets ranks agree on what is to be done, before they know which devices they will have.

    Therefore over gloo; the group is left when they do know, see ``renumber``.

    Args:
        spec: the configuration.
    """
    process_group.join("gloo", timeout_s=_timeout_s(spec))


def _timeout_s(spec: RunSpec) -> float:
    return float(spec.parallel.argument("timeout_s", 300.0))


def _cuda_device(spec: RunSpec, inventory: Inventory, kept: Path | None) -> Any:
    """This rank's, as the Trainer will have it."""
    import torch

    nodes = spec.parallel.num_nodes
    places = places_of_ranks(spec, inventory, ranks=num_ranks(spec, inventory), kept=kept)
    indices = cuda_devices(places, inventory, rank=process_group.rank(), nodes=nodes)
    return torch.device("cuda", indices[process_group.local_rank()])
