"""Run directories: named by what a run is, so that the same run is never done twice.

``outputs/<experiment>/<run id>/`` holds ``config.yaml``, ``metrics.csv``, ``result.json``,
checkpoints and figures; ``DONE.json`` is written last.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from sparsepipe.cluster import Inventory
from sparsepipe.config.division import division_of
from sparsepipe.config.outputs import expanded
from sparsepipe.config.plan_search import searched_plan_of
from sparsepipe.config.recomputation import (
    is_automatic,
    memory_settings,
    settled_recompute,
)
from sparsepipe.config.signature import identity_name, locate, present_name
from sparsepipe.errors import ConfigError, DataError
from sparsepipe.results.files import read_json, write_json, write_text_atomic

_NOT_IDENTITY = (
    "data.cache_dir",
    "data.cache_workers",
    "data.lock_wait_s",
    "data.num_workers",
    "data.root",
    "force",
    "hardware",
    "logger",
    "name",
    "objective",
    "parallel.devices",
    "parallel.grace_s",
    "parallel.max_restarts",
    "parallel.plan",
    "parallel.search",
    "parallel.strategy.timeout_s",
    "paths",
    "tags",
    "task.gallery",
    "trainer.enable_autolog_hparams",
    "trainer.enable_model_summary",
    "trainer.enable_progress_bar",
    "trainer.log_every_n_steps",
    "trainer.profiler",
)
"""Keys that do not change what a run computes, or that a fingerprint, the number of ranks, the
plan or the search stands for."""

_ATTEMPT, _STARTS = ".attempt", ".starts"


@dataclass(frozen=True, slots=True)
class RunDir:
    """A run's directory.

    Args:
        path: absolute.
    """

    path: Path

    @property
    def run_id(self) -> str:
        """The run's identity."""
        return self.path.name

    @property
    def config(self) -> Path:
        """The resolved configuration."""
        return self.path / "config.yaml"

    @property
    def metrics(self) -> Path:
        """One row an epoch."""
        return self.path / "metrics.csv"

    @property
    def result(self) -> Path:
        """What came out, flat."""
        return self.path / "result.json"

    @property
    def plan(self) -> Path:
        """How a pipeline splits the network, from its first training step on."""
        return self.path / "plan.json"

    @property
    def plan_table(self) -> Path:
        """A plan that was searched for, as a table to read."""
        return self.path / "plan.txt"

    @property
    def plan_figures(self) -> Path:
        """A plan that was searched for, with what to expect of each stage."""
        return self.path / "plan.csv"

    @property
    def shares(self) -> Path:
        """Where the costs of the layers lie, and the cuts of a plan that was searched for."""
        return self.path / "shares.png"

    @property
    def confusion(self) -> Path:
        """How many test shapes of which class were taken for which."""
        return self.path / "confusion.csv"

    @property
    def done(self) -> Path:
        """Exists once the run is finished."""
        return self.path / "DONE.json"

    @property
    def checkpoints(self) -> Path:
        """Directory of checkpoints."""
        return self.path / "checkpoints"

    @property
    def last(self) -> Path:
        """The checkpoint to go on from."""
        return self.checkpoints / "last.ckpt"

    @property
    def best(self) -> Path:
        """The checkpoint with the best monitored metric."""
        return self.checkpoints / "best.ckpt"

    @property
    def fitted(self) -> Path:
        """Exists once training has ended, of itself and not by a stop; what came of it."""
        return self.checkpoints / "fitted.json"

    @property
    def starts(self) -> tuple[float | None, ...]:
        """When the run was begun and gone on with, as Unix times.

        The first is None where a version began it that did not note that.
        """
        try:
            return tuple(read_json(self.path / _STARTS))
        except (DataError, TypeError):
            return (None,) if self.config.exists() else ()

    @property
    def attempt(self) -> int:
        """How often the run was started anew by force."""
        for file in (self._attempts, self.path / _ATTEMPT):  # where older versions have it
            try:
                return int(file.read_text(encoding="ascii"))
            except (OSError, ValueError):
                continue
        return 0

    @property
    def _attempts(self) -> Path:
        """Beside the directory: whatever becomes of that, no attempt has another's number."""
        return self.path.with_name(f".{self.run_id}{_ATTEMPT}")

    def open(self, config: Mapping[str, Any]) -> None:
        """Makes the directory ready for a run, anew where ``force`` is set."""
        again = bool(config["force"]) and self.path.exists()
        if attempt := self.attempt + again:
            write_text_atomic(self._attempts, str(attempt))  # first: nothing may come between
        if again:
            # Moved first: a directory that is half removed must not look like a run.
            self.path.rename(self.path.with_name(f".{self.run_id}.{os.getpid()}.{time.time_ns()}"))
        for aside in self.path.parent.glob(f".{self.run_id}.[0-9]*.[0-9]*"):
            shutil.rmtree(aside)  # one that was killed may have left its own
        self.path.mkdir(parents=True, exist_ok=True)
        write_json(
            self.path / _STARTS, [*self.starts, time.time()]
        )  # before there is a config.yaml
        settings = {key: value for key, value in config.items() if key != "force"}
        write_text_atomic(self.config, OmegaConf.to_yaml(OmegaConf.create(settings)))

    def remove_if_unused(self) -> None:
        """Removes the directory of a run that failed before it had anything to keep."""
        plan = (self.plan, self.plan_table, self.plan_figures, self.shares)
        told = {self.config.name, _ATTEMPT, _STARTS, *(path.name for path in plan)}
        if {path.name for path in self.path.iterdir()} <= told:
            shutil.rmtree(self.path)

    def load_config(self) -> dict[str, Any]:
        """The configuration the run was opened with.

        Raises:
            ConfigError: there is none.
        """
        try:
            value = OmegaConf.to_container(OmegaConf.load(self.config))
        except (OSError, OmegaConfBaseException) as error:
            raise ConfigError(
                f"{self.config} cannot be read: {error}", remedy="give a run's directory"
            ) from error
        assert isinstance(value, dict)
        if isinstance(task := value.get("task"), dict):  # of a run that an earlier version began
            task["_target_"] = present_name(task["_target_"])
        return {"force": False, **{str(key): item for key, item in value.items()}}

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Marks the run as finished."""
        write_json(self.done, dict(summary))


def run_dir(
    config: Mapping[str, Any],
    *,
    inventory: Inventory,
    ranks: int,
    data_fingerprint: str,
    checkpoint_fingerprint: str | None,
    profiles_fingerprint: str | None = None,
    order: Sequence[int] = (),
    threads: str | None = None,
) -> RunDir:
    """The directory that belongs to a configuration on some data and hardware."""
    identity = identity_of(config)
    identity["ranks"] = ranks
    identity["data fingerprint"] = data_fingerprint
    identity["checkpoint"] = checkpoint_fingerprint
    identity["hardware fingerprint"] = _of_hardware(config, inventory)
    division = division_of(config)
    if division is not None:
        identity["plan"] = division.arguments()  # what its file holds, where it is in one
        if not is_automatic(config["parallel"]):
            identity |= settled_recompute(config["parallel"], division.details)
    if threads is not None:
        identity["threads"] = threads
    if order:  # of the devices; most runs take them as the inventory lists them
        identity["devices"] = list(order)
    if (search := searched_plan_of(config)) is not None:
        chosen = {key: value for key, value in asdict(search).items() if key != "profiles"}
        identity["search"] = {**chosen, "profiles": profiles_fingerprint}
    elif is_automatic(config["parallel"]):
        identity["recompute"] = [profiles_fingerprint, memory_settings(config["parallel"])]
    text = json.dumps(identity, sort_keys=True, default=str)
    run_id = hashlib.sha256(text.encode()).hexdigest()[:12]
    outputs = expanded(config["paths"]["outputs"])
    return RunDir((outputs / str(config["name"]) / run_id).absolute())


def _of_hardware(config: Mapping[str, Any], inventory: Inventory) -> str:
    """Of what matters of it to the task, which that chooses by ``hardware``."""
    choose = getattr(locate(config["task"]["_target_"]), "hardware", None)
    return (inventory if choose is None else choose(inventory)).fingerprint()


def identity_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration flattened to dotted keys, without what does not change the run.

    Nor what does not change what its task does, which that names as ``not_identity``.
    """
    flat = flatten(config)
    drops = (*_NOT_IDENTITY, *getattr(locate(config["task"]["_target_"]), "not_identity", ()))
    flat["task._target_"] = identity_name(flat["task._target_"])
    return {
        key: value
        for key, value in flat.items()
        if not any(key == drop or key.startswith(f"{drop}.") for drop in drops)
    }


def flatten(value: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested mappings as one with dotted keys; lists stay values."""
    flat: dict[str, Any] = {}
    for key, item in value.items():
        name = f"{prefix}{key}"
        if isinstance(item, Mapping) and item:
            flat.update(flatten(item, f"{name}."))
        else:
            flat[name] = item
    return flat


def file_fingerprint(path: Path) -> str:
    """SHA-256 of a file's content, shortened."""
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while block := stream.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()[:16]
