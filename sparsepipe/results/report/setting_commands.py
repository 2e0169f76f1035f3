"""The commands whose runs come into a setting."""

from __future__ import annotations

from collections.abc import Sequence

from sparsepipe.results.report.cell import Row
from sparsepipe.results.report.commands import Commands
from sparsepipe.results.report.settings import USUAL, Setting


def commands_of(setting: Setting, rows: Sequence[Row], commands: Commands) -> Commands:
    """Commands whose runs come into the same setting.

    Args:
        setting: which.
        rows: runs of it.
        commands: as they are for any setting.
    """
    root = () if setting.option == USUAL else (f"data.root=${setting.option.upper()}",)
    return commands.giving(
        *setting.overrides,
        *root,
        *commands.unlike(setting.overrides, setting.values),
        *setting.others,
        environment=_thread_limit(rows),
    )


def data_notes(commands: Commands) -> list[str]:
    """What a reader is to do before commands."""
    roots = [word for word in commands.given if word.startswith("data.root=$")]
    names = [word.removeprefix("data.root=$") for word in roots]
    return [
        f"In commands ${name} stands for the directory of the data: first export {name}=DIRECTORY."
        for name in names
    ]


def _thread_limit(rows: Sequence[Row]) -> tuple[str, ...]:
    """As the environment says it; nothing where one device computes on all cores."""
    alone = [row for row in rows if row.get("task_name") != "fit_batch" and row.get("ranks") == 1]
    told = [
        (row.get("threads_per_rank"), row.get("machine_cores"))
        for row in alone
        if row.get("hardware_accelerator") == "cpu"
    ]
    limits = {int(threads) for threads, cores in told if threads and cores and threads < cores}
    return tuple(f"OMP_NUM_THREADS={limit}" for limit in sorted(limits)[:1])
