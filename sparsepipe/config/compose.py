"""From the command line to a checked, plain configuration.

Hydra composes; its complaints about names are replaced by ours, which name the nearest
valid one.
"""

from __future__ import annotations

import itertools
import re
import shlex
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.utils import create_config_search_path, get_args_parser
from hydra.core.config_loader import ConfigLoader
from hydra.core.config_search_path import SearchPathQuery
from hydra.core.hydra_config import HydraConfig
from hydra.core.object_type import ObjectType
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import ChoiceSweep, Glob, Override, QuotedString
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from sparsepipe.config.check import check, check_names, check_task, unknown_key
from sparsepipe.config.listing import PARTS, Source, directories_of
from sparsepipe.config.run_spec import RunSpec
from sparsepipe.config.scales import KEY, STUDY, in_place_of_scale
from sparsepipe.config.schema import Config
from sparsepipe.config.sweep_environment import announced_command
from sparsepipe.config.trained import GROUPS, as_trained, training_of
from sparsepipe.errors import ConfigError
from sparsepipe.utils.extensions import imported, nearest
from sparsepipe.utils.files import expanded

CONFIG_NAME = "config"


def _listed_devices(hardware: DictConfig | None) -> int | str:
    """How many devices a node of ``hardware`` lists; "any" where it finds them out later."""
    hosts = OmegaConf.select(hardware, "value.hosts") if hardware is not None else None
    if hosts is None:
        return "any"
    try:
        return sum(int(device["count"]) for host in hosts for device in host["devices"])
    except (
        KeyError,
        TypeError,
        ValueError,
        OverflowError,
    ):  # wrongly listed, which is reported later
        return "any"


def _choose(options: Mapping[str, Any], name: str | None, otherwise: Any = None) -> Any:
    return {str(key): value for key, value in options.items()}.get(str(name), otherwise)


