"""What the configuration is with some overrides, for commands that are to yield a given one."""

from __future__ import annotations

import copy
import functools
import logging
from collections.abc import Sequence
from typing import Any

from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from sparsepipe.config import compose
from sparsepipe.errors import ConfigError

log = logging.getLogger(__name__)

_KEPT = 256
"""Configurations that are kept: a report asks for that of each of its cells, for each run."""


def usual(overrides: Sequence[str], keys: Sequence[str]) -> dict[str, Any]:
    """What keys are where the command line has these overrides.

    Args:
        overrides: keys or groups with their values.
        keys: dotted.

    Returns:
        None for a key that is not there; without keys that only the machine at hand tells, and
        nothing where the overrides compose nothing.
    """
    config = _composed(tuple(overrides))
    if config is None:
        return {}
    found = {}
    for key in keys:
        try:
            value = OmegaConf.select(config, key)
            is_node = OmegaConf.is_config(value)
            found[key] = OmegaConf.to_container(value, resolve=True) if is_node else value
        except OmegaConfBaseException:  # such as a variable that is not set here
            continue
    return found


def is_taken(overrides: Sequence[str]) -> bool:
    """Whether overrides are those of a command: what they compose passes the check.

    Args:
        overrides: keys or groups with their values.
    """
    composed = _composed(tuple(overrides))
    if composed is None:
        return False
    config = copy.deepcopy(composed)
    with open_dict(config):
        del config["hydra"]
    try:
        compose.resolve(config)
    except ConfigError:
        return False
    return True


@functools.lru_cache(maxsize=_KEPT)
def _composed(overrides: tuple[str, ...]) -> DictConfig | None:
    """Not resolved: who asks for a key may find other variables than who asked before."""
    loader = compose.config_loader()
    try:
        return loader.load_configuration(
            compose.CONFIG_NAME, compose.admit(overrides), run_mode=RunMode.RUN
        )
    except HydraException as error:
        log.warning("%s", compose.explain(error, overrides, loader).message)
        return None
