"""Groups runs into tables: in a table, the runs' commands differ only in the choice of a cell.

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
"""Values by name that a table's runs have in common; a run that lacks a name fits any value."""

_WITHOUT_EFFECT = (
    *("experiment", "scale", "paper.extent", "name", "seed", "tags", "objective", "debug"),
    *("data.seed", "data.num_workers", "data.cache_workers", "data.lock_wait_s"),
    *("trainer.enable_autolog_hparams", "trainer.enable_model_summary"),
    *("trainer.enable_progress_bar", "trainer.log_every_n_steps", "trainer.profiler"),
)
"""Overrides that change no figure, change figures only as seeds do, or are handled elsewhere."""
_GROUPS = ("backend", "callbacks", "data", "loss", "model", "optim", "trainer")


def cell_of(row: Row, *names: str) -> Any:
    """The values of ``names`` in the ``study.cell`` of a run, as a tuple."""
    return tuple(row.get(f"study.cell.{name}") for name in names)


def of_training(key: str) -> bool:
    """Whether a key of the configuration affects the results of a training."""
    places = ("data.cache_dir", "data.root", "data.common.seed")
    if key == "matmul_precision":  # what trainer.matmul_precision led to
        return True
    return is_below(key, _GROUPS) and not is_below(key, (*_WITHOUT_EFFECT, *places))


def of_memory(key: str) -> bool:
    """Whether a key of the configuration affects the memory of a training step."""
    if key in ("optim.optimizer._target_", "trainer.precision"):
        return True
    of_length = key.startswith(("callbacks.", "optim.", "task.", "trainer."))
    return key != "data.batch_size" and not of_length


def overrides_beside(row: Row, of_cells: Sequence[str]) -> tuple[str, ...]:
    """Overrides of a run's command that affect its figures, in alphabetical order. ``of_cells``:
    keys, groups and whole overrides that choose the cell, which are left out.
    """
    left_out = (*_WITHOUT_EFFECT, *of_cells)
    words = map(str, row.get("hydra.overrides") or ())
    return tuple(
        sorted(w for w in words if not {w, w.lstrip("~").partition("=")[0]} & set(left_out))
    )


def tables_of(rows: Iterable[Row], key_of: Callable[[Row], Key]) -> list[tuple[Key, list[Row]]]:
    """Groups runs into tables; returns each table's key and its runs. A run may be in several.

    A tuple in a key contains overrides. A run whose command lacks some of them still belongs to
    the table if its configuration has the same values.
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
        for word in set(expected) - set(value):  # a run's value may be the same without it
            key, _, text = word.partition("=")
            found = row.get(key if "." in key else f"hydra.choices.{key}")
            if found is None or (str(found) != text and found != yaml.safe_load(text)):
                return False
    return True
