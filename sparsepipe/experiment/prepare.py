"""What is settled before ranks exist: the checkpoint, the data, the run's directory."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sparsepipe.cluster import Inventory
from sparsepipe.experiment.build import build_data
from sparsepipe.experiment.checkpoints import find_checkpoint
from sparsepipe.experiment.evaluate import checkpoint_to_evaluate, evaluate
from sparsepipe.experiment.run import num_ranks
from sparsepipe.experiment.rundir import RunDir, file_fingerprint, run_dir
from sparsepipe.experiment.signature import locate


def prepare(config: Mapping[str, Any], inventory: Inventory) -> RunDir:
    """Prepares the data and finds the run's directory.

    Done before ranks exist, so that none of them waits for a cache to be built. What can be
    refused without data is refused first, since a cache may take hours.

    Raises:
        SparsePipeError: a device, a checkpoint, a setting of the data or the data themselves
            cannot be used.
    """
    ranks = num_ranks(config, inventory)
    checkpoint = _checkpoint(config)
    prepare_task = getattr(locate(config["task"]["_target_"]), "prepare", _prepare_data)
    return run_dir(
        config,
        inventory=inventory,
        ranks=ranks,
        data_fingerprint=prepare_task(config, inventory),
        checkpoint_fingerprint=None if checkpoint is None else file_fingerprint(checkpoint),
    )


def _prepare_data(config: Mapping[str, Any], inventory: Inventory) -> str:
    """Makes the data ready; what they hold. A task's own ``prepare`` takes its place."""
    data = build_data(config)
    data.prepare_data()
    fingerprint = getattr(data, "fingerprint", None)
    # The settings are in the identity anyway; where the data lie is all that is left.
    return str(fingerprint() if fingerprint else config["data"].get("root"))


def _checkpoint(config: Mapping[str, Any]) -> Path | None:
    if locate(config["task"]["_target_"]) is evaluate:
        return checkpoint_to_evaluate(config)
    named = config["checkpoint"]
    return None if named is None else find_checkpoint(named)
