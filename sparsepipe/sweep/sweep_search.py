"""The end of a search (``hydra/sweeper=optuna``): what it found, by the names that were given."""

from __future__ import annotations

import logging
from typing import Any

import yaml
from hydra.experimental.callback import Callback
from omegaconf import DictConfig

from sparsepipe.config.sweep_directory import sweep_directory
from sparsepipe.results.files import write_text_atomic
from sparsepipe.sweep.swept import near

log = logging.getLogger(__name__)

_FILE = "optimization_results.yaml"
"""Optuna's sweeper writes it into the sweep's directory."""


class SweepSearch(Callback):
    """Writes the best parameters as the command line takes them.

    The sweeper names them as Hydra got them, with the ``++`` that lets Hydra take keys which the
    composed files leave out (:func:`sparsepipe.config.compose.admit`).
    """

    def on_multirun_end(self, config: DictConfig, **kwargs: Any) -> None:
        """Does so where there was a search; a sweep without one has no such file."""
        file = sweep_directory(config) / _FILE
        if not file.is_file():
            return
        found = as_given(yaml.safe_load(file.read_text()))
        write_text_atomic(file, yaml.safe_dump(found, sort_keys=False))
        log.info("the best of the search: %s", near(file))


def as_given(found: Any) -> Any:
    """The same with all names as they were given: ``++data.batch_size`` is ``data.batch_size``."""
    if isinstance(found, dict):
        return {str(name).lstrip("+"): as_given(value) for name, value in found.items()}
    return [as_given(each) for each in found] if isinstance(found, list) else found
