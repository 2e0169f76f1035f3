"""The benchmark of the searches runs, and finds the paper's plan; its times are not judged."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARK = Path(__file__).parents[3] / "benchmarks" / "partition.py"


@pytest.mark.full
def test_it_prints_each_size_and_draws_them(tmp_path: Path) -> None:
    picture = tmp_path / "growth.png"
    sizes = ["--layers", "20", "30", "--devices", "4", "64", "--repeats", "1"]
    command = [sys.executable, str(BENCHMARK), *sizes, f"--picture={picture}"]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert re.search(r"hete_mp +off +7-1 +\d+ +50 ", said)
    rows = re.findall(r"^(\w+) +(on|off) +(\d+) +(\d+) +(?:\d+ +[\d.]+|(refused))", said, re.M)
    grown = [row for row in rows if row[2] in ("20", "30")]
    assert len(grown) == 16
    assert {row[0] for row in grown if row[4]} == {"exact"}
    assert picture.read_bytes().startswith(b"\x89PNG")
