"""The process group of a run."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from sparsepipe.cluster import Inventory
from sparsepipe.planning.placing import cuda_devices, places_of_ranks
from sparsepipe.runtime.collectives import process_group
from sparsepipe.tasks.run import num_ranks


@contextlib.contextmanager
def joined(
    config: Mapping[str, Any], inventory: Inventory, *, kept: Path | None = None
) -> Iterator[None]:
    """All ranks in one group, until the block ends well.

    Args:
        config: resolved and checked.
        inventory: the hardware.
        kept: the plan with which the run has begun, if it has.
    """
    strategy = _strategy(config)
    cuda = inventory.accelerator == "cuda"
    backend = strategy.get("process_group_backend") or ("nccl" if cuda else "gloo")
    process_group.join(
        backend,
        timeout_s=_timeout_s(config),
        device=_cuda_device(config, inventory, kept) if cuda and "nccl" in backend else None,
    )
    yield
    process_group.leave()  # not after an error: it could wait for ranks that are gone


def meet(config: Mapping[str, Any]) -> None:
    """Lets ranks agree on what is to be done, before they know which devices they will have.

    Therefore over gloo; the group is left when they do know, see ``renumber``.

    Args:
        config: resolved and checked.
    """
    process_group.join("gloo", timeout_s=_timeout_s(config))


def _strategy(config: Mapping[str, Any]) -> Mapping[str, Any]:
    return config["parallel"]["strategy"] or {}


def _timeout_s(config: Mapping[str, Any]) -> float:
    return float(_strategy(config).get("timeout_s", 300.0))


def _cuda_device(config: Mapping[str, Any], inventory: Inventory, kept: Path | None) -> Any:
    """This rank's, as the Trainer will have it."""
    import torch

    nodes = config["parallel"]["num_nodes"]
    places = places_of_ranks(config, inventory, ranks=num_ranks(config, inventory), kept=kept)
    indices = cuda_devices(places, inventory, rank=process_group.rank(), nodes=nodes)
    return torch.device("cuda", indices[process_group.local_rank()])
