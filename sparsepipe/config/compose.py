"""From the command line to a checked, plain configuration.

Hydra composes; its complaints about names are replaced by ours, which name the nearest
valid one.
"""

from __future__ import annotations

import itertools
import os
import re
import shlex
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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

from sparsepipe.config.check import check, check_task, nearest, suggest
from sparsepipe.config.listing import PARTS, Source, directories_of
from sparsepipe.config.run_spec import SETTINGS_BYTES, RunSpec
from sparsepipe.config.scales import KEY, STUDY, in_place_of_scale
from sparsepipe.config.schema import Config
from sparsepipe.config.source_signature import Unreadable, has_attribute_in_source
from sparsepipe.config.sweep_environment import announced_command
from sparsepipe.config.target import locate, present_name
from sparsepipe.config.trained import as_trained, training_of
from sparsepipe.errors import ConfigError
from sparsepipe.utils import reading
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
    """The option of that name, which may look like a number, or what it is otherwise."""
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
_MOVED = {
    "depth": "paper.depth",
    "network": "paper/network",
    "partition": "paper.partition",
    "trial": "paper/trial",
}
"""Present names of groups and keys, by those of earlier versions."""
_NOT_RECORDED = (
    *("checkpoint", "data.cache_dir", "data.root", "force", "hydra", "input", "logger", "paths"),
)
"""How the overrides and groups begin that a run does not record."""
# A dotted key, or the one key of ours that takes a mapping and may start empty.
_PLAIN_ASSIGNMENT = re.compile(r"^(callbacks(?=={)|[A-Za-z_][\w-]*(\.[\w-]+)+)=")

_DIRECTORY_OPTIONS = ("--config-dir", "-cd")
_PLUGIN = re.compile(r"Could not find 'hydra/(launcher|sweeper)/(\w+)'")
_EXTRAS = {
    "joblib": "joblib",
    "optuna": "optuna",
    "submitit_local": "slurm",
    "submitit_slurm": "slurm",
}
"""Extras of this package that bring launchers and sweepers."""
_PRINTED_WIDTH = (100, 24)  # where there is no terminal


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
    """Those that ``--config-dir`` names."""
    given = [item.partition("=") for item in arguments]
    return [
        *(value for option, is_given, value in given if is_given and option in _DIRECTORY_OPTIONS),
        *(value for option, value in itertools.pairwise(arguments) if option in _DIRECTORY_OPTIONS),
    ]


def refuse_unreadable(arguments: Sequence[str]) -> None:
    """Refuses chosen options of further directories that Hydra would wait for or choke on.

    So are the files that their defaults lists name.

    Raises:
        ConfigError: such a file is no regular one, or no YAML; the message names it.
    """
    chosen = [item.lstrip("+").partition("=") for item in arguments if not item.startswith("-")]
    for directory in directories_in(arguments):
        ahead = [
            Path(directory, group.partition("@")[0], f"{option}.yaml")
            for group, _, options in chosen
            for option in options.strip("[]").split(",")
        ]
        seen = set[Path]()
        while ahead:
            file = ahead.pop()
            if file in seen or not os.path.lexists(file):
                continue
            seen.add(file)
            remedy = "correct the file, or leave it out of --config-dir"
            with reading.explained(file, "configuration", error=ConfigError, remedy=remedy):
                text = reading.read_text(file, limit_bytes=SETTINGS_BYTES)
                if (value := reading.parse_yaml(text)) is not None:
                    found = reading.mapping(value, "the whole")
                    ahead += _defaults_of(found, file=file, root=Path(directory))


def _defaults_of(value: Mapping[str, Any], *, file: Path, root: Path) -> Iterator[Path]:
    """The files that a defaults list names, which need not be there. Raises a ValueError where it
    is no list.
    """
    for entry in reading.listing(value.get("defaults") or [], "defaults"):
        for name, options in entry.items() if isinstance(entry, Mapping) else ((entry, ""),):
            words = str(name).partition("@")[0].split()  # such as "override /data"
            group = words[-1] if words else ""
            place = Path(root, group[1:]) if group.startswith("/") else file.parent / group
            for option in options if isinstance(options, list) else (options,):
                yield place / f"{option}.yaml" if options else place.with_name(f"{place.name}.yaml")


def options_first(arguments: Sequence[str]) -> list[str]:
    """The arguments with options before all overrides, as Hydra takes them.

    So ``sparsepipe data=shapes -m seed=0,1`` is the sweep that it looks like.
    """
    overrides = Counter(overrides_of(arguments))
    first: list[str] = []
    last: list[str] = []
    for word in arguments:
        is_override = overrides[word] > 0
        overrides[word] -= is_override
        (last if is_override else first).append(word)
    return [*first, *last]


