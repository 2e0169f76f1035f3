"""What the configuration is with some overrides, for commands that are to yield a given one."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from sparsepipe.experiment import compose

log = logging.getLogger(__name__)


def usual(overrides: Sequence[str], keys: Sequence[str]) -> dict[str, Any]:
    """What keys are where the command line has these overrides.

    Args:
        overrides: keys or groups with their values.
        keys: dotted.

    Returns:
        None for a key that is not there; without keys that only the machine at hand tells, and
        nothing where the overrides compose nothing.
    """
    loader = compose.config_loader()
    try:
        config = loader.load_configuration(
            compose.CONFIG_NAME, list(overrides), run_mode=RunMode.RUN
        )
    except HydraException as error:
        log.warning("%s", compose.explain(error, overrides, loader).message)
        return {}
    found = {}
    for key in keys:
        try:
            found[key] = OmegaConf.select(config, key)
        except OmegaConfBaseException:  # such as a variable that is not set here
            continue
    return found
