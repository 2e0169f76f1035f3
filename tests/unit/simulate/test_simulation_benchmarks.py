"""The benchmarks of the simulator run; their times are not judged."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"


def said_by(name: str, *arguments: str) -> str:
    command = [sys.executable, str(BENCHMARKS / name), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=280)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.full
def test_every_plan_on_every_size_ends_when_predicted() -> None:
    said = said_by("simulate.py", "--devices", "8", "32", "--minibatches", "700", "--whole")
    rows = re.findall(r"^ +(8|32)  (\S.*?\S) {2,}(\d+) +([\d,]+)( +[\d.]+){3}$", said, re.MULTILINE)
    assert len(rows) == 2 * 5
    assert {row[2] for row in rows} >= {"1", "4", "8", "32"}
    for row in rows:
        if row[1] != "unlike stages":  # which take a longer run to tell their pace
            assert int(row[3].replace(",", "")) <= 700
    assert said.count("simulated to its end") == len(rows), "each within a billionth, or it fails"
    assert "goal, each within 60 s: met" in said


@pytest.mark.full
def test_the_whole_command_is_timed() -> None:
    said = said_by("simulate.py", "--devices", "8", "--minibatches", "100", "--task")
    assert len(re.findall(r"^ +8  \D.*?\S {2,}\d+ +\d+( +[\d.]+){4}$", said, re.MULTILINE)) == 5


@pytest.mark.full
def test_the_simulated_pipeline_is_compared_with_the_real_one() -> None:
    said = said_by("simulated_pipeline.py", "--quick", "--only", "dense", "sparse")
    rows = re.findall(r"^  0 +([\d.]+) +([\d.]+) +([\d.]+) .* +\d+ MB/s", said, re.MULTILINE)
    assert len(rows) == 2
    for simulated, real, ratio in rows:
        assert float(ratio) == pytest.approx(float(simulated) / float(real), rel=0.02)
    stages = re.findall(r"^  stage ([01]) (simulated|real) +([\d. ]+)$", said, re.MULTILINE)
    assert [row[:2] for row in stages] == 2 * [
        *(("0", "simulated"), ("0", "real"), ("1", "simulated"), ("1", "real"))
    ]
    for number, _, figures in stages:
        forward, backward, copy, update, busy, _ = map(float, figures.split())
        assert min(forward, backward, update) > 0
        assert (copy > 0) == (number == "0"), "only the first stage has a minibatch in flight"
        assert busy == pytest.approx(forward + backward + copy + update, abs=0.0003)
    assert len(re.findall(r"profile of rank [01]: the layers take", said)) == 4
    assert said.count("in the middle of an epoch: ") == said.count("whole epochs: ") == 2
