"""Overrides of runs of the study of depth: which set them apart, and which a note tells."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sparsepipe.results.report.cell import Row
from sparsepipe.results.report.commands import Commands, Usual
from sparsepipe.results.report.overridden import of_training, unlike_words
from sparsepipe.results.report.rows import unlike_notes

_OF_SETTING = (
    *("data.batch_size", "data.source._target_", "model.convolutions", "model.width"),
    "parallel.strategy.microbatches",
)
"""Keys that a setting tells by itself."""
_EFFORT = (
    *("data.source.test_images", "data.source.train_images", "hardware.network"),
    *("hardware.time_scale", "trainer.limit_test_batches", "trainer.limit_train_batches"),
    *("trainer.limit_val_batches", "trainer.max_epochs"),
)
"""Keys of how long a rate is taken, and how: depths have unlike ones in one table anyway."""
_STRATEGY = "parallel.strategy."
_OF_ROWS = ("parallel.strategy._target_", "parallel.strategy.process_group_backend",
            "parallel.strategy.timeout_s")  # fmt: skip
"""Of a strategy: what the row tells, and what changes no figure."""
_HOSTS = "hardware.value.hosts"


def sets_apart(key: str) -> bool:
    """Whether runs with another value of a key have a table of their own."""
    return of_training(key) and key not in (*_OF_SETTING, *_EFFORT)


def is_noted(key: str) -> bool:
    """Whether another value of a key is told by a note: not every row could have it, or effort."""
    of_strategy = key.startswith(_STRATEGY) and key not in (*_OF_ROWS, *_OF_SETTING)
    return key in _EFFORT or of_strategy


def override_notes(made: Sequence[tuple[Row, Sequence[str]]], commands: Commands) -> list[str]:
    """Which runs of a table are not quite what the commands of their cells give.

    Args:
        made: runs, and overrides of the commands of their cells.
        commands: tell what is usual, if anybody knows.
    """
    if commands.usual is None:
        return []
    found: dict[tuple[str, ...], list[str]] = {}
    for row, command in made:
        words = unlike_words(row, command, commands.usual, is_noted)
        if _is_on_others(row, command, commands.usual):
            words = (*words, f"other {_HOSTS}")
        if words:
            found.setdefault(words, []).append(str(row.get("run_id")))
    return [
        f"made with {', '.join(words)} beside the commands of their cells: {', '.join(names)}"
        for words, names in found.items()
    ]


def mean_notes(label: Sequence[str], runs: Sequence[Row]) -> list[str]:
    """What is to be said of a row's runs that are averaged and not alike.

    Args:
        label: of the row.
        runs: of it.
    """
    notes = unlike_notes(runs, lambda key: sets_apart(key) or is_noted(key))
    return [f"{', '.join(label)}: {note}" for note in notes]


def _is_on_others(row: Row, command: Sequence[str], usual: Usual) -> bool:
    """Whether a run was emulated on other hosts than its command has."""
    own = row.get(_HOSTS)
    if not isinstance(own, list):  # it does not tell
        return False
    theirs = usual(command, (_HOSTS,)).get(_HOSTS)
    return isinstance(theirs, list) and list(map(_host, own)) != list(map(_host, theirs))


def _host(host: Mapping[str, Any]) -> tuple[Any, ...]:
    """What of a host an emulation takes account of."""
    devices = [(each.get("count"), each.get("profile")) for each in host.get("devices", ())]
    return (host.get("link") or {}).get("bytes_per_s"), devices
