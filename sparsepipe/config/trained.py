"""Model and data that a checkpoint was trained with, for tasks that measure it."""

from __future__ import annotations

import copy
import inspect
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException

from sparsepipe.config.run_spec import (
    DIRECTORY,
    NOT_IDENTITY,
    flatten,
    is_below,
    nested,
    read_settings,
)
from sparsepipe.config.target import Target
from sparsepipe.errors import ConfigError
from sparsepipe.utils.extensions import is_trusted
from sparsepipe.utils.files import expanded

log = logging.getLogger(__name__)

RECORD = "sparsepipe"
"""Key of a checkpoint with the configuration of its training."""
CLASSES = "classes"
"""Name in ``task.allow`` of the classes and their order."""
GROUPS = ("model", "data", "backend")
"""Groups that are taken from a checkpoint's training."""
_VALUES = ("representation", "seed")
_PRECISION = "trainer.precision"
_SAMPLES = (
    *("batch_size", "strict", "val_share", "seed", "sampling_seed", "augment", "source", "split"),
    "evaluated",  # domains
)
"""Keys of data that decide which samples are read, and how many at a time, but not what is made
of one: an evaluation may differ from the training in them."""
_PLACES = ("cache_dir", "root", "split")
"""Keys within data that may be paths."""
_ACCESS = {"cache_dir": os.R_OK | os.W_OK}


@dataclass(frozen=True, slots=True)
class Training:
    """The recorded configuration of a checkpoint's training.

    Args:
        origin: the file that records it.
        values: plain values, nested as in configuration files.
    """

    origin: Path
    values: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Difference:
    """A setting that differs from the training.

    Args:
        key: the dotted key.
        now: its value; None where it has none.
        then: its value in the training.
    """

    key: str
    now: Any
    then: Any

    def __str__(self) -> str:
        now, then = (
            "{}" if isinstance(value, Mapping) else "null" if value is None else value
            for value in (self.now, self.then)
        )
        return f"{self.key}={now} (trained with {then})"

    @property
    def contradicts(self) -> bool:
        """Whether the network gets other inputs than it was trained on, or is another one."""
        if self.key == "representation" or self.key.startswith("model."):
            return True
        group, _, key = self.key.partition(".")
        return group == "data" and key.partition(".")[0] not in _SAMPLES and key != "root"


def training_of(source: str) -> Training | None:
    """The configuration of a checkpoint's training, from its run or else from the file itself.

    Args:
        source: a checkpoint or a run directory, as ``checkpoint=`` names it.

    Raises:
        ConfigError: the file names code to call that is neither SparsePipe's nor PyTorch's.
    """
    path = expanded(source).absolute()
    run = path.parent.parent if path.parent.name == "checkpoints" else path
    for config in dict.fromkeys((path / "config.yaml", run / "config.yaml")):
        if (known := _configured(config)) is not None:
            return Training(config, _located(known))
    files = (path, *(run / "checkpoints" / f"{name}.ckpt" for name in ("best", "last")))
    path = next((file for file in files if file.is_file()), path)
    recorded = _recorded(path) if path.is_file() else None
    if recorded is None:
        return None
    for target in _targets(recorded):
        if not is_trusted(target):
            raise ConfigError(
                f"{path} names {target} to build the model or the data with, which is not called "
                "for a file that says so",
                remedy="evaluate the checkpoint in the directory of its run, whose config.yaml "
                "may name such code",
            )
    return Training(path, recorded)


def _configured(path: Path) -> dict[str, Any] | None:
    """The settings of a run's ``config.yaml``; None where they cannot be read."""
    if not path.is_file():
        return None
    try:
        values = read_settings(path)
        if not _says_what_was_trained(values):
            raise ValueError("it is not the configuration of a run")
    except (OSError, ValueError) as error:
        reason = str(error).partition("\n")[0]
        log.warning("%s cannot be read (%s): what the checkpoint says itself counts", path, reason)
        return None
    return values


def _located(values: dict[str, Any]) -> dict[str, Any]:
    """The settings, with data in the directory of the training where that was another one.

    Relative paths that lead somewhere from here stay as they are, as those of a copied project do,
    and so do paths that lead nowhere there: a run may have come from another machine.
    """
    command = values.get("hydra")
    directory = command.get(DIRECTORY) if isinstance(command, Mapping) else None
    if not isinstance(directory, str) or directory == os.getcwd():
        return values

    def located(node: Any, key: str = "") -> Any:
        if isinstance(node, Mapping):
            return {name: located(value, str(name)) for name, value in node.items()}
        if key not in _PLACES or not isinstance(node, str) or not node or os.path.exists(node):
            return node
        path = os.path.join(directory, node)
        return path if os.access(path, _ACCESS.get(key, os.R_OK)) else node

    return {**values, "data": located(values["data"])}