def overrides_of(arguments: Sequence[str]) -> list[str]:
    """What a command has beside its options, as Hydra reads it.

    Raises:
        ConfigError: there is no such option.
    """
    parser = get_args_parser()
    parser.prog = "sparsepipe"
    given, unknown = parser.parse_known_intermixed_args(list(arguments))
    if unknown:
        options = re.findall(r"--[\w-]+", parser.format_usage())
        raise ConfigError(
            f"there is no option {unknown[0]}{nearest(unknown[0], options)}",
            remedy="`sparsepipe --help` lists what there is",
        )
    return [*given.overrides]


def refuse_printed_sweep(arguments: Sequence[str]) -> None:
    """Raises a ConfigError for a sweep that is to be printed: Hydra prints single jobs."""
    given = get_args_parser().parse_intermixed_args(list(arguments))
    printed = [f"--{name}" for name in ("cfg", "info") if getattr(given, name)]
    if given.multirun and printed:
        raise ConfigError(
            f"-m and {printed[0]}: a sweep is not printed",
            remedy=f"leave out -m and what is swept: {printed[0]} is for one job",
        )


def refuse_missing_directories(arguments: Sequence[str]) -> None:
    """Raises a ConfigError for a ``--config-dir`` that is none."""
    for directory in directories_in(arguments):
        if not Path(directory).is_dir():
            raise ConfigError(
                f"--config-dir {directory}: there is no such directory",
                remedy="name the directory that holds groups of yours: own, where there is "
                "own/data/parts.yaml",
            )


def refuse_values_of_groups(arguments: Sequence[str], loader: ConfigLoader) -> None:
    """Raises a ConfigError where a group is given a number or null, for which Hydra has no error
    of its own.
    """
    groups = set(groups_of(loader))
    for override in _parse(arguments):
        name = override.key_or_group
        is_of_hydra = name.startswith("hydra/")  # plugins have these, of which not all are known
        if override.is_delete() or not (name in groups or is_of_hydra):
            continue
        for option in _given_options(override):
            if not isinstance(option, (str, dict)):  # a mapping stands in the place of one
                written = "null" if option is None else str(option)
                listed = ", ".join(sorted(_options(name, loader)))
                raise ConfigError(
                    f"'{name}' has no option '{written}'"
                    f"{'' if is_of_hydra else f'; there are: {listed}'}",
                    remedy=f"name one that there is, or leave {name}= out",
                )


def admit(arguments: Sequence[str]) -> list[str]:
    """Command-line arguments such that every dotted ``key=value`` reaches the schema.

    Hydra refuses keys that the composed files leave out, even where the schema knows them;
    with its ``++`` prefix it takes them, and :func:`check` decides. Nor does it take a path
    that begins with ``~`` unless it is quoted. Experiments may have something else in the place
    of a scale. A node that a mapping names anew (``optim.schedule={_target_: ...}``) is replaced,
    where Hydra would mix the keys of both.
    """
    words = arguments
    if any(item.lstrip("+").startswith("scale=") for item in arguments):
        words = in_place_of_scale(arguments, config_dir())
    admitted = []
    for item in map(_with_home_quoted, words):
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
    plain["task"]["_target_"] = present_name(plain["task"]["_target_"])
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


def _as_trained(config: DictConfig, given: Sequence[str]) -> DictConfig:
    source = OmegaConf.select(config, "checkpoint")
    if not isinstance(source, str) or not _has(config, "as_trained"):
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
        "overrides": [word for word in words if not word.lstrip("~").startswith(_NOT_RECORDED)],
        "choices": {k: v for k, v in sorted(choices.items()) if not k.startswith(_NOT_RECORDED)},
    }


def explain(
    error: Exception,
    overrides: Sequence[str],
    loader: ConfigLoader,
    *,
    words: Sequence[str] = (),
    command: Sequence[str] = (),
) -> ConfigError:
    """The error that explains why Hydra could not compose.

    Args:
        error: Hydra's.
        overrides: that it was given.
        loader: knows the groups.
        words: what somebody gave beside options, settings or not.
        command: all arguments as somebody gave them; empty: the overrides.
    """
    if (no_setting := _no_setting(words)) is not None:
        return no_setting
    for problem in _name_problems(overrides, loader):
        return ConfigError(problem, remedy="`sparsepipe --help` lists groups and options")
    if missing := _PLUGIN.search(_first_line(error)):
        extra = _EXTRAS.get(missing[2])
        return ConfigError(
            f"hydra/{missing[1]}={missing[2]} is not installed",
            remedy=f"pip install 'sparsepipe[{extra}]'"
            if extra
            else "install the plugin of Hydra that has it, or name another",
        )
    for text in overrides:
        if (found := _problem_of(text, error, command or overrides)) is not None:
            return found
    return ConfigError(
        f"the configuration cannot be composed: {_first_line(error)}",
        remedy="check the overrides; `sparsepipe --help` lists groups and options",
    )


