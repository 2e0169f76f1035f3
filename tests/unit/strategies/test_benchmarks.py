"""The pipeline benchmarks run, and refuse what cannot be measured before they start anything."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(BENCHMARKS)


@pytest.mark.parametrize(
    ("name", "arguments", "said"),
    [
        ("pipeline", "--minibatches 7", "--minibatches: 2 ranks cannot take as many each of an"),
        ("pipeline", "--sleep-ms 1 -1", "--sleep-ms: '-1' is not a number above 0"),
        ("simulated_pipeline", "--minibatches 3", "an epoch of 3 has no time between steps"),
        ("simulated_pipeline", "--width broad", "--width: 'broad' is not a number above 0"),
        ("simulated_pipeline", "--shapes 1", "give 2 or more, or --only sparse"),
    ],
)
def test_unsuitable_arguments_are_refused(
    name: str, arguments: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as refused:
        importlib.import_module(name).main(arguments.split())
    assert refused.value.code == 2
    printed = capsys.readouterr()
    assert said in " ".join(printed.err.split())
    assert not printed.out


KIB, HEADERS = 4 * 1024, 4096
TENSORS, LEAST = r"bytes a minibatch: ([\d,]+) of tensors", r"least ([\d,]+);"


def run(name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(BENCHMARKS / name), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=240)


@pytest.mark.full
def test_rows_bytes_and_versions_of_the_benchmark() -> None:
    ran = run("pipeline.py", "--quick", "--ranks", "3")
    assert ran.returncode == 0, ran.stderr
    dense, sparse, sleep = ran.stdout.split("\n\n")[1:4]
    for part in (dense, sparse):
        for row in ("bound, the slowest stage", "one process", "DDP, 2 processes"):
            assert re.search(rf"^  {row} +[\d.]+ \[[\d.]+\.\.[\d.]+\]", part, re.MULTILINE)
        assert re.search(r"share of the bound, steady: [\d.]+% \(goal 93%\)", part)
        assert re.search(r"times DDP, whole epochs: [\d.]+ \(goal 1.15\)", part)
        assert number(LEAST, part) > 0
        # Beside features and coordinates: labels and numbers of two shapes, and the loss.
        assert number(TENSORS, part) == number(LEAST, part) + 2 * 2 * 8 + 4
        assert number(r"of tensors, ([\d,]+) of headers", part) <= 2 * HEADERS
        check_weights(part, versions=[2, 1])
    assert re.search(r"share of the bound, steady: [\d.]+% \(goal 97%\)", sleep)
    assert number(LEAST, sleep) == 2 * 2 * KIB
    assert number(TENSORS, sleep) == number(LEAST, sleep) + 8 * 2 * 8 + 2 * 4
    check_weights(sleep, versions=[3, 2, 1])


@pytest.mark.full
def test_rows_beside_torchs_own_pipelines() -> None:
    ran = run("pipeline.py", "--quick", "--only", "torch")
    assert ran.returncode == 0, ran.stderr
    ways = ("ours", "torch", "torch, kept")
    for row in ("one process", *(f"{name}, {way}" for name in ("gpipe", "1f1b") for way in ways)):
        assert re.search(rf"^  {row} +[\d.]+ \[[\d.]+\.\.[\d.]+\]", ran.stdout, re.MULTILINE)
    for name in ("gpipe", "1f1b"):
        for beside in ("torch's", "torch's with freed memory kept, too"):
            assert number(rf"{name}, times {beside}: ([\d.]+) \(goal 1.00\)", ran.stdout) > 0


@pytest.mark.full
def test_what_keeping_freed_memory_brings() -> None:
    ran = run("freed_memory.py", "--quick")
    assert ran.returncode == 0, ran.stderr
    parts = ran.stdout.split("\n\n")[1:7]
    assert [part.split("; ")[1].splitlines()[0] for part in parts] == [
        *("one process", "asynchronous, 1-1") * 2,
        *("one process", "1F1B, 1-1, T = 4"),
    ]
    for part in parts:
        for way in ("glibc's own", "kept"):
            assert number(rf"{way} +([\d.]+) .* [\d.]+ GiB resident", part) > 0
        assert number(r"kept is ([\d.]+) times as fast", part) > 0


@pytest.mark.full
def test_times_of_recomputation() -> None:
    ran = run("recomputation.py", "--quick")
    assert ran.returncode == 0, ran.stderr
    parts = ran.stdout.split("\n\n")[1:5]
    stages = [re.search(r"stages (1|1-1), cuts \([\d,]*\), T = \d", part) for part in parts]
    assert [each and each[1] for each in stages] == ["1", "1-1", "1", "1-1"]
    for part in parts:
        kept, again = (number(rf"recompute={how} +([\d.]+)", part) for how in ("none", "all"))
        assert number(r"([\d.]+) times as long", part) == pytest.approx(again / kept, rel=0.1)


def number(pattern: str, part: str) -> float:
    found = re.search(pattern, part)
    assert found is not None, pattern
    return float(found[1].replace(",", ""))


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
