"""The benchmark of sums runs, on loopback and over an emulated link, and its ratios add up."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.namespace_cases import needs_namespaces

BENCHMARK = Path(__file__).parents[3] / "benchmarks" / "ordered_sum.py"
ROW = re.compile(
    r"^ *(\d+) ranks, +([\d.]+) MiB, (\S.*?) +([\d.]+) ms, direct / this +([\d.]+)"
    r"(?:, +([\d.]+)x of the link)?$",
    re.MULTILINE,
)
TAKEN = re.compile(r"^ *(\d+) ranks, +([\d.]+) MiB: (\w+) is taken, ([\d.]+)x the better$", re.M)


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


@pytest.mark.full
@needs_namespaces
def test_over_a_link_each_way_takes_what_it_must_send() -> None:
    """P and 2 P but for a bucket that is full at the start; a busy machine makes it longer."""
    speed = ("--link-bytes-per-s", "4e6")
    text = printed("--only", "link", "--hosts", "2", "2", *speed, "--mib", "1", "4")
    by_way = {(row[1], row[2]): row for row in rows(text)}
    assert list(by_way) == [(s, w) for s in "14" for w in ("direct", "chain", "all_reduce")]
    assert float(by_way["4", "chain"][5]) > 0.9
    assert float(by_way["4", "direct"][5]) > 1.8
    taken = [match.groups() for match in TAKEN.finditer(text)]
    assert [row[:3] for row in taken] == [("4", "1", "direct"), ("4", "4", "chain")]
    for _, size, way, over in taken:
        times = [float(by_way[size, each][3]) for each in ("direct", "chain")]
        expected = float(by_way[size, way][3]) / min(times)
        assert float(over) == pytest.approx(expected, abs=0.01)
