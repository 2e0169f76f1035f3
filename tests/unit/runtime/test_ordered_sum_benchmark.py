"""The benchmark of sums runs, on loopback and over an emulated link, and its ratios add up."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARK = Path(__file__).parents[3] / "benchmarks" / "ordered_sum.py"
ROW = re.compile(
    r"^ *(\d+) ranks, +([\d.]+) MiB, (\S.*?) +([\d.]+) ms, direct / this +([\d.]+)"
    r"(?:, +([\d.]+)x of the link)?$",
    re.MULTILINE,
)


def printed(*arguments: str) -> str:
    ran = subprocess.run(
        [sys.executable, str(BENCHMARK), "--repeats", "1", *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


def rows(text: str) -> list[tuple[str, ...]]:
    return [match.groups(default="") for match in ROW.finditer(text)]


@pytest.mark.full
def test_every_way_has_a_row_on_loopback() -> None:
    sizes = ("--mib", "0.5", "--chunk-kib", "64", "--room", "1", "2")
    found = rows(printed("--only", "loopback", "--ranks", "2", "3", *sizes))
    ways = ["direct", "chain, 64 KiB, room 1", "chain, 64 KiB, room 2", "all_reduce"]
    assert [row[:3] for row in found] == [(n, "0.5", way) for n in "23" for way in ways]
    for row in found:
        base = next(float(r[3]) for r in found if r[0] == row[0] and r[2] == "direct")
        ratio, rounding = base / float(row[3]), 0.05  # times have one place behind the point
        rel = rounding / float(row[3]) + rounding / base
        assert float(row[4]) == pytest.approx(ratio, rel=0.02 + rel, abs=0.02)
