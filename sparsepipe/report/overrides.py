"""What a run was made with beyond the command of its cell: its overrides.

A report knows of each cell the command that fills it. A run whose configuration is not what that
command gives was made with overrides, such as ``data.batch_size=8``; figures of such runs are no
figures of those without. Pure, but for what tells the configuration of a command.
"""

from __future__ import annotations

import copy
import functools
import json
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from sparsepipe.config import compose
from sparsepipe.errors import ConfigError
from sparsepipe.runs.ledger_table import Row

Usual = Callable[[Sequence[str], Sequence[str]], Mapping[str, Any]]
"""What some keys are where the command line has some overrides; without those that nobody knows."""
_PLAIN = re.compile(r"(?!(null|true|false|nan|inf)$)[A-Za-z_][\w./-]*", re.IGNORECASE)
"""Text that needs no quotes."""
log = logging.getLogger(__name__)

Matters = Callable[[str], bool]
"""Whether a key of a configuration counts."""

GROUPS = ("backend", "callbacks", "data", "model", "optim", "trainer")
"""Those of a configuration whose keys may count."""
_NO_MATTER = (
    *("data.cache_workers", "data.lock_wait_s", "data.num_workers", "data.seed"),
    *("trainer.enable_autolog_hparams", "trainer.enable_model_summary"),
    *("trainer.enable_progress_bar", "trainer.log_every_n_steps", "trainer.profiler"),
)
"""What changes no figure, or only as seeds do."""
_OPTIMIZERS = {
    # The class of the optimizer and that of the schedule
    ("SGD", ""): "sgd",
    ("SGD", "OneCycleLR"): "sgd_onecycle",
    ("AdamW", "CosineAnnealingLR"): "adamw",
}
"""Options of ``optim``."""
_OPTIMIZER, _SCHEDULE = "optim.optimizer._target_", "optim.schedule.factory._target_"
_MAY_BE_NULL = {
    "optim.schedule._target_": "optim.schedule",
    "parallel.search.bandwidth_bytes_per_s": "parallel.search.bandwidth_bytes_per_s",
    "trainer.limit_test_batches": "trainer.limit_test_batches",
}
"""Keys that say something where a run tells others of their group and not them; what is null."""


def of_training(key: str) -> bool:
    """Whether a key of a training's configuration counts."""
    below = any(key == name or key.startswith(f"{name}.") for name in _NO_MATTER)
    return key.partition(".")[0] in GROUPS and not below


def of_memory(key: str) -> bool:
    """Likewise, of the memory that its steps take."""
    if key in (_OPTIMIZER, "trainer.precision"):
        return True
    of_length = key.startswith(("callbacks.", "optim.", "trainer."))
    return of_training(key) and key != "data.batch_size" and not of_length


def overrides_of(
    row: Row, command: Sequence[str], usual: Usual, matters: Matters
) -> tuple[str, ...]:
    """The overrides that give a run's configuration together with a command; most have none.

    Args:
        row: the run; what it does not tell is not held against it.
        command: overrides of the cell that the run is for.
        usual: tells the configuration of a command.
        matters: keys that count.
    """
    found: dict[str, str] = {}
    while True:
        wanted = usual((*command, *found.values()), (*_keys(row, matters), _OPTIMIZER, _SCHEDULE))
        if "optim" not in found and (option := _optimizer(row, wanted, matters)):
            found["optim"] = f"optim={option}"
            continue
        unlike = [key for key in _unlike(row, wanted, matters) if key not in found]
        if not unlike:
            return tuple(found.values())
        # One at a time: others may follow from it.
        null = row.get(unlike[0]) is None
        name = _MAY_BE_NULL.get(unlike[0], unlike[0]) if null else unlike[0]
        found[unlike[0]] = word(name, row.get(unlike[0]))


def unlike_words(
    row: Row, command: Sequence[str], usual: Usual, matters: Matters
) -> tuple[str, ...]:
    """What a run has that its command does not give, as overrides; also what follows from others.

    Args:
        row: the run; what it does not tell is not held against it.
        command: overrides of the cell that the run is for.
        usual: tells the configuration of a command.
        matters: keys that count.
    """
    wanted = usual(command, _keys(row, matters))
    return tuple(word(key, row.get(key)) for key in _unlike(row, wanted, matters))


def is_made_by(
    row: Row, command: Sequence[str], others: Sequence[str], usual: Usual, matters: Matters
) -> bool:
    """Whether a command with overrides gives a run's configuration, as far as the run tells it.

    Args:
        row: the run.
        command: overrides of the cell that the run is for.
        others: further ones.
        usual: tells the configuration of a command.
        matters: keys that count.
    """
    set_keys = [each.partition("=")[0] for each in others]
    null = [key for key in set_keys if matters(key) and key not in row and _has_none(row, key)]
    wanted = usual((*command, *others), (*_keys(row, matters), *null))
    lacks = any(wanted.get(key) is not None for key in null)
    return not lacks and not _unlike(row, wanted, matters)


def _has_none(row: Row, key: str) -> bool:
    """Whether a run would tell a key if it had one: not where all that is beside it is absent."""
    beside = key.rpartition(".")[0]
    return key.startswith("callbacks.") or any(name.startswith(f"{beside}.") for name in row)


def _keys(row: Row, matters: Matters) -> tuple[str, ...]:
    told = {key for key in row if "." in key and matters(key)}
    groups = {key.partition(".")[0] for key in told}
    null = {key for key in _MAY_BE_NULL if matters(key) and key.partition(".")[0] in groups}
    return tuple(sorted(told | null))


def _unlike(row: Row, wanted: Mapping[str, Any], matters: Matters) -> list[str]:
    return [
        key for key in _keys(row, matters) if key in wanted and not _same(row.get(key), wanted[key])
    ]


def _same(told: Any, wanted: Any) -> bool:
    """Whether a value of a ledger is one of a configuration; text where others have no number."""
    return bool(told == wanted) or (
        isinstance(told, str) and told in (str(wanted), json.dumps(wanted, default=str))
    )


def _optimizer(row: Row, wanted: Mapping[str, Any], matters: Matters) -> str:
    """The option of ``optim`` that comes nearest to a run's; empty where that is the usual one."""
    own, usual = _classes(row, matters), _classes(wanted, matters)
    if not own[0] or not usual[0] or own == usual:
        return ""
    alike = [option for classes, option in _OPTIMIZERS.items() if classes[0] == own[0]]
    return _OPTIMIZERS.get(own) or ("" if own[0] == usual[0] else next(iter(alike), ""))


def _classes(values: Mapping[str, Any], matters: Matters) -> tuple[str, str]:
    """Bare names of optimizer and schedule, empty where there is none or that does not count."""
    optimizer, schedule = (
        str(values.get(key) or "").rpartition(".")[2] if matters(key) else ""
        for key in (_OPTIMIZER, _SCHEDULE)
    )
    return optimizer, schedule


def word(key: str, value: Any) -> str:
    """An override as the command line has it."""
    return f"{key}={_text(value)}"


def _text(value: Any) -> str:
    """As Hydra reads it; a share of 1.0 is another thing there than 1."""
    if isinstance(value, list | tuple):
        return f"[{','.join(map(_text, value))}]"
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{key}:{_text(item)}" for key, item in value.items()) + "}"
    if isinstance(value, float) and value > 1 and value.is_integer():
        return str(int(value))
    is_plain = isinstance(value, str) and _PLAIN.fullmatch(value)
    return str(value) if is_plain else json.dumps(value, ensure_ascii=False)


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
