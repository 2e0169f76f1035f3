"""Profiles that a training lacks: runs of ``task=profile`` of their own, before it begins.

Their identity holds what matters to a profile only, so that a later training of the same model
on the same hardware finds them finished, whatever its seed, optimizer or search.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from sparsepipe.experiment.compose import config_dir
from sparsepipe.experiment.schema import Measuring
from sparsepipe.machine import usable_cores
from sparsepipe.profiling import Profile

log = logging.getLogger(__name__)

_NAME = "profiles"
_THREADS = "OMP_NUM_THREADS"


def measure_devices(
    names: Sequence[str], config: Mapping[str, Any], how: Measuring, *, ranks: int
) -> dict[str, tuple[Profile, Path]]:
    """A profile of each of some devices of this machine, and its file.

    Args:
        names: of the devices.
        config: of the training.
        how: long they are measured.
        ranks: of the training, which share the cores.

    Raises:
        SparsePipeError: what ended the run that measures.
        Stopped: a signal did.
    """
    from sparsepipe.experiment.job import run_job  # which settles plans

    found = {}
    for name in names:
        log.info("no profile of %s is given: measuring it, or taking up what was measured", name)
        with _threads_as_in_training(ranks):
            directory = run_job(profile_config(config, name, how), fresh_processes=True)
        path = directory.path / "profile.json"
        log.info("profile of %s: %s", name, path)
        found[name] = (Profile.load(path), path)
    return found


def profile_config(config: Mapping[str, Any], device: str, how: Measuring) -> dict[str, Any]:
    """A configuration that measures a device, of what matters to that only."""
    strategy = config["parallel"]["strategy"] or {}
    return {
        **alone(config),
        "task": {
            **_group("task/profile"),
            **asdict(how),
            "layers": strategy.get("layers"),
            "device": device,
        },
    }


def alone(config: Mapping[str, Any]) -> dict[str, Any]:
    """The model, data, backend and hardware of a configuration, all else by default."""
    return {
        **config,
        "name": _NAME,
        "seed": 0,
        "force": False,
        "checkpoint": None,
        "callbacks": {},
        "logger": {},
        "parallel": _group("parallel/single"),
        "optim": _group("optim/sgd"),
        "trainer": {**_group("trainer/default"), "max_epochs": None},
    }


def _group(name: str) -> dict[str, Any]:
    value = OmegaConf.to_container(OmegaConf.load(config_dir() / f"{name}.yaml"))
    assert isinstance(value, dict)
    return {str(key): item for key, item in value.items()}


@contextmanager
def _threads_as_in_training(ranks: int) -> Iterator[None]:
    """Lets a process that is alone have the threads that it would have beside the others."""
    if _THREADS in os.environ:
        yield
        return
    os.environ[_THREADS] = str(max(1, usable_cores() // ranks))
    try:
        yield
    finally:
        del os.environ[_THREADS]