def _recorded(path: Path) -> dict[str, Any] | None:
    # Torch is imported here, since composing need not wait for it.
    from sparsepipe.utils.values_only import load_values

    try:
        found = load_values(path, mmap=True)[RECORD]["config"]
    except Exception:  # no checkpoint, or one of an earlier version: the task reports what is wrong
        return None
    return found if isinstance(found, dict) and _says_what_was_trained(found) else None


def _says_what_was_trained(values: Mapping[str, Any]) -> bool:
    nodes = [values.get(name) for name in ("model", "data")]
    return all(isinstance(n, Mapping) and isinstance(n.get("_target_"), str) for n in nodes)


def _targets(node: Any) -> Iterator[str]:
    if isinstance(node, Mapping):
        if "_target_" in node:
            yield str(node["_target_"])
        for value in node.values():
            yield from _targets(value)
    elif isinstance(node, Sequence) and not isinstance(node, str):
        for value in node:
            yield from _targets(value)


def recorded_settings(values: Mapping[str, Any]) -> dict[str, Any]:
    """Those settings of a run that a checkpoint keeps: what the network and its inputs are."""
    kept = {key: values[key] for key in (*GROUPS, *_VALUES, "optim") if key in values}
    return {**copy.deepcopy(kept), "trainer": {"precision": values["trainer"]["precision"]}}


def as_trained(raw: Mapping[str, Any], given: Sequence[str], training: Training) -> dict[str, Any]:
    """A composed configuration with the model, the data and the backend of a training.

    Args:
        raw: plain values with their interpolations.
        given: overrides; what they set stays, be it a key or one of these groups as a whole.
        training: takes the place of all else in these groups.
    """
    kept, then, keys = copy.deepcopy(dict(raw)), _escaped(training.values), _keys(given)
    for name in _VALUES:
        by_model = name == "representation" and "model" in keys
        if name in then and name not in keys and not by_model:
            kept[name] = then[name]
    if _PRECISION not in keys and "precision" in (then.get("trainer") or {}):
        kept["trainer"] = {**raw["trainer"], "precision": then["trainer"]["precision"]}
    ours, theirs = flatten(raw), flatten(then)
    for group in (each for each in GROUPS if each in then and each not in keys):
        taken = {key: value for key, value in theirs.items() if is_below(key, (group,))}
        for name in _VALUES:  # data.seed follows seed, where it did in the training
            key, link = f"{group}.{name}", f"${{{name}}}"
            if ours.get(key) == link and theirs.get(key, link) == theirs.get(name):
                taken[key] = link
        own = [key for key in keys if is_below(key, (group,))]
        taken = {key: value for key, value in taken.items() if not is_below(key, own)}
        taken |= {key: value for key, value in ours.items() if is_below(key, own)}
        kept[group] = nested(taken)[group]
    return kept


def _keys(given: Sequence[str]) -> set[str]:
    """The keys and groups that overrides set."""
    try:
        overrides = OverridesParser.create().parse_overrides(list(given))
    except HydraException:  # which Hydra has reported before
        return set()
    found: set[str] = set()
    for override in overrides:
        value = override.value()
        name = override.key_or_group
        below = flatten(value) if isinstance(value, dict) else {}
        found |= {f"{name}.{key}" for key in below} or {name}
    return found


def _escaped(value: Any) -> Any:
    """Resolved values as OmegaConf takes them for what they are."""
    if isinstance(value, Mapping):
        return {key: _escaped(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_escaped(item) for item in value]
    return value.replace("${", "\\${") if isinstance(value, str) else value


def differences(now: Mapping[str, Any], training: Training) -> list[Difference]:
    """Where a configuration differs from a training in what networks compute, and on what."""
    ours, theirs = _compared(now), _compared(training.values)
    return [
        Difference(key, ours.get(key), theirs.get(key))
        for key in dict.fromkeys((*ours, *theirs))
        if ours.get(key) != theirs.get(key)
    ]


def _compared(values: Mapping[str, Any]) -> dict[str, Any]:
    nodes = {group: _complete(values.get(group)) for group in GROUPS}
    found = flatten({**nodes, **{name: values.get(name) for name in _VALUES}})
    found[_PRECISION] = (values.get("trainer") or {}).get("precision")
    return {k: v for k, v in found.items() if k == "data.root" or k not in NOT_IDENTITY}


def _complete(node: Any) -> dict[str, Any]:
    """A node, with the defaults of arguments that are left out."""
    if not isinstance(node, Mapping) or "_target_" not in node:
        return {}
    try:
        parameters = inspect.signature(Target.parse(node).locate()).parameters.values()
    except (ConfigError, TypeError, ValueError):
        return dict(node)
    plain = (str, int, float, bool, type(None))
    defaults = {each.name: each.default for each in parameters if isinstance(each.default, plain)}
    return {**defaults, **node}
