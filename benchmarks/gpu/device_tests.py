"""The tests that need a device: ``pytest -m cuda`` on the files that have them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from records import Rows

from sparsepipe.errors import SparsePipeError

COLUMNS: Mapping[str, str] = {}
"""None: of so many rows the summary has counts."""
ROOT = Path(__file__).resolve().parents[2]
FILES = "tests/**/test_*_cuda.py"


class TestRows:
    """Makes a row of each test as it ends, and leaves out those that have passed before.

    Args:
        rows: of the record.
    """

    __test__ = False

    def __init__(self, rows: Rows) -> None:
        self._rows = rows
        self._phases: dict[str, list[Any]] = {}

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        """Tests that are measured are not run again."""
        items[:] = [item for item in items if not self._rows.has(item.nodeid)]

    def pytest_runtest_logreport(self, report: Any) -> None:
        """A test's set-up, call or tear-down has ended; the row comes with the last of them."""
        phases = self._phases.setdefault(report.nodeid, [])
        phases.append(report)
        if report.when != "teardown":
            return
        if failed := [phase for phase in phases if phase.failed]:
            text = "; ".join(f"{phase.when}: {phase.longreprtext[-1500:]}" for phase in failed)
            self._rows.fail(report.nodeid, text)
            return
        skipped = next((phase for phase in phases if phase.skipped), None)
        row = {
            "outcome": "passed" if skipped is None else "skipped",
            "test_s": sum(phase.duration for phase in phases),
            "why": skipped and str(skipped.longrepr[2]).removeprefix("Skipped: "),
        }
        self._rows.measure(report.nodeid, lambda: row)

    def pytest_collectreport(self, report: Any) -> None:
        """A file could not be imported."""
        if report.failed:
            self._rows.fail(f"collecting {report.nodeid}", report.longreprtext[-1500:])


def measure(rows: Rows, *, device: torch.device, work: Path) -> None:
    """Runs the tests, a row each.

    Args:
        rows: of the record.
        device: a CUDA device.
        work: not used; tests have directories of their own.

    Raises:
        SparsePipeError: there are none beside this kit, or pytest cannot run them.
    """
    files = sorted(map(str, ROOT.glob(FILES)), key=lambda file: ("sparse" not in file, file))
    # The project's own options want plugins that need not be here.
    options = ["-o", "addopts=", "-p", "no:cacheprovider", "-q", "-m", "cuda"]
    options += ["--continue-on-collection-errors"]
    code = pytest.main([*options, "--rootdir", str(ROOT), *files], plugins=[TestRows(rows)])
    if not files or code not in _RAN:
        raise SparsePipeError(
            f"pytest ended with {code!r} on {len(files)} files {FILES}",
            remedy="run it by hand to see why",
        )


_RAN: Sequence[int] = (
    pytest.ExitCode.OK,
    pytest.ExitCode.TESTS_FAILED,
    pytest.ExitCode.NO_TESTS_COLLECTED,  # all have passed before
)
