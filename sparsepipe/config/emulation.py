"""Whether a configuration trains on an emulated cluster: ``hardware.emulate``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from sparsepipe.config.schema import Emulation
from sparsepipe.errors import ConfigError

_KEYS = tuple(entry.name for entry in fields(Emulation))


def emulation_of(config: Mapping[str, Any]) -> Emulation | None:
    """How the hardware is emulated; None where it is used as it is.

    Args:
        config: resolved and checked.

    Raises:
        ConfigError: something is said of an emulation that is not asked for.
    """
    said = {key: value for key, value in config["hardware"].items() if key in _KEYS}
    found = Emulation(**said)
    if found.emulate:
        return found
    if other := [key for key in said if key != "emulate"]:
        raise ConfigError(
            f"hardware.{other[0]} is set, and hardware.emulate is not",
            remedy=f"set hardware.emulate=true, or leave hardware.{other[0]} out",
        )
    return None


def without_emulation(hardware: Mapping[str, Any]) -> dict[str, Any]:
    """The node that builds the inventory."""
    return {key: value for key, value in hardware.items() if key not in _KEYS}


def limit_of(trainer: Mapping[str, Any]) -> int | None:
    """How many minibatches each rank that reads is to take, as a whole number; else None."""
    limit = trainer["limit_train_batches"]
    return limit if isinstance(limit, int) and limit > 0 else None
