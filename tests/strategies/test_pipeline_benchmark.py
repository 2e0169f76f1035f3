"""The pipeline benchmark runs, and what it counts is what the schedule and the shapes say."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "pipeline.py"
KIB = 4 * 1024
HEADERS = 4096


@pytest.mark.full
def test_rows_bytes_and_versions_of_the_benchmark() -> None:
    ran = subprocess.run(
        [sys.executable, str(BENCHMARK), "--quick", "--ranks", "3"],
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )
    assert ran.returncode == 0, ran.stderr
    dense, sparse, sleep = ran.stdout.split("\n\n")[1:4]
    for part in (dense, sparse):
        for row in ("bound, the slowest stage", "one process", "DDP, 2 processes"):
            assert re.search(rf"^  {row} +[\d.]+ \[[\d.]+\.\.[\d.]+\]", part, re.MULTILINE)
        assert re.search(r"share of the bound, steady: [\d.]+% \(goal 93%\)", part)
        assert re.search(r"times DDP, whole epochs: [\d.]+ \(goal 1.15\)", part)
        assert least(part) > 0
        # Beside features and coordinates: labels and numbers of two shapes, and the loss.
        assert tensors(part) == least(part) + 2 * 2 * 8 + 4
        assert headers(part) <= 2 * HEADERS
        check_weights(part, versions=[2, 1])
    assert re.search(r"share of the bound, steady: [\d.]+% \(goal 97%\)", sleep)
    assert least(sleep) == 2 * 2 * KIB
    assert tensors(sleep) == least(sleep) + 8 * 2 * 8 + 2 * 4
    check_weights(sleep, versions=[3, 2, 1])


def number(pattern: str, part: str) -> float:
    found = re.search(pattern, part)
    assert found is not None, pattern
    return float(found[1].replace(",", ""))


def tensors(part: str) -> float:
    return number(r"bytes a minibatch: ([\d,]+) of tensors", part)


def headers(part: str) -> float:
    return number(r"of tensors, ([\d,]+) of headers", part)


def least(part: str) -> float:
    return number(r"least ([\d,]+);", part)


def check_weights(part: str, *, versions: list[int]) -> None:
    """In stages of one rank each, stage s of S keeps S - s sets of weights."""
    rows = re.findall(
        r"rank (\d), layers \d+\.\.\d+: (\d+) sets of weights \((\d+) by the schedule\), "
        r"([\d,]+) bytes \(([\d,]+)\)",
        part,
    )
    assert [int(row[0]) for row in rows] == list(range(len(versions)))
    assert [int(row[1]) for row in rows] == versions
    assert [int(row[2]) for row in rows] == versions
    assert all(row[3] == row[4] != "0" for row in rows)
