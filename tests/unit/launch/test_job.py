"""How many ranks this machine has room for, and where they leave their reports."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sparsepipe.errors import HardwareError, SparsePipeError
from sparsepipe.launch import job as module

DP = ("parallel=dp", "parallel.devices=2", "hardware.accelerator=cpu")


def test_reports_are_not_on_the_disk_of_the_results(
    job: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That this one is full may be what there is to report."""
    found: list[Path] = []

    def launch(*_: Any, reports: Path, **__: Any) -> None:
        (reports / "rank0.json").touch()
        found.append(reports)
        raise SparsePipeError("a rank failed", remedy="look")

    monkeypatch.setattr(module, "launch", launch)
    with pytest.raises(SparsePipeError, match="a rank failed"):
        job(*DP)
    (reports,) = found
    assert not reports.is_relative_to(tmp_path)
    assert not reports.exists()


def test_more_ranks_than_memory_are_refused(job: Callable[..., Path]) -> None:
    """By as many as no machine of today has; they would end it before they could say why."""
    with pytest.raises(HardwareError, match=r"devices=9999 takes 3,999\.6 GB") as refused:
        job("parallel=dp", "hardware.accelerator=cpu", "hardware.cpu_devices=9999")
    assert "lower hardware.cpu_devices" in refused.value.remedy
    assert not [*Path("outputs").glob("tiny/[!.]*")]
