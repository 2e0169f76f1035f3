"""What a checkpoint was trained with: tasks that measure it take model and data from there."""

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

from sparsepipe.config.run_spec import DIRECTORY, NOT_IDENTITY, flatten, read_settings
from sparsepipe.config.target import Target, present_name
from sparsepipe.errors import ConfigError
from sparsepipe.utils.extensions import is_trusted
from sparsepipe.utils.files import expanded

log = logging.getLogger(__name__)

RECORD = "sparsepipe"
"""The key of a checkpoint below which it says what it was trained with."""
CLASSES = "classes"
"""What ``task.allow`` calls the names and the order of the classes."""
_GROUPS = ("model", "data", "backend")
_VALUES = ("representation", "seed")
_PRECISION = "trainer.precision"
_SAMPLES = (
    *("batch_size", "strict", "val_share", "seed", "sampling_seed", "augment", "source", "split"),
    "evaluated",  # domains
)
"""Keys of data that say which samples are read, and how many at a time, but not what is made of
one: what is evaluated may differ in them."""
_PLACES = ("cache_dir", "root", "split")
"""Keys within data that may be paths."""
_ACCESS = {"cache_dir": os.R_OK | os.W_OK}


@dataclass(frozen=True, slots=True)
class Training:
    """What is known of the training of a checkpoint.

    Args:
        origin: where that is written.
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
        return f"{self.key}={_short(self.now)} (trained with {_short(self.then)})"

    @property
    def contradicts(self) -> bool:
        """Whether the network gets other inputs than it was trained on, or is another one."""
        if self.key == "representation" or self.key.startswith("model."):
            return True
        group, _, key = self.key.partition(".")
        return group == "data" and key.partition(".")[0] not in _SAMPLES and key != "root"


def training_of(source: str) -> Training | None:
    """What is known of a checkpoint's training, from its run or else from the file itself.

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
    """The settings of a run's ``config.yaml``; None where there is none that can be read."""
    if not path.is_file():
        return None
    try:
        values = read_settings(path)
        if values and not _says_what_was_trained(values):
            raise ValueError("it is not the configuration of a run")
    except (OSError, ValueError) as error:
        reason = str(error).partition("\n")[0]
        log.warning("%s cannot be read (%s): what the checkpoint says itself counts", path, reason)
        return None
    return values or None  # empty where it was cut off


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
    kept = {key: values[key] for key in (*_GROUPS, *_VALUES, "optim") if key in values}
    return {**copy.deepcopy(kept), "trainer": {"precision": values["trainer"]["precision"]}}


def as_trained(raw: Mapping[str, Any], given: Sequence[str], training: Training) -> dict[str, Any]:
    """A composed configuration with the model, the data and the backend of a training.

    Args:
        raw: plain values with their interpolations.
        given: overrides; what they set stays, be it a key or one of these groups as a whole.
        training: takes the place of all else in these groups.
    """
    kept, then = copy.deepcopy(dict(raw)), _escaped(training.values)
    keys = _keys(given)
    for name in _VALUES:
        by_model = name == "representation" and "model" in keys
        if name in then and name not in keys and not by_model:
            kept[name] = then[name]
    if _PRECISION not in keys and "precision" in (then.get("trainer") or {}):
        kept["trainer"] = {**raw["trainer"], "precision": then["trainer"]["precision"]}
    for group in _GROUPS:
        if group in keys or group not in then:
            continue
        node = copy.deepcopy(then[group])
        for name in _VALUES:  # data.seed follows seed, where it did in the training
            link = f"${{{name}}}"
            if _at(raw, f"{group}.{name}") == link and node.get(name, link) == then.get(name):
                node[name] = link
        for key in (each for each in keys if each.startswith(f"{group}.")):
            _set(node, key.partition(".")[2], _at(raw, key))
        kept[group] = node
    return kept


_MISSING: Any = object()


def _at(values: Any, key: str) -> Any:
    for part in key.split("."):
        if not isinstance(values, Mapping) or part not in values:
            return _MISSING
        values = values[part]
    return values


def _set(node: dict[str, Any], key: str, value: Any) -> None:
    """Sets a dotted key; removes it where its value is missing."""
    *path, last = key.split(".")
    for part in path:
        if not isinstance(node.get(part), dict):
            node[part] = {}
        node = node[part]
    if value is _MISSING:
        node.pop(last, None)
    else:
        node[last] = copy.deepcopy(value)


def _keys(given: Sequence[str]) -> set[str]:
    """The keys and groups that overrides set."""
    try:
        overrides = OverridesParser.create().parse_overrides(list(given))
    except HydraException:  # which Hydra has reported before
        return set()
    found: set[str] = set()
    for override in overrides:
        value = override.value()
        if isinstance(value, dict) and value:
            found |= {f"{override.key_or_group}.{key}" for key in flatten(value)}
        else:
            found.add(override.key_or_group)
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
    nodes = {group: _complete(values.get(group)) for group in _GROUPS}
    found = flatten({**nodes, **{name: values.get(name) for name in _VALUES}})
    found[_PRECISION] = (values.get("trainer") or {}).get("precision")
    idle = tuple(key for key in NOT_IDENTITY if key != "data.root")
    return {key: value for key, value in found.items() if key not in idle}


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
    return {**defaults, **node, "_target_": present_name(str(node["_target_"]))}


def _short(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{}"
    return "null" if value is None else str(value)
