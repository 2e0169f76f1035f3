"""Turns a command line into a checked configuration.

Hydra composes it; its errors about unknown names are replaced with ours, which suggest a valid one.
"""

from __future__ import annotations

import itertools
import os
import re
import shlex
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.utils import create_config_search_path, get_args_parser
from hydra.conf import ConfigSourceInfo
from hydra.core.config_loader import ConfigLoader
from hydra.core.config_search_path import SearchPathQuery
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import ChoiceSweep, Glob, Override, QuotedString
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from sparsepipe.config.check import check, check_names, check_task, unknown_key
from sparsepipe.config.finished_run import (
    FROM_RUN,
    NOT_RECORDED,
    as_trained,
    begun_from,
    training_of,
)
from sparsepipe.config.listing import directories_of, groups_in
from sparsepipe.config.run_spec import RunSpec
from sparsepipe.config.schema import Config
from sparsepipe.config.sweep_environment import COMMAND
from sparsepipe.errors import ConfigError
from sparsepipe.utils.arguments import is_number
from sparsepipe.utils.extensions import imported, nearest
from sparsepipe.utils.files import expanded

CONFIG_NAME = "config"
ASSETS = Path(__file__).resolve().parent.parent / "assets"
"""The directory of profiles and plans that come with the package."""


def _listed_devices(hardware: DictConfig | None) -> int | str:
    """Number of devices of the hosts that a ``hardware`` node lists; "any" if it lists none."""
    hosts = OmegaConf.select(hardware, "value.hosts") if hardware is not None else None
    try:
        return (
            sum(int(device["count"]) for host in hosts or () for device in host["devices"]) or "any"
        )
    except (KeyError, TypeError, ValueError, OverflowError):  # malformed, which is reported later
        return "any"


def _sweep_or(name: str) -> str:
    """Within a sweep, adds a name of its command, which is the same if the sweep is restarted."""
    if not HydraConfig.initialized() or HydraConfig.get().mode != RunMode.MULTIRUN:
        return name
    return f"{name} {os.environ.get(COMMAND) or Path(HydraConfig.get().sweep.dir).name}"


_RESOLVERS: Mapping[str, Callable[..., Any]] = {
    "expanded": lambda path: str(expanded(path)),  # before our own code gets a path
    "listed_devices": _listed_devices,
    "choose": lambda options, name, otherwise=None: {str(k): v for k, v in options.items()}.get(
        str(name), otherwise
    ),
    "short": lambda value: f"{value:g}" if is_number(value) else str(value),  # 1 for 1.0 as well
    "sweep_or": _sweep_or,
    "channels": lambda features: (
        1 if features is None else imported("sparsepipe.data.scenes.scene.channels_of")(features)
    ),
}
for _name, _resolver in _RESOLVERS.items():
    OmegaConf.register_new_resolver(_name, _resolver, replace=True)

# A dotted key, or ``callbacks={...}``: the only plain key whose mapping may be empty at first.
_PLAIN_ASSIGNMENT = re.compile(r"^(callbacks(?=={)|[A-Za-z_][\w-]*(\.[\w-]+)+)=")
_PLUGIN = re.compile(r"Could not find 'hydra/(launcher|sweeper)/(\w+)'")
_EXTRAS = {
    "joblib": "joblib",
    "optuna": "optuna",
    "submitit_local": "slurm",
    "submitit_slurm": "slurm",
}
"""The extra of this package that installs each launcher or sweeper of Hydra."""
_PRINTED_WIDTH = (100, 24)  # columns and rows without a terminal
STUDY = "paper"
"""Key in an experiment's file for settings of the papers' studies."""
KEY = "instead_of_scale"
"""Key below ``STUDY``: the overrides that replace each ``scale``, for experiments that compute with
recorded measurements. Files of ``conf/scale`` would change the meaning of their figures.
"""


def config_dir() -> Path:
    """The directory of the YAML groups: in the package, or beside it in a checkout."""
    package = Path(__file__).resolve().parent.parent
    for directory in (package / "conf", package.parent / "conf"):
        if (directory / f"{CONFIG_NAME}.yaml").is_file():
            return directory
    raise ConfigError(
        f"no directory conf with a {CONFIG_NAME}.yaml inside {package} or beside it",
        remedy="install sparsepipe from its wheel, or run from a complete checkout",
    )


def config_loader(arguments: Sequence[str] = ()) -> ConfigLoader:
    """Hydra's loader of the groups in the :func:`own_directories` of a command's arguments."""
    path = create_config_search_path(str(config_dir()))
    for directory in own_directories(arguments)[1:]:
        where = f"file://{directory.absolute()}"
        path.prepend("command-line", where, anchor=SearchPathQuery(provider="schema", path=None))
    return ConfigLoaderImpl(path)


def own_directories(arguments: Sequence[str]) -> list[Path]:
    """The package's directory of groups, then the directories given with ``--config-dir``."""
    pairs = [item.partition("=")[::2] for item in arguments if "=" in item]
    pairs += itertools.pairwise(arguments)
    given = (value for option, value in pairs if option in ("--config-dir", "-cd"))
    return [config_dir(), *map(Path, given)]


