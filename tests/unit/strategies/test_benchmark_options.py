"""The benchmarks of the pipeline refuse what cannot be measured before they start anything."""

from __future__ import annotations

import importlib
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
        ("pipeline", "--ranks 3 1", "--ranks: 1 is too few: give 2 or more"),
        ("pipeline", "--bound-s 0", "--bound-s: '0' is not a number above 0"),
        ("pipeline", "--sleep-ms 1 -1", "--sleep-ms: '-1' is not a number above 0"),
        ("pipeline", "--kib 0", "--kib: 0 is too few: give 1 or more"),
        ("simulated_pipeline", "--minibatches 3", "an epoch of 3 has no time between steps"),
        ("simulated_pipeline", "--minibatches many", "'many' is not a whole number"),
        ("simulated_pipeline", "--repeats 0", "--repeats: 0 is too few: give 1 or more"),
        ("simulated_pipeline", "--turns 0", "--turns: 0 is too few: give 1 or more"),
        ("simulated_pipeline", "--passes 0", "--passes: 0 is too few: give 1 or more"),
        ("simulated_pipeline", "--cut-passes -1", "--cut-passes: -1 is too few: give 1 or more"),
        ("simulated_pipeline", "--width inf", "--width: 'inf' is not a number above 0"),
        ("simulated_pipeline", "--width broad", "--width: 'broad' is not a number above 0"),
        ("simulated_pipeline", "--shapes 0", "--shapes: 0 is too few: give 1 or more"),
        ("simulated_pipeline", "--shapes 1", "give 2 or more, or --only sparse"),
    ],
)
def test_what_cannot_be_measured_is_refused(
    name: str, arguments: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as refused:
        importlib.import_module(name).main(arguments.split())
    assert refused.value.code == 2
    printed = capsys.readouterr()
    assert said in " ".join(printed.err.split())
    assert not printed.out


def test_what_can_be_measured_is_taken() -> None:
    benchmark = importlib.import_module("simulated_pipeline")
    assert benchmark.parse([]).minibatches == 16
    assert benchmark.parse(["--minibatches", "5", "--repeats", "1"]).minibatches == 5
    assert benchmark.parse(["--shapes", "1", "--only", "sparse"]).shapes == 1
    assert importlib.import_module("pipeline").parse(["--minibatches", "6"]).minibatches == 6
