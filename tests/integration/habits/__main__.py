"""Prints the table of ``docs/pipeline.md``: python -m tests.integration.habits."""

from tests.integration.habits.table import table

print(table())
