"""Environment variables by which a sweep informs its jobs: directory, start, command, hardware."""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, OmegaConf

from sparsepipe.cluster import Inventory
from sparsepipe.config.target import Target
from sparsepipe.utils.host import usable_cores

_DIRECTORY = "SPARSEPIPE_SWEEP_DIR"
"""Environment variable: the sweep's directory. That of a job's configuration differs if swept keys
are part of its name."""
_COMMAND = "SPARSEPIPE_SWEEP_COMMAND"
"""Environment variable: the result of :func:`command_of`, which a job's configuration lacks."""
_BEGAN = "SPARSEPIPE_SWEEP_BEGAN"
"""Environment variable: when the sweep began, in seconds since 1970."""
_THREADS = "SPARSEPIPE_SWEEP_THREADS"
"""Environment variable: the number of threads that the user has chosen, where our launcher has set
``OMP_NUM_THREADS`` for its job; jobs of other launchers have that variable alone."""
_NOT_COMMAND = ("force", "logger", "paths")


def announce(config: DictConfig) -> None:
    """Sets the variables with the directory, start and command of a sweep that begins now."""
    os.environ[_BEGAN] = repr(time.time())
    os.environ[_DIRECTORY] = str(sweep_directory(config))
    os.environ.pop(_THREADS, None)  # of a sweep whose job starts this one
    os.environ[_COMMAND] = command_of(given_overrides(config))


def sweep_directory(config: DictConfig) -> Path:
    return Path(str(config.hydra.sweep.dir)).absolute()


def given_overrides(config: DictConfig) -> list[str]:
    """The overrides of a sweep's command; what it sweeps is written there as a list."""
    given = OmegaConf.select(config, "hydra.overrides.task")
    # As they are: a value that cannot be made out is for the jobs to refuse.
    texts = OmegaConf.to_container(given, resolve=False) if OmegaConf.is_list(given) else []
    return [str(each) for each in texts] if isinstance(texts, list) else []


def command_of(overrides: Sequence[str]) -> str:
    """A short name of a sweep, by its overrides: the same whenever it is started again."""
    plain = (each.lstrip("+~") for each in overrides)
    kept = sorted(each for each in plain if not each.startswith(_NOT_COMMAND))
    return hashlib.sha256("\n".join(kept).encode()).hexdigest()[:8]


def announced(otherwise: str) -> Path:
    """The directory as the sweep has announced it, else that of a job's configuration."""
    return Path(os.environ.get(_DIRECTORY) or otherwise).absolute()


def announced_start() -> float | None:
    """When the sweep began, in seconds since 1970; None where it has not announced it."""
    text = os.environ.get(_BEGAN)
    return float(text) if text else None


def thread_variables(given: Mapping[str, str], *, otherwise: int | None = None) -> dict[str, str]:
    """The environment variable with the number of threads that the user has chosen."""
    return {_THREADS: _choice(str(given.get("OMP_NUM_THREADS", otherwise or "")))}


def announced_threads() -> str | None:
    """The number of threads that the user has chosen; None: none is chosen."""
    text = os.environ.get(_THREADS)  # by a process that may see more cores than this one
    return (_choice(os.environ.get("OMP_NUM_THREADS", "")) if text is None else text) or None


def _choice(given: str) -> str:
    return "" if given.strip() == str(usable_cores()) else given.strip()


def announced_command(otherwise: str) -> str:
    """The command as the sweep has announced it, else something that its jobs share."""
    return os.environ.get(_COMMAND) or otherwise


_VARIABLE = "SPARSEPIPE_HARDWARE"
"""Environment variable: a node of the group ``hardware`` and what that is, as JSON."""


def hardware_message(target: Target, inventory: Inventory) -> dict[str, Any]:
    """The whole machine's hardware as plain values, for :func:`announce_hardware` in a job."""
    return {"node": target.to_dict(), "inventory": yaml.safe_load(inventory.to_yaml())}


def announce_hardware(message: Mapping[str, Any] | None) -> None:
    """Passes a message to this process and those that it starts; None for no message."""
    os.environ[_VARIABLE] = "" if message is None else json.dumps(message)


def inventory_seen_by_sweep(target: Target) -> Inventory | None:
    """The inventory that a target builds on the whole machine; None unless the sweep set it."""
    text = os.environ.get(_VARIABLE)
    message = json.loads(text) if text else None
    if not message or message["node"] != target.to_dict():
        return None
    return Inventory.from_dict(message["inventory"])
