"""The table of ``docs/pipeline.md``, of which each row is a test."""

from __future__ import annotations

from tests.integration.habits.habit import Habit
from tests.integration.habits.in_hooks import HOOKS
from tests.integration.habits.in_optimizers import OPTIMIZERS
from tests.integration.habits.in_steps import STEPS
from tests.integration.habits.in_trainers import CALLBACKS, TRAINERS

SECTIONS = {
    "In a step": STEPS,
    "Hooks": HOOKS,
    "Optimizers": OPTIMIZERS,
    "The Trainer, the network and its data": TRAINERS,
    "Callbacks": CALLBACKS,
}
HABITS: dict[str, Habit] = {
    habit.written: habit for habits in SECTIONS.values() for habit in habits
}


def table() -> str:
    """In Markdown."""
    lines = []
    for title, habits in SECTIONS.items():
        lines += [f"| {title} | here | |", "|---|---|---|", *(habit.row for habit in habits), ""]
    return "\n".join(lines)