def _short(value: Any) -> str:
    """A number as it is written with the fewest digits, whole or not: 1 for 1.0 as well."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return f"{value:g}" if is_number else str(value)


def _sweep_or(name: str) -> str:
    """The sweep of a job by ``name`` and its command, without a time, so that a restarted sweep is
    the same one.
    """
    if not HydraConfig.initialized() or HydraConfig.get().mode != RunMode.MULTIRUN:
        return name
    return f"{name} {announced_command(Path(HydraConfig.get().sweep.dir).name)}"


# Hydra writes what was swept before our own code sees any path.
OmegaConf.register_new_resolver("expanded", lambda path: str(expanded(path)), replace=True)
OmegaConf.register_new_resolver("listed_devices", _listed_devices, replace=True)
OmegaConf.register_new_resolver("choose", _choose, replace=True)
OmegaConf.register_new_resolver("short", _short, replace=True)
OmegaConf.register_new_resolver("sweep_or", _sweep_or, replace=True)
NOT_RECORDED = (
    *("checkpoint", "data.cache_dir", "data.root", "force", "hydra", "input", "logger", "paths"),
)
"""Prefixes of overrides and groups that a run does not record."""
# A dotted key, or the one key of ours that takes a mapping and may start empty.
_PLAIN_ASSIGNMENT = re.compile(r"^(callbacks(?=={)|[A-Za-z_][\w-]*(\.[\w-]+)+)=")

_PLUGIN = re.compile(r"Could not find 'hydra/(launcher|sweeper)/(\w+)'")
_EXTRAS = {
    "joblib": "joblib",
    "optuna": "optuna",
    "submitit_local": "slurm",
    "submitit_slurm": "slurm",
}
"""Extras of this package that bring launchers and sweepers."""
_PRINTED_WIDTH = (100, 24)  # columns and rows without a terminal


def config_dir() -> Path:
    """The directory of the YAML groups: in the package, or beside it in a checkout.

    Raises:
        ConfigError: neither is there.
    """
    package = Path(__file__).resolve().parent.parent
    for directory in (package / "conf", package.parent / "conf"):
        if (directory / f"{CONFIG_NAME}.yaml").is_file():
            return directory
    raise ConfigError(
        f"no configuration directory beside or inside {package}",
        remedy="install sparsepipe from its wheel, or run from a complete checkout",
    )


def assets_dir() -> Path:
    """The directory of profiles and plans that come with the package."""
    return Path(__file__).resolve().parent.parent / "assets"


def config_loader(directories: Sequence[str] = ()) -> ConfigLoader:
    """Knows the groups of :func:`config_dir` and of further directories."""
    path = create_config_search_path(str(config_dir()))
    for directory in directories:
        where = f"file://{Path(directory).absolute()}"
        path.prepend("command-line", where, anchor=SearchPathQuery(provider="schema", path=None))
    return ConfigLoaderImpl(path)


def directories_in(arguments: Sequence[str]) -> list[str]:
    """Directories given by ``--config-dir``."""
    pairs = [item.partition("=")[::2] for item in arguments if "=" in item]
    pairs += itertools.pairwise(arguments)
    return [value for option, value in pairs if option in ("--config-dir", "-cd")]


def options_first(arguments: Sequence[str]) -> list[str]:
    """The arguments with options before all overrides, as Hydra takes them.

    So ``sparsepipe data=shapes -m seed=0,1`` is the sweep that it looks like.
    """
    overrides = overrides_of(arguments)
    return [*(word for word in arguments if word not in overrides), *overrides]


def overrides_of(arguments: Sequence[str]) -> list[str]:
    """The words of a command beside its options, as Hydra reads it."""
    return [*get_args_parser().parse_intermixed_args(list(arguments)).overrides]


def admit(arguments: Sequence[str]) -> list[str]:
    """Command-line arguments such that every dotted ``key=value`` reaches the schema.

    Hydra refuses keys that the composed files leave out, even where the schema knows them;
    with its ``++`` prefix it takes them, and :func:`check` decides. Nor does it take a path
    that begins with ``~`` unless it is quoted. Experiments may have something else in the place
    of a scale. A node that a mapping names anew (``optim.schedule={_target_: ...}``) is replaced,
    where Hydra would mix the keys of both.
    """
    admitted = []
    for item in map(_with_home_quoted, in_place_of_scale(arguments, config_dir())):
        if not _PLAIN_ASSIGNMENT.match(item) or item.startswith("hydra."):
            admitted.append(item)
            continue
        if _names_node(item):
            admitted.append(f"++{item.partition('=')[0]}=null")
        admitted.append(f"++{item}")
    return admitted


def _names_node(argument: str) -> bool:
    """Whether a mapping with a ``_target_`` is given, or such mappings to choose from."""
    if not argument.partition("=")[2].lstrip().startswith("{"):
        return False
    for override in _parse([argument]):
        value = override.value()
        options = value.list if isinstance(value, ChoiceSweep) else [value]
        return any(isinstance(each, dict) and "_target_" in map(str, each) for each in options)
    return False


def _with_home_quoted(argument: str) -> str:
    name, _, value = argument.partition("=")
    plain = value.startswith("~") and not name.startswith("-") and not set(value) & set(",'\"")
    return f"{name}='{value}'" if plain else argument


def resolve(config: DictConfig, *, given: Sequence[str] | None = None) -> RunSpec:
    """The composed configuration, checked and parsed.

    For a task that measures a checkpoint, model and data are those of the checkpoint's training,
    but for what the overrides set.

    Args:
        config: as Hydra has composed it.
        given: the overrides it was composed with; None: those of Hydra's job.

    Raises:
        ConfigError: see :func:`check`; an interpolation that leads nowhere; or a scale where the
            experiment has none.
    """
    if given is None:
        job = HydraConfig.get() if HydraConfig.initialized() else None
        given = [] if job is None else [str(word) for word in job.overrides.task]
    refuse_misspelt(config)
    config = _as_trained(config, given)
    try:
        value = OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
    except OmegaConfBaseException as error:
        raise ConfigError(
            f"the configuration cannot be resolved: {_first_line(error)}",
            remedy="set the missing value, or the environment variable it is read from",
        ) from error
    assert isinstance(value, dict)
    plain = {str(key): item for key, item in value.items() if key != "hydra"}
    check(plain)
    # Settings of the run were computed from these keys; the run does not record them.
    study = plain.pop(STUDY, None) or {}
    plain.pop("runs", None)  # of a task that makes no run
    if study.get(KEY) is not None and plain.get("scale") is not None:
        raise ConfigError(
            f"{plain['name']} has no scales of its own: it computes with what was measured "
            "elsewhere",
            remedy="sweep it without other experiments, where scale= narrows what it sweeps, or "
            "give no scale=",
        )
    if recorded := _given():
        plain["hydra"] = recorded
    return RunSpec.from_dict(plain)


def refuse_misspelt(config: DictConfig) -> None:
    """Raises a ConfigError for keys that source files show to be unknown, before any import."""
    raw = OmegaConf.to_container(config, resolve=False)
    assert isinstance(raw, dict)
    replaced = ("hydra", *(GROUPS if raw.get("checkpoint") is not None else ()))  # as trained
    check_names({str(key): value for key, value in raw.items() if key not in replaced})


def _as_trained(config: DictConfig, given: Sequence[str]) -> DictConfig:
    source = OmegaConf.select(config, "checkpoint")
    if not isinstance(source, str) or not getattr(_task_of(config), "as_trained", False):
        return config
    if (training := training_of(source)) is None:
        return config
    raw = OmegaConf.to_container(config, resolve=False)
    assert isinstance(raw, dict)
    raw.pop("hydra", None)
    changed = OmegaConf.create(as_trained({str(k): v for k, v in raw.items()}, given, training))
    assert isinstance(changed, DictConfig)
    return changed


def _given() -> dict[str, Any]:
    """The overrides and the chosen options of groups of Hydra's job, for ``result.json``."""
    if not HydraConfig.initialized():
        return {}
    job = HydraConfig.get()
    words = (str(word).lstrip("+") for word in job.overrides.task)
    choices = {str(group): option for group, option in job.runtime.choices.items()}
    return {
        "overrides": [word for word in words if not word.lstrip("~").startswith(NOT_RECORDED)],
        "choices": {k: v for k, v in sorted(choices.items()) if not k.startswith(NOT_RECORDED)},
    }