def _no_setting(words: Sequence[str]) -> ConfigError | None:
    """The error of a word that sets nothing, which may belong to the value before it."""
    are_bare = ["=" not in word and not word.startswith("~") for word in words]
    if True not in are_bare:
        return None
    first = are_bare.index(True)
    word, last = words[first], [*are_bare, False].index(False, first)
    hint = f"give settings as {word}=VALUE; `sparsepipe --help` lists what there is"
    if word in ("help", "version"):
        hint = f"`sparsepipe --{word}` is meant"
    elif first and ("{" in words[first - 1] or _takes(words[first - 1].partition("=")[0], "str")):
        whole = " ".join(words[first - 1 : last])
        hint = f"a value with spaces needs quotes: {shlex.quote(whole)}"
    return ConfigError(f"'{word}' is no setting, which is a key=value", remedy=hint)


def _takes(key: str, *kinds: str) -> bool:
    """Whether a key may have a value of such a kind; true of those whose kind is not known here."""
    return "." in key or any(k in str(Config.__annotations__.get(key.lstrip("+"))) for k in kinds)


def _problem_of(text: str, error: Exception, command: Sequence[str]) -> ConfigError | None:
    """What is wrong with an override that Hydra cannot read, or takes for several."""
    key, _, value = text.partition("=")
    quoted = shlex.quote(f'{key}="{value}"')
    try:
        override = OverridesParser.create().parse_override(_with_home_quoted(text))
    except HydraException as unreadable:
        return ConfigError(
            f"{text} cannot be read as key=value: {_first_line(unreadable)}",
            remedy="a value with =, brackets or other signs of Hydra's grammar needs quotes, for "
            f"the shell and for Hydra: {quoted}",
        )
    if override.is_sweep_override() and _first_line(error).startswith("Ambiguous value"):
        return ConfigError(
            f"{text} has several values",
            remedy=f"to sweep over them add -m: {shlex.join(['sparsepipe', '-m', *command])}"
            + f"; a list is {shlex.quote(f'{key}=[{value}]')}" * _takes(key, "list")
            + f"; a text with commas is {quoted}" * _takes(key, "str"),
        )
    return None


def _name_problems(overrides: Sequence[str], loader: ConfigLoader) -> Iterator[str]:
    groups = list(groups_of(loader))
    keys = sorted({*groups, *Config.__dataclass_fields__})
    for override in _parse(overrides):
        name = override.key_or_group
        if name in groups:
            options = list(_options(name, loader))
            for option in _chosen(override):
                if option not in options:
                    yield (
                        f"'{name}' has no option '{option}'{nearest(option, options)}; "
                        f"there are: {', '.join(sorted(options))}"
                    )
        elif "." not in name and not name.startswith("hydra") and name not in keys:
            moved = _MOVED.get(name)
            hint = f" (it is now '{moved}')" if moved else suggest(name, keys)
            yield f"unknown key or group '{name}'{hint}"


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


def _chosen(override: Override) -> list[str]:
    return [str(option) for option in _given_options(override) if option]


def _given_options(override: Override) -> Iterator[Any]:
    """The values of an override, those of lists and of sweeps one by one."""
    value: object = override.value()
    if isinstance(value, Glob):
        return  # what it matches is there
    for each in override.sweep_iterator() if override.is_sweep_override() else [value]:
        for option in each if isinstance(each, list) else [each]:
            yield option.text if isinstance(option, QuotedString) else option


def _first_line(error: BaseException) -> str:
    cause: BaseException = error
    if not str(error).strip() and error.__cause__ is not None:
        cause = error.__cause__
    lines = [line for line in str(cause).splitlines() if line.strip()]
    return lines[0] if lines else type(cause).__name__


def printed_text(config: DictConfig, sources: Iterable[Source]) -> str | None:
    """The text of a task that only prints, such as ``task=list``; None where it makes a run.

    But for the task, the configuration is neither resolved nor checked: that may import much and
    require what is missing.

    Raises:
        ConfigError: an argument of the task cannot be used.
    """
    task = _printing_task(config)
    if task is None:
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
    if _is_set(spec.task.path, "prints_only"):
        raise ConfigError(
            "every job of a sweep would print the same", remedy="give this task without -m"
        )


def _printing_task(config: DictConfig) -> Callable[..., Any] | None:
    if not _has(config, "prints_only"):
        return None
    found: Callable[..., Any] = locate(str(OmegaConf.select(config, "task._target_")))
    return found


def _has(config: DictConfig, attribute: str) -> bool:
    """Whether the configuration's task has an attribute; False where there is no such task."""
    try:
        return _is_set(str(OmegaConf.select(config, "task._target_")), attribute)
    except (ConfigError, OmegaConfBaseException):
        return False  # reported by the check of the whole configuration


def _is_set(target: str, attribute: str) -> bool:
    """Whether a task has an attribute; tasks are not imported for this."""
    try:
        return has_attribute_in_source(present_name(target), attribute)
    except Unreadable:
        return bool(getattr(locate(target), attribute, False))
