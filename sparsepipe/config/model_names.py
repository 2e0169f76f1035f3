"""What a model is called, in profiles and in inventories, and what makes it another one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def model_name(config: Mapping[str, Any]) -> str:
    """The bare name of the function that builds it."""
    return str(config["model"]["_target_"]).rpartition(".")[2]


def model_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """What the function is called with, such as a width; without objects such as the backend."""
    return {
        key: value
        for key, value in config["model"].items()
        if not key.startswith("_") and not (isinstance(value, Mapping) and "_target_" in value)
    }
