"""Overrides that set a run apart from others of the same cell.

A report knows the command that fills each cell. Figures of a run that was made with further
overrides, such as ``data.batch_size=8``, must not be mixed with figures of runs without them. Runs
record their overrides (``hydra.overrides`` in ``result.json``); of a run that an earlier version
made without recording them, its configuration is compared with that of the cell's command.
"""

from __future__ import annotations

import functools
import json
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from sparsepipe.config import compose
from sparsepipe.runs.ledger_table import Row

Composed = Callable[[Sequence[str], Sequence[str]], Mapping[str, Any]]
"""Values of some keys in the configuration that overrides compose, without unknown ones."""
Matters = Callable[[str], bool]
"""Whether a group or dotted key of the configuration affects the figures of a chapter."""

GROUPS = ("backend", "callbacks", "data", "model", "optim", "trainer")
"""Groups of the configuration that may affect figures of a training."""
_NO_MATTER = (
    *("data.cache_workers", "data.lock_wait_s", "data.num_workers", "data.seed"),
    *("data.cache_dir", "data.root"),
    *("trainer.enable_autolog_hparams", "trainer.enable_model_summary"),
    *("trainer.enable_progress_bar", "trainer.log_every_n_steps", "trainer.profiler"),
)
"""Keys that change no figure, or only as seeds do."""
_MAY_BE_NULL = {
    "optim.schedule._target_": "optim.schedule",
    "parallel.search.bandwidth_bytes_per_s": "parallel.search.bandwidth_bytes_per_s",
    "trainer.limit_test_batches": "trainer.limit_test_batches",
}
"""Keys that are null in a run that has others of their group and not them, and what to set."""
_OVERRIDES, _CHOICE = "hydra.overrides", "hydra.choices."
_PLAIN = re.compile(r"(?!(null|true|false|nan|inf)$)[A-Za-z_][\w./-]*", re.IGNORECASE)
"""Text that needs no quotes."""
_KEPT = 256
"""Configurations that are kept: a report composes one for each cell, again for each run."""
log = logging.getLogger(__name__)


def of_training(key: str) -> bool:
    """Whether a key affects the figures of a training."""
    below = any(key == name or key.startswith(f"{name}.") for name in _NO_MATTER)
    return key.partition(".")[0] in GROUPS and not below


def of_memory(key: str) -> bool:
    """Whether a key affects the memory that a training step takes."""
    if key in ("optim.optimizer._target_", "trainer.precision"):
        return True
    of_length = key.startswith(("callbacks.", "optim.", "trainer."))
    return of_training(key) and key != "data.batch_size" and not of_length


def overrides_of(
    row: Row, command: Sequence[str], composed: Composed, matters: Matters
) -> tuple[str, ...]:
    """The overrides that a run was made with and that its cell's command does not imply."""
    if row.get(_OVERRIDES) is not None:
        words = _recorded(row, matters)
        expected = composed(command, [_key_of(name) for name in words])
        return tuple(words[name] for name in words if _differs(row, name, expected))
    expected = composed(command, _keys(row, matters))
    return tuple(
        word(_MAY_BE_NULL.get(key, key) if row.get(key) is None else key, row.get(key))
        for key in _keys(row, matters)
        if _differs(row, key, expected)
    )


def is_made_by(
    row: Row, command: Sequence[str], others: Sequence[str], composed: Composed, matters: Matters
) -> bool:
    """Whether a command with further overrides gives a run's configuration."""
    set_keys = [each.partition("=")[0] for each in others]
    null = [key for key in set_keys if matters(key) and key not in row and _has_none(row, key)]
    own = (*_keys(row, matters), *_recorded(row, matters))
    expected = composed((*command, *others), (*map(_key_of, own), *null))
    lacks = any(expected.get(key) is not None for key in null)
    return not lacks and not any(_differs(row, name, expected) for name in own)


def _recorded(row: Row, matters: Matters) -> dict[str, str]:
    """Overrides that a run has recorded and that matter, by their groups and keys."""
    words = {str(each).partition("=")[0]: str(each) for each in row.get(_OVERRIDES) or ()}
    return {name: each for name, each in words.items() if matters(name)}


def _key_of(name: str) -> str:
    """The key of a composed configuration for a dotted key or the choice of a group."""
    return name if "." in name else f"hydra.runtime.choices.{name}"


def _has_none(row: Row, key: str) -> bool:
    """Whether a missing key is null: rows leave out null keys, earlier ones whole groups."""
    beside = key.rpartition(".")[0]
    return key.startswith("callbacks.") or (
        "." in key and any(name.startswith(f"{beside}.") for name in row)
    )


def _keys(row: Row, matters: Matters) -> tuple[str, ...]:
    found = {key for key in row if "." in key and matters(key)}
    groups = {key.partition(".")[0] for key in found}
    null = (key for key in _MAY_BE_NULL if matters(key) and key.partition(".")[0] in groups)
    return tuple(sorted(found.union(null)))


def _differs(row: Row, name: str, expected: Mapping[str, Any]) -> bool:
    """Whether a run has another value of a dotted key, or another choice of a group."""
    key = _key_of(name)
    value = row.get(name if "." in name else f"{_CHOICE}{name}")
    return key in expected and not _same(value, expected[key])


def _same(found: Any, expected: Any) -> bool:
    """Whether a ledger's value, which may be text in a column of several types, is as expected."""
    return bool(found == expected) or (
        isinstance(found, str) and found in (str(expected), json.dumps(expected, default=str))
    )


def word(key: str, value: Any) -> str:
    """An override as the command line has it."""
    return f"{key}={_text(value)}"


def _text(value: Any) -> str:
    """A value in Hydra's syntax, in which 1.0 and 1 differ."""
    if isinstance(value, list | tuple):
        return f"[{','.join(map(_text, value))}]"
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{key}:{_text(item)}" for key, item in value.items()) + "}"
    if isinstance(value, float) and value > 1 and value.is_integer():
        return str(int(value))
    is_plain = isinstance(value, str) and _PLAIN.fullmatch(value)
    return str(value) if is_plain else json.dumps(value, ensure_ascii=False)


def composed_values(overrides: Sequence[str], keys: Sequence[str]) -> dict[str, Any]:
    """Values of keys in the configuration that overrides compose.

    Returns:
        None for a missing key. Keys that depend on an unset environment variable are left out, and
        the result is empty if the overrides do not compose.
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


@functools.lru_cache(maxsize=_KEPT)
def _composed(overrides: tuple[str, ...]) -> DictConfig | None:
    """Not resolved, since environment variables may change between lookups."""
    loader = compose.config_loader()
    try:
        return loader.load_configuration(
            compose.CONFIG_NAME, compose.admit(overrides), run_mode=RunMode.RUN
        )
    except HydraException as error:
        log.warning("%s", compose.explain(error, overrides, loader).message)
        return None
