"""Runs that may stand in one table: those whose commands differ in their cells only.

A run says in its result which cell it fills (``study.exhibit``, ``study.cell.*``) and with which
overrides it was made (``hydra.overrides``). Overrides beside those that choose the cell, such as
``data.batch_size=8``, give it a table of its own.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import yaml

from sparsepipe.runs.ledger_table import Row

Key = Mapping[str, Any]
"""What the runs of a table have in common. A run that lacks an entry goes with any value of it."""

_WITHOUT_EFFECT = (
    *("experiment", "scale", "paper.extent", "name", "seed", "tags", "objective", "debug"),
    *("data.seed", "data.num_workers", "data.cache_workers", "data.lock_wait_s"),
    *("trainer.enable_autolog_hparams", "trainer.enable_model_summary"),
    *("trainer.enable_progress_bar", "trainer.log_every_n_steps", "trainer.profiler"),
)
"""Overrides that change no figure, change it as seeds do, or have a place of their own."""
_GROUPS = ("backend", "callbacks", "data", "model", "optim", "trainer")


def cell_of(row: Row, *names: str) -> Any:
    """The cell that a run fills, as a tuple of what ``study.cell`` has under these names."""
    return tuple(row.get(f"study.cell.{name}") for name in names)


def is_below(name: str, groups: Iterable[str]) -> bool:
    """Whether a dotted key is one of these or below one of them."""
    return any(name == each or name.startswith(f"{each}.") for each in groups)


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
    """Overrides of a run's command that affect its figures, in alphabetical order.

    Args:
        row: a finished run.
        of_cells: keys and groups that choose the cell, or that the table's title has otherwise;
            or whole overrides.
    """
    left_out = (*_WITHOUT_EFFECT, *of_cells)
    words = map(str, row.get("hydra.overrides") or ())
    return tuple(
        sorted(w for w in words if not {w, w.lstrip("~").partition("=")[0]} & set(left_out))
    )


def tables_of(rows: Iterable[Row], key_of: Callable[[Row], Key]) -> list[tuple[Key, list[Row]]]:
    """Runs by what they have in common; a run may belong to several tables.

    Entries of a key that are tuples are overrides. A run without some of them belongs to their
    table as well if its configuration has the same values.
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
    def fits(value: Any, expected: Any) -> bool:
        if not isinstance(value, tuple):
            return bool(value == expected)
        further = set(expected) - set(value)
        return set(value) <= set(expected) and all(_holds(word, row) for word in further)

    return all(fits(value, table[name]) for name, value in own.items() if name in table)


def _holds(word: str, row: Row) -> bool:
    """Whether a run that was made without an override has its value all the same."""
    name, _, text = word.partition("=")
    value = row.get(name if "." in name else f"hydra.choices.{name}")
    return value is not None and (str(value) == text or bool(value == yaml.safe_load(text)))


_FROM_ENVIRONMENT = re.compile(r"[\w.]+=\$\w+")


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepCommand:
    """Makes the command line that fills a table.

    Attributes:
        experiment: whose sweep it is.
        name: that its runs were given in place of the experiment's own, if any.
        outputs: the directory that its runs are written to; None: the usual one.
    """

    experiment: str
    name: str | None = None
    outputs: str | None = None

    def text(self, *overrides: str, environment: Sequence[str] = ()) -> str:
        """The command with further overrides, and variables such as ``OMP_NUM_THREADS=1``."""
        words = ["-m", f"experiment={self.experiment}"]
        words += [f"name={self.name}"] if self.name else []
        words += overrides
        words += [f"paths.outputs={self.outputs}"] if self.outputs else []
        # In double quotes a shell replaces variables.
        quoted = [f'"{w}"' if _FROM_ENVIRONMENT.fullmatch(w) else shlex.quote(w) for w in words]
        return " ".join([*environment, "sparsepipe", *quoted])

    def like(
        self,
        rows: Sequence[Row],
        of_cells: Sequence[str],
        *overrides: str,
        environment: Sequence[str] = (),
    ) -> str:
        """The command of a sweep whose runs come into the table of some runs."""
        scales = {row.get("scale") or row.get("study.cell.scale") for row in rows} - {None}
        words = dict.fromkeys(f"scale={scale}" for scale in scales)
        for row in rows:
            words |= dict.fromkeys(overrides_beside(row, of_cells))
        data = [word.partition("=")[2] for word in words if word.startswith("data=")]
        files = [f"data.root=${each.upper()}" for each in data if each.startswith("modelnet40")]
        return self.text(*words, *files, *overrides, environment=environment)
