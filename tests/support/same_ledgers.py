"""What two ledgers of one sweep have in common, made at other times and on other machines."""

from __future__ import annotations

import json

import pandas as pd
from pandas.testing import assert_frame_equal

CELL = ("task_name", "ranks", "representation", "data.resolution", "data.point_ratio")
"""What tells the runs of Table II apart."""
ANYWHERE = ("kind", "model", "strategy", "seed", "epochs", "steps", "parameters", "train_shapes",
            "val_shapes", "test_shapes", "scale", "tags", "budget_bytes")  # fmt: skip
"""Columns that are the same on each machine, beside settings."""
MACHINE = ("hardware_devices", "hardware_accelerator", "hardware_memory_bytes", "machine_cores",
           "threads_per_rank", "platform", "python", "torch", "cuda", "numpy")  # fmt: skip
"""Columns that must be the same where figures are to be, bit by bit."""
MAY_BE_EMPTY = ("refused_batch", "cuda")
"""Columns that are filled or not by what a machine, or its build of torch, can do."""


def is_of_the_moment(column: str) -> bool:
    """Times, rates, measured memory, and how often a run was begun; settings are none of these."""
    if "." in column:
        return False
    if column in ("starts", "git_commit", "probed_memory_bytes"):
        return True
    return column.endswith(("_s", "_at", "memory_bytes"))


def by_cell(frame: pd.DataFrame) -> pd.DataFrame:
    assert not frame.duplicated(list(CELL)).any(), "a cell is there twice"
    if "hydra.overrides" in frame:  # in whatever order a sweeper has put them
        words = frame["hydra.overrides"].map(lambda text: json.dumps(sorted(json.loads(text))))
        frame = frame.assign(**{"hydra.overrides": words})
    # On a CPU the one is the other, and so in identities.
    frame = frame.replace("sparsepipe.sparse.NativeBackend", "sparsepipe.sparse.AutoBackend")
    return frame.set_index(list(CELL)).sort_index()


def assert_as_recorded(found: pd.DataFrame, recorded: pd.DataFrame) -> None:
    """The same cells with the same settings and lengths, and none lacks what the other one has.

    Where the machine and the settings are the same, all that is not of the moment is equal, run
    ids and losses included. A column that only one of them has is of another version.
    """
    ours, theirs = by_cell(found), by_cell(recorded)
    assert list(ours.index) == list(theirs.index)
    shared = [name for name in ours.columns if name in set(theirs.columns)]
    assert {*ANYWHERE, *MACHINE} <= set(shared)
    filled = [name for name in shared if name not in MAY_BE_EMPTY]
    lacking = ours[filled].isna() & theirs[filled].notna()
    assert not lacking.any(axis=None), list(lacking.columns[lacking.any()])
    settings = [name for name in shared if "." in name]
    _assert_equal(ours, theirs, [*ANYWHERE, *settings])
    if _settings(ours) == _settings(theirs) and ours[[*MACHINE]].equals(theirs[[*MACHINE]]):
        _assert_equal(ours, theirs, [name for name in shared if not is_of_the_moment(name)])


def _settings(frame: pd.DataFrame) -> list[str]:
    return [name for name in frame.columns if "." in name]


def _assert_equal(ours: pd.DataFrame, theirs: pd.DataFrame, columns: list[str]) -> None:
    assert_frame_equal(ours[columns], theirs[columns], check_exact=True, check_dtype=False)
