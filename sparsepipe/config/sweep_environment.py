"""Environment variables that pass a sweep's directory, start, command and hardware to its jobs."""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from sparsepipe.cluster import Inventory
from sparsepipe.config.target import Target
from sparsepipe.utils.host import usable_cores

DIRECTORY = "SPARSEPIPE_SWEEP_DIR"
"""Environment variable: the sweep's directory. A job's configuration has another one if the
directory's name contains swept keys."""
COMMAND = "SPARSEPIPE_SWEEP_COMMAND"
"""Environment variable: the sweep's :func:`command_of`, which a job's configuration lacks."""
BEGAN = "SPARSEPIPE_SWEEP_BEGAN"
"""Environment variable: when the sweep began, in seconds since 1970."""
_THREADS = "SPARSEPIPE_SWEEP_THREADS"
"""Environment variable: the number of threads that the user has chosen. Our launcher sets it, since
it changes ``OMP_NUM_THREADS``; other launchers leave the user's value there."""
_HARDWARE = "SPARSEPIPE_HARDWARE"
"""Environment variable: a node of the group ``hardware`` and its inventory, as JSON."""
_NOT_COMMAND = ("force", "logger", "paths")


def announce(config: DictConfig) -> None:
    """Sets the variables with the directory, start and command of a sweep that begins now."""
    os.environ[BEGAN] = repr(time.time())
    os.environ[DIRECTORY] = str(sweep_directory(config))
    os.environ.pop(_THREADS, None)  # set if a job of another sweep starts this one
    os.environ[COMMAND] = command_of(given_overrides(config))


def sweep_directory(config: DictConfig) -> Path:
    """The absolute directory of a sweep, from its configuration."""
    return Path(str(config.hydra.sweep.dir)).absolute()


def given_overrides(config: DictConfig) -> list[str]:
    """The overrides of a sweep's command, such as ``seed=0,1``."""
    given = OmegaConf.select(config, "hydra.overrides.task")
    # Unresolved: the jobs refuse values that cannot be resolved.
    texts = OmegaConf.to_container(given, resolve=False) if OmegaConf.is_list(given) else []
    return [str(each) for each in texts] if isinstance(texts, list) else []


def command_of(overrides: Sequence[str]) -> str:
    """A short name of a sweep: a hash of its overrides except those of force, logger and paths."""
    plain = (each.lstrip("+~") for each in overrides)
    kept = sorted(each for each in plain if not each.startswith(_NOT_COMMAND))
    return hashlib.sha256("\n".join(kept).encode()).hexdigest()[:8]


def thread_variables(given: Mapping[str, str], *, otherwise: int | None = None) -> dict[str, str]:
    """The variable that passes OMP_NUM_THREADS of ``given``, else ``otherwise``, to jobs."""
    return {_THREADS: _choice(str(given.get("OMP_NUM_THREADS", otherwise or "")))}


def announced_threads() -> str | None:
    """The number of threads that the user has chosen, as text; None: no choice, or all cores."""
    text = os.environ.get(_THREADS)  # set by a process that may see more cores
    return (_choice(os.environ.get("OMP_NUM_THREADS", "")) if text is None else text) or None


def _choice(given: str) -> str:
    return "" if given.strip() == str(usable_cores()) else given.strip()


def announce_hardware(message: Mapping[str, Any] | None) -> None:
    """Passes the whole machine's hardware to this process and those that it starts.

    Args:
        message: the ``node`` of the group ``hardware`` and its ``inventory``, as plain values;
            None: processes find the hardware themselves.
    """
    os.environ[_HARDWARE] = "" if message is None else json.dumps(message)


def inventory_seen_by_sweep(target: Target) -> Inventory | None:
    """The inventory that ``target`` builds on the whole machine; None unless a sweep passed it."""
    text = os.environ.get(_HARDWARE)
    message = json.loads(text) if text else None
    if not message or message["node"] != target.to_dict():
        return None
    return Inventory.from_dict(message["inventory"])
