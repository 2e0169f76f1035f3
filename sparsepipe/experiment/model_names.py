"""What a model is called, in profiles and in inventories."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def model_name(config: Mapping[str, Any]) -> str:
    """The bare name of the function that builds it."""
    return str(config["model"]["_target_"]).rpartition(".")[2]
