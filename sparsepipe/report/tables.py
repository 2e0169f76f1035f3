"""Groups runs into tables: commands of a table's runs differ only in what chooses the cell.

A run's result contains the cell that it fills (``study.exhibit``, ``study.cell.*``) and the
overrides of its command (``hydra.overrides``). Overrides that do not choose the cell, such as
``data.batch_size=8``, put the run into another table.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import yaml

from sparsepipe.config.run_spec import is_below
from sparsepipe.runs.ledger_table import Row

Key = Mapping[str, Any]
"""Common values of a table's runs; a run that lacks an entry fits any value of it."""

_WITHOUT_EFFECT = (
    *("experiment", "scale", "paper.extent", "name", "seed", "tags", "objective", "debug"),
    *("data.seed", "data.num_workers", "data.cache_workers", "data.lock_wait_s"),
    *("trainer.enable_autolog_hparams", "trainer.enable_model_summary"),
    *("trainer.enable_progress_bar", "trainer.log_every_n_steps", "trainer.profiler"),
)
"""Overrides that change no figure, change it only as seeds do, or are treated elsewhere."""
_GROUPS = ("backend", "callbacks", "data", "model", "optim", "trainer")


def cell_of(row: Row, *names: str) -> Any:
    """The values of ``names`` in the ``study.cell`` of a run, as a tuple."""
    return tuple(row.get(f"study.cell.{name}") for name in names)


def of_training(key: str) -> bool:
    """Whether a key of the configuration affects the figures of a training."""
    places = ("data.cache_dir", "data.root", "data.common.seed")
    return is_below(key, _GROUPS) and not is_below(key, (*_WITHOUT_EFFECT, *places))


def of_memory(key: str) -> bool:
    """Whether a key of the configuration affects the memory of a training step."""
    if key in ("optim.optimizer._target_", "trainer.precision"):
        return True
    of_length = key.startswith(("callbacks.", "optim.", "task.", "trainer."))
    return key != "data.batch_size" and not of_length


def overrides_beside(row: Row, of_cells: Sequence[str]) -> tuple[str, ...]:
    """Overrides of a run's command that affect its figures, in alphabetical order, without those
    that choose the cell: the keys, groups and whole overrides of ``of_cells``.
    """
    left_out = (*_WITHOUT_EFFECT, *of_cells)
    words = map(str, row.get("hydra.overrides") or ())
    return tuple(
        sorted(w for w in words if not {w, w.lstrip("~").partition("=")[0]} & set(left_out))
    )


def tables_of(rows: Iterable[Row], key_of: Callable[[Row], Key]) -> list[tuple[Key, list[Row]]]:
    """Groups runs by the values that they have in common; a run may belong to several tables.

    Tuples in a key are overrides. A run without some of them belongs to their table as well if its
    configuration has the same values.
    """
    pairs = [(row, key_of(row)) for row in rows]
    found: list[Key] = []
    for _, key in sorted(pairs, key=lambda pair: -len(pair[1])):
        alike = [each for each in found if all(each.get(n, key[n]) == key[n] for n in key)]
        for joined in [{**each, **key} for each in alike] or [dict(key)]:
            if joined not in found:
                found.append(joined)
    whole = [key for key in found if not any(key.items() < other.items() for other in found)]
    return [(key, [row for row, own in pairs if _belongs(row, own, key)]) for key in whole]


def _belongs(row: Row, own: Key, table: Key) -> bool:
    for name, value in own.items():
        expected = table.get(name, value)
        if not isinstance(value, tuple):
            if value != expected:
                return False
            continue
        if not set(value) <= set(expected):
            return False
        for word in set(expected) - set(value):  # a run without it may have its value
            key, _, text = word.partition("=")
            found = row.get(key if "." in key else f"hydra.choices.{key}")
            if found is None or (str(found) != text and found != yaml.safe_load(text)):
                return False
    return True
