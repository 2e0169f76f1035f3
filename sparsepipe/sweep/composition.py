"""Composes a sweep's jobs from overrides to checked configurations, or refuses the whole sweep."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import Any

from hydra.core.config_loader import ConfigLoader
from hydra.core.hydra_config import HydraConfig
from hydra.core.object_type import ObjectType
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import IntervalSweep, Override
from hydra.core.utils import setup_globals
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from sparsepipe.config import compose
from sparsepipe.config.check import UNKNOWN_KEY
from sparsepipe.config.compose import CONFIG_NAME
from sparsepipe.config.run_spec import RunSpec
from sparsepipe.config.sweep_environment import sweep_directory
from sparsepipe.errors import ConfigError
from sparsepipe.sweep.record import SweptJob


@dataclass(slots=True, kw_only=True)
class ComposedJob:
    """A job, its configuration including ``hydra``, and its spec or the error that refuses it."""

    job: SweptJob
    whole: DictConfig
    spec: RunSpec | None = None
    refused: Exception | None = None


def compose_job(
    loader: ConfigLoader, sweep: DictConfig, overrides: Sequence[str], *, number: int
) -> ComposedJob:
    """Composes the job ``number`` (from 0) of a sweep; keeps the error if the job is refused."""
    whole = loader.load_sweep_config(sweep, list(overrides))
    with open_dict(whole):
        whole.hydra.job.id = str(number)
        whole.hydra.job.num = number
    job = SweptJob(
        number=number,
        overrides=tuple(map(str, whole.hydra.overrides.task)),
        sweep=sweep_directory(sweep),
    )
    found = ComposedJob(job=job, whole=whole)
    try:
        with hydra_config(whole):
            found.spec = compose.resolve(task_config(whole))
    except Exception as error:
        found.refused = error
    return found


@contextmanager
def hydra_config(config: DictConfig) -> Iterator[None]:
    """Resolves ``${hydra:...}`` from a configuration while the block runs."""
    before = HydraConfig.instance().cfg
    HydraConfig.instance().set_config(config)
    try:
        yield
    finally:
        HydraConfig.instance().cfg = before


def task_config(whole: DictConfig) -> DictConfig:
    """Returns a copy of a configuration without ``hydra``."""
    config = copy.deepcopy(whole)
    with open_dict(config):
        del config["hydra"]
    return config


def refuse_within_torchrun() -> None:
    """Raises a ConfigError if torchrun or the like has started this process as a rank."""
    if "LOCAL_RANK" in os.environ:
        raise ConfigError(
            "a sweep (-m) cannot be started with torchrun, which sets LOCAL_RANK",
            remedy="start the command without torchrun and without LOCAL_RANK in its environment: "
            "every job starts its own ranks",
        )


def refuse_several(overrides: Sequence[str], loader: ConfigLoader) -> None:
    """Raises a ConfigError if one of several swept experiments chooses a launcher or swept values.

    Hydra would ignore these, since it composes launcher and sweeper before single jobs.
    """
    for word in overrides:
        if not word.lstrip("+").startswith("experiment="):
            continue
        try:
            (override,) = OverridesParser.create(loader).parse_overrides([word])
            swept = override.is_sweep_override()
            names = [*override.sweep_string_iterator()] if swept else []
            # A launcher and sweeper on the command line count for all experiments.
            words = [each for each in overrides if each.startswith(("hydra/", "hydra.searchpath="))]
            chosen: list[Any] = []  # without an experiment, then with each
            for more in ([], *([f"experiment={each}"] for each in names)):
                config = loader.load_configuration(
                    CONFIG_NAME, [*words, *more], run_mode=RunMode.MULTIRUN
                )
                kept = OmegaConf.masked_copy(config.hydra, ["launcher", "sweeper"])
                chosen.append(OmegaConf.to_container(kept, resolve=False))
            own = [n for n, each in zip(names, chosen[1:], strict=True) if each != chosen[0]]
        except (HydraException, OmegaConfBaseException):
            return  # Hydra raises its own error
        if own:
            raise ConfigError(
                f"{word}: the launcher and swept values of {', '.join(own)} apply only if "
                "a sweep has a single experiment",
                remedy="run a separate command for each experiment",
            )


def refuse_unknown_keys(overrides: Sequence[str], loader: ConfigLoader) -> None:
    """Raises a ConfigError if a sweep's command has a key that is unknown in all of its jobs.

    Hydra would compose all jobs first. This function composes the first job and, while a key is
    still unknown, jobs with other options of swept groups.
    """
    setup_globals()
    first: ConfigError | None = None
    try:
        sweep = loader.load_configuration(CONFIG_NAME, [*overrides], run_mode=RunMode.MULTIRUN)
        params = OmegaConf.select(sweep, "hydra.sweeper.params")
        own: dict[Any, Any] = dict(params) if isinstance(params, DictConfig) else {}
        words = [*(f"{name}={value}" for name, value in own.items()), *overrides]
        parsed = OverridesParser.create(loader).parse_overrides(words)
        unknown = {each.key_or_group for each in parsed if "." in each.key_or_group}
        job = {key: word for each in parsed for key, word in islice(_swept_options(each), 1)}
        jobs = [job]  # the first, and those with another option of one group, or of a _target_
        for each in parsed:
            name = each.key_or_group
            if name.endswith("_target_") or loader.get_group_options(name, ObjectType.CONFIG):
                others = islice(_swept_options(each), 1, None)
                jobs += [{**job, key: word} for key, word in others]
        for job in jobs:
            refused = compose_job(loader, sweep, [*job.values()], number=0).refused
            if not isinstance(refused, ConfigError):
                return
            if not (unknown := unknown.intersection(UNKNOWN_KEY.findall(refused.message))):
                return
            first = first or refused
    except (HydraException, OmegaConfBaseException):
        return  # Hydra raises its own error
    if first is not None:
        raise first


def _swept_options(override: Override) -> Iterator[tuple[str, str]]:
    """Yields the key and override for each value: (``seed``, ``seed=0``), ... for ``seed=0,1``."""
    key, value = override.get_key_element(), override.value()
    if isinstance(value, IntervalSweep):
        yield key, f"{key}={value.start}"
    elif override.is_sweep_override():
        yield from ((key, f"{key}={option}") for option in override.sweep_string_iterator())
    else:
        yield key, f"{key}={override.get_value_element_as_str()}"
