"""The benchmark of sums runs, on loopback and over an emulated link, and its ratios add up."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from namespace_cases import needs_namespaces

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "ordered_sum.py"
ROW = re.compile(
    r"^ *(\d+) ranks, +([\d.]+) MiB, (\S.*?) +([\d.]+) ms, direct / this +([\d.]+)"
    r"(?:, +([\d.]+)x of the link)?$",
    re.MULTILINE,
)


def rows(*arguments: str) -> list[tuple[str, ...]]:
    ran = subprocess.run(
        [sys.executable, str(BENCHMARK), "--repeats", "1", *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
    )
    assert ran.returncode == 0, ran.stderr
    return [match.groups(default="") for match in ROW.finditer(ran.stdout)]


@pytest.mark.full
def test_every_way_has_a_row_on_loopback() -> None:
    found = rows("--only", "loopback", "--ranks", "2", "3", "--mib", "0.5", "--chunk-kib", "64")
    ways = ["direct", "chain, 64 KiB", "all_reduce"]
    assert [row[:3] for row in found] == [(n, "0.5", way) for n in "23" for way in ways]
    for row in found:
        base = next(float(r[3]) for r in found if r[0] == row[0] and r[2] == "direct")
        ratio, printed = base / float(row[3]), 0.05  # times have one place behind the point
        assert float(row[4]) == pytest.approx(ratio, rel=0.02 + printed / float(row[3]), abs=0.02)


@pytest.mark.full
@needs_namespaces
def test_over_a_link_each_way_takes_what_it_must_send() -> None:
    """P and 2 P but for a bucket that is full at the start; a busy machine makes it longer."""
    found = rows("--only", "link", "--hosts", "2", "2", "--link-bytes-per-s", "4e6", "--mib", "4")
    by_way = {row[2]: row for row in found}
    assert list(by_way) == ["direct", "chain", "all_reduce"]
    assert float(by_way["chain"][5]) > 0.9
    assert float(by_way["direct"][5]) > 1.8