def is_of_hydra(error: Exception) -> bool:
    """Whether Hydra, OmegaConf or the YAML of a file refuses a configuration by an error."""
    own = ("Config group override must", "Only one of --run")  # of no class of their own
    kinds = HydraException | OmegaConfBaseException | YAMLError
    return isinstance(error, kinds) or str(error).startswith(own)


def explain(
    error: Exception,
    overrides: Sequence[str],
    loader: ConfigLoader,
    *,
    command: Sequence[str] = (),
) -> ConfigError:
    """The error that explains why Hydra could not compose.

    Args:
        error: Hydra's.
        overrides: that it was given.
        loader: knows the groups.
        command: all arguments as somebody gave them; empty: the overrides.
    """
    line = _first_line(error)
    for problem in _name_problems(overrides, loader):
        return ConfigError(problem, remedy="`sparsepipe --help` lists groups and options")
    if missing := _PLUGIN.search(line):
        extra = _EXTRAS.get(missing[2])
        return ConfigError(
            f"hydra/{missing[1]}={missing[2]} is not installed",
            remedy=f"pip install 'sparsepipe[{extra}]'"
            if extra
            else "install the plugin of Hydra that has it, or name another",
        )
    for override in _parse(overrides):
        if override.is_sweep_override() and line.startswith("Ambiguous value"):
            key, _, value = str(override.input_line).partition("=")
            as_list, as_text = shlex.quote(f"{key}=[{value}]"), shlex.quote(f'{key}="{value}"')
            return ConfigError(
                f"{override.input_line} has several values",
                remedy=f"to sweep over them add -m: "
                f"{shlex.join(['sparsepipe', '-m', *(command or overrides)])}; "
                f"a list is {as_list}, a text with commas {as_text}",
            )
    return ConfigError(
        f"the configuration cannot be composed: {line}",
        remedy="give settings as key=value, with quotes around a value with spaces or signs of "
        "Hydra's grammar; `sparsepipe --help` lists groups and options",
    )


