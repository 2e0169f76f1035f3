"""Profiles and bandwidths that a training lacks: runs of their own, before it begins.

Their identity holds only what matters to what they measure, so that a later training of the same
model on the same hardware finds them finished, whatever its seed, optimizer or search.
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
from sparsepipe.results.files import read_json

log = logging.getLogger(__name__)

_PROFILES, _LINKS = "profiles", "links"
_MESSAGES = {"sizes_bytes": [2**20, 2**23], "repeats": 5, "warmups": 1, "most_s": 1.0}
"""As large as activations are, and not for long."""
_NOT_OF_LINKS = ("model", "data", "backend", "optim", "trainer")
_PRECISION = "32-true"
_SINGLE = (_PRECISION, "32", 32, None)
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
    if names and (precision := config["trainer"]["precision"]) not in _SINGLE:
        log.warning("layers are measured in float32, and trained in %s", precision)
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
        **_alone(config, name=_PROFILES),
        "task": {
            **_group("task/profile"),
            **asdict(how),
            "layers": strategy.get("layers"),
            "device": device,
        },
        "trainer": {**config["trainer"], "precision": _PRECISION},
    }


def measure_link(config: Mapping[str, Any]) -> tuple[float, Path]:
    """Bytes/s between the devices of this machine, and the file that says so.

    Args:
        config: of the training.

    Raises:
        SparsePipeError: what ended the run that measures.
        Stopped: a signal did.
    """
    from sparsepipe.experiment.job import run_job  # which settles plans

    log.info("no bandwidth is given: measuring it, or taking up what was measured")
    path = run_job(link_config(config), fresh_processes=True).path / "bandwidth.json"
    (link,) = read_json(path)["hosts"].values()
    log.info("bandwidth %.4g MB/s: %s", link["bytes_per_s"] / 1e6, path)
    return float(link["bytes_per_s"]), path


def link_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """A configuration that times messages between all devices, whatever is trained on them."""
    strategy = config["parallel"]["strategy"] or {}
    return {
        **_alone(config, name=_LINKS),
        "task": {
            **_group("task/bandwidth"),
            **_MESSAGES,
            "direct": strategy.get("direct", False),
        },
        "parallel": {**_group("parallel/single"), "strategy": strategy},  # for its backend
        **{name: {"_target_": "none"} for name in _NOT_OF_LINKS},
        "representation": "sparse",
    }


def _alone(config: Mapping[str, Any], *, name: str) -> dict[str, Any]:
    """A configuration without what is of the training and not of what it trains."""
    return {
        **config,
        "name": name,
        "seed": 0,
        "force": False,
        "checkpoint": None,
        "callbacks": {},
        "logger": {},
        "parallel": _group("parallel/single"),
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
