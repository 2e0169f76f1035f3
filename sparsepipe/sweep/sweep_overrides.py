"""Hydra's configuration for the time in which interpolations may ask for it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig


@contextmanager
def answering(config: DictConfig) -> Iterator[None]:
    """Lets ``${hydra:...}`` be answered by a configuration, and then by what did so before."""
    before = HydraConfig.instance().cfg
    HydraConfig.instance().set_config(config)
    try:
        yield
    finally:
        HydraConfig.instance().cfg = before