def _name_problems(overrides: Sequence[str], loader: ConfigLoader) -> Iterator[str]:
    groups = list(groups_of(loader))
    for override in _parse(overrides):
        name = override.key_or_group
        if name in groups and not override.is_delete():
            options = list(_options(name, loader))
            for option in _given_options(override):
                if option not in options:
                    yield (
                        f"'{name}' has no option '{option}'{nearest(option, options)}; "
                        f"valid options: {', '.join(sorted(options))}"
                    )
        elif "." not in name and not name.startswith("hydra"):
            known = sorted({*groups, *Config.__dataclass_fields__})
            if name not in known:
                yield unknown_key(name, known)


def groups_of(loader: ConfigLoader) -> Iterator[str]:
    """The groups; a directory without options of its own stands for the directories in it."""
    for name in loader.list_groups(""):
        if name in ("hydra", PARTS):
            continue
        if loader.get_group_options(name, ObjectType.CONFIG):
            yield name
        else:
            below = loader.get_group_options(name, ObjectType.GROUP)
            yield from (f"{name}/{each}" for each in below if each != PARTS)


def _options(group: str, loader: ConfigLoader) -> Iterator[str]:
    """The options of a group; those of directories in it as ``directory/option``."""
    yield from loader.get_group_options(group, ObjectType.CONFIG)
    for below in loader.get_group_options(group, ObjectType.GROUP):
        yield from (f"{below}/{option}" for option in _options(f"{group}/{below}", loader))


def _parse(overrides: Sequence[str]) -> list[Override]:
    """Those that can be read; Hydra reports the others."""
    parser, found = OverridesParser.create(), []
    for item in map(_with_home_quoted, overrides):
        with suppress(HydraException):
            found.append(parser.parse_override(item))
    return found


def _given_options(override: Override) -> Iterator[str]:
    """The values of an override, those of lists and of sweeps one by one."""
    value: object = override.value()
    if isinstance(value, Glob):
        return  # what it matches is there
    for each in override.sweep_iterator() if override.is_sweep_override() else [value]:
        for option in each if isinstance(each, list) else [each]:
            if not isinstance(option, dict):  # in the place of an option
                text = option.text if isinstance(option, QuotedString) else option
                yield "null" if text is None else str(text)


def _first_line(error: BaseException) -> str:
    if isinstance(error, YAMLError):
        return " ".join(str(error).split())  # with the file and its line
    cause: BaseException = error
    if not str(error).strip() and error.__cause__ is not None:
        cause = error.__cause__
    lines = [line for line in str(cause).splitlines() if line.strip()]
    return lines[0] if lines else type(cause).__name__


def printed_text(config: DictConfig, sources: Iterable[Source]) -> str | None:
    """The text of a task that only prints, such as ``task=list``; None where it makes a run.

    But for the task, the configuration is not resolved: that may require what is missing.

    Raises:
        ConfigError: a key is unknown, or an argument of the task cannot be used.
    """
    refuse_misspelt(config)
    task = _task_of(config)
    if not getattr(task, "prints_only", False):
        return None
    resolved = OmegaConf.to_container(config.task, resolve=True)
    assert isinstance(resolved, dict)
    node = {str(key): value for key, value in resolved.items()}
    check_task(node)
    node.pop("_target_")
    width = shutil.get_terminal_size(_PRINTED_WIDTH).columns
    return str(task(directories_of(sources), width=width, **node))


def refuse_printing_task(spec: RunSpec) -> None:
    """Raises a ConfigError for a task that only prints: it makes no run."""
    if getattr(spec.task.locate(), "prints_only", False):
        raise ConfigError(
            "every job of a sweep would print the same", remedy="give this task without -m"
        )


def _task_of(config: DictConfig) -> Any:
    try:
        return imported(str(OmegaConf.select(config, "task._target_")))
    except (ConfigError, OmegaConfBaseException):
        return None