def split_options(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Splits a command's arguments into options and overrides.

    Hydra requires options to come first; in ``sparsepipe data=shapes -m seed=0,1`` they do not.
    """
    overrides = [*get_args_parser().parse_intermixed_args(list(arguments)).overrides]
    return [word for word in arguments if word not in overrides], overrides


def admit(arguments: Sequence[str]) -> list[str]:
    """Rewrites command-line arguments so that every dotted ``key=value`` reaches the schema.

    Hydra refuses keys that the composed files leave out, even if the schema knows them; with the
    prefix ``++`` it accepts them, and :func:`check` refuses unknown ones. Paths that begin with
    ``~`` are quoted, as Hydra requires. :func:`in_place_of_scale` replaces a scale. A node given
    as a mapping (``optim.schedule={_target_: ...}``) replaces the composed node; Hydra would
    merge the two.
    """
    admitted = []
    for item in map(_with_home_quoted, in_place_of_scale(arguments)):
        key, _, value = item.partition("=")
        if not _PLAIN_ASSIGNMENT.match(item) or item.startswith("hydra."):
            admitted.append(item)
            continue
        for override in _parse([item]) if value.lstrip().startswith("{") else ():
            found = override.value()
            options = found.list if isinstance(found, ChoiceSweep) else [found]
            if any(isinstance(each, dict) and "_target_" in map(str, each) for each in options):
                admitted.append(f"++{key}=null")
        admitted.append(f"++{item}")
    return admitted


def in_place_of_scale(arguments: Sequence[str]) -> list[str]:
    """Replaces ``scale=...`` with the overrides that the experiment has for this scale, if any.

    Leaves out overrides of keys and groups that other arguments set.
    """
    given = {name.lstrip("+"): value for name, _, value in (a.partition("=") for a in arguments)}
    file = config_dir() / "experiment" / f"{given.get('experiment')}.yaml"
    content = yaml.safe_load(file.read_text(encoding="utf-8")) if file.is_file() else None
    instead: Mapping[str, Sequence[str]] = ((content or {}).get(STUDY) or {}).get(KEY) or {}
    scale = given.get("scale", "")
    if scale not in instead:
        return list(arguments)
    narrowed = [word for word in instead[scale] if word.partition("=")[0] not in given]
    return [*(a for a in arguments if a.lstrip("+") != f"scale={scale}"), *narrowed]


def _with_home_quoted(argument: str) -> str:
    name, _, value = argument.partition("=")
    plain = value.startswith("~") and not name.startswith("-") and not set(value) & set(",'\"")
    return f"{name}='{value}'" if plain else argument


def resolve(config: DictConfig, *, given: Sequence[str] | None = None) -> RunSpec:
    """Checks and parses a composed configuration.

    Values that the run ``from_run`` has recorded replace composed values that no override sets;
    for tasks that measure a checkpoint, so do values of its training.

    Args:
        config: the configuration as Hydra composed it.
        given: the overrides that it was composed with; None: those of Hydra's current job.
    """
    job = HydraConfig.get() if HydraConfig.initialized() else None
    if given is None:
        given = [] if job is None else [str(word) for word in job.overrides.task]
    raw = begun_from(_unresolved(config), given)
    check_names(raw)
    source = raw.get("checkpoint")
    if isinstance(source, str) and getattr(_task_of(raw), "as_trained", False):
        training = training_of(source, command=raw)
        raw = raw if training is None else as_trained(raw, given, training)
    try:
        value = OmegaConf.to_container(OmegaConf.create(raw), resolve=True, throw_on_missing=True)
    except OmegaConfBaseException as error:
        raise ConfigError(
            f"the configuration cannot be resolved: {_first_line(error)}",
            remedy="set the value or environment variable that it names, or correct the ${...}",
        ) from error
    assert isinstance(value, dict)
    plain = {str(key): item for key, item in value.items()}
    check(plain)
    # Other settings have been computed from these keys, which the run does not record.
    study = plain.pop(STUDY, None) or {}
    for key in ("runs", FROM_RUN):
        plain.pop(key, None)
    if study.get(KEY) is not None and plain.get("scale") is not None:
        raise ConfigError(
            f"scale={plain['scale']} is not possible: {plain['name']} computes with recorded "
            "measurements, so a scale can only narrow a sweep of this experiment alone",
            remedy="leave scale out, or give a command with this experiment alone and scale="
            f"{' or scale='.join(study[KEY])}",
        )
    if job is not None:
        words = (str(word).lstrip("+") for word in job.overrides.task)
        choices = {str(group): option for group, option in job.runtime.choices.items()}
        plain["hydra"] = {
            "overrides": [word for word in words if not word.lstrip("~").startswith(NOT_RECORDED)],
            "choices": {k: v for k, v in sorted(choices.items()) if not k.startswith(NOT_RECORDED)},
        }
    return RunSpec.from_dict(plain)


def _unresolved(config: DictConfig) -> dict[str, Any]:
    raw = OmegaConf.to_container(config, resolve=False)
    assert isinstance(raw, dict)
    return {str(key): value for key, value in raw.items() if key != "hydra"}


def explain(
    error: Exception, overrides: Sequence[str], *, command: Sequence[str] = ()
) -> ConfigError | None:
    """Returns an error that explains why composing failed; None if ``error`` has another origin.

    Args:
        error: an error of Hydra, OmegaConf or the YAML parser.
        overrides: the overrides that Hydra got.
        command: all arguments as the user gave them; empty: ``overrides``.
    """
    own = ("Config group override must", "Only one of --run")  # plain exceptions of Hydra
    kinds = HydraException | OmegaConfBaseException | yaml.YAMLError
    if not isinstance(error, kinds) and not str(error).startswith(own):
        return None
    line = _first_line(error)
    command = command or overrides
    found = groups_in(own_directories(command))
    groups = {group.name: [option.name for option in group.options] for group in found}
    for override in _parse(overrides):
        if (problem := _name_problem(override, groups)) is not None:
            return ConfigError(problem, remedy="`sparsepipe --help` lists groups and options")
    if missing := _PLUGIN.search(line):
        extra = _EXTRAS.get(missing[2])
        return ConfigError(
            f"hydra/{missing[1]}={missing[2]} is not installed",
            remedy=f"pip install 'sparsepipe[{extra}]'"
            if extra
            else "install the Hydra plugin that provides it, or name another",
        )
    for override in _parse(overrides):
        if override.is_sweep_override() and line.startswith("Ambiguous value"):
            key, _, value = str(override.input_line).partition("=")
            as_list, as_text = shlex.quote(f"{key}=[{value}]"), shlex.quote(f'{key}="{value}"')
            return ConfigError(
                f"{override.input_line} has several values",
                remedy=f"add -m to sweep over them: {shlex.join(['sparsepipe', '-m', *command])}; "
                f"write a list as {as_list}, a text with commas as {as_text}",
            )
    return ConfigError(
        f"the configuration cannot be composed: {line}",
        remedy="give settings as key=value, with quotes around a value with spaces or "
        "characters of Hydra's grammar; `sparsepipe --help` lists groups and options",
    )


def _name_problem(override: Override, groups: Mapping[str, Sequence[str]]) -> str | None:
    """Describes what is wrong with an override's group, option or key; None if all are known."""
    name, value = override.key_or_group, override.value()
    if name not in groups:
        known = sorted({*groups, *Config.__dataclass_fields__})
        is_ours = "." in name or name.startswith("hydra") or name in known
        return None if is_ours else unknown_key(name, known)
    if override.is_delete() or isinstance(value, Glob):
        return None
    for each in override.sweep_iterator() if override.is_sweep_override() else [value]:
        for option in each if isinstance(each, list) else [each]:
            text = option.text if isinstance(option, QuotedString) else option
            text = "null" if text is None else str(text)
            if not isinstance(option, dict) and text not in groups[name]:
                return (
                    f"'{name}' has no option '{text}'{nearest(text, groups[name])}; "
                    f"valid options: {', '.join(groups[name])}"
                )
    return None


def _parse(overrides: Sequence[str]) -> list[Override]:
    """Parses overrides; leaves out those that Hydra cannot parse, which it reports itself."""
    parser, found = OverridesParser.create(), []
    for item in map(_with_home_quoted, overrides):
        with suppress(HydraException):
            found.append(parser.parse_override(item))
    return found


def _first_line(error: BaseException) -> str:
    if isinstance(error, yaml.YAMLError):
        return " ".join(str(error).split())  # names the file and the line
    text = str(error).strip() or str(error.__cause__ or "").strip()
    return text.partition("\n")[0] or type(error).__name__


def printed_text(config: DictConfig, sources: Iterable[ConfigSourceInfo]) -> str | None:
    """The text of a task that only prints, such as ``task=list``; None if the task makes a run.

    Resolves only the task's node, since other nodes may lack required values.
    """
    raw = _unresolved(config)
    check_names(raw)
    task = _task_of(raw)
    if not getattr(task, "prints_only", False):
        return None
    if raw.get(FROM_RUN):
        raise ConfigError(
            f"{raw['task']['_target_']} makes no run, so it cannot begin from the run of --from",
            remedy="leave --from out, or choose the task of a run",
        )
    resolved = OmegaConf.to_container(config.task, resolve=True)
    assert isinstance(resolved, dict)
    node = {str(key): value for key, value in resolved.items()}
    check_task(node)
    node.pop("_target_")
    width = shutil.get_terminal_size(_PRINTED_WIDTH).columns
    return str(task(directories_of(sources), width=width, **node))


def refuse_printing_task(spec: RunSpec) -> None:
    """Raises a ConfigError for a task that only prints, which cannot be a sweep's job."""
    if getattr(spec.task.locate(), "prints_only", False):
        raise ConfigError(
            f"{spec.task.path} only prints: every job of a sweep would print the same text",
            remedy="run the command without -m",
        )


def _task_of(raw: Mapping[str, Any]) -> Any:
    try:
        return imported(str((raw.get("task") or {}).get("_target_")))
    except ConfigError:
        return None
