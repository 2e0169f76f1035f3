"""A resumed training reads what an undisturbed one would have read."""

from __future__ import annotations

import multiprocessing
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.loader_cases import BATCHES, CRASH, STOP, train
from tests.support.processes import outcomes, run

RESUMED = ("shared", "shuffled", "single", "persistent", "beside", "state", "torchdata")
REPEATED = {
    "weighted": "the order of WeightedRandomSampler may depend on more",
    "class": "is not a plain DataLoader",
    "unsized": "has no length",
}
"""Loaders whose epoch begins again, and why."""
QUICK = ("shuffled", "persistent")
CASES = [
    *((kind, 0) for kind in RESUMED),
    *(
        pytest.param(kind, 2, marks=[] if kind in QUICK else pytest.mark.full)
        for kind in RESUMED
        if kind != "state"
    ),
]


@pytest.mark.parametrize(("kind", "workers"), CASES)
def test_a_resumed_training_is_the_undisturbed_one(kind: str, workers: int, tmp_path: Path) -> None:
    """Stopped within an epoch, then killed within the next one."""
    if kind == "torchdata":
        pytest.importorskip("torchdata.stateful_dataloader")
    expected, weights = train(tmp_path / "undisturbed", kind, workers)
    found = {}
    for end in (("stop", STOP), ("crash", CRASH), None):
        read, ours = train(tmp_path / "run", kind, workers, end=end)
        assert end == ("stop", STOP) or (1, 1) not in read
        found.update(read)
    assert found == expected
    assert all(torch.equal(ours[name], value) for name, value in weights.items())


@pytest.mark.parametrize("kind", REPEATED)
def test_other_loaders_begin_their_epoch_again(
    kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    train(tmp_path, kind, end=("stop", STOP))
    assert "repeats epoch 2" in caplog.text
    assert REPEATED[kind] in caplog.text
    read, _ = train(tmp_path, kind)
    assert sorted(read) == [(epoch, batch) for epoch in (1, 2) for batch in range(BATCHES)]


def of_ranks(
    rank: int,
    directory: Path,
    strategy: str,
    kinds: tuple[str, ...],
    end: Any = None,
    workers: int = 0,
) -> list[Any]:
    """What is read of each kind, and the weights; in a file, too: a rank may end with its run."""
    vars(multiprocessing.current_process())["_config"]["daemon"] = False  # which have no workers
    found = [train(directory / kind, kind, workers, strategy=strategy, end=end) for kind in kinds]
    torch.save(found, directory / f"rank{rank}.pt")
    return found


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.full)])
@pytest.mark.parametrize("strategy", ["dp", "asynchronous", "synchronous"])
def test_ranks_read_on_where_they_were(strategy: str, workers: int, tmp_path: Path) -> None:
    kinds = ("shuffled", "persistent") if workers else ("shuffled", "beside", "state")
    expected = run(of_ranks, 2, tmp_path / "undisturbed", strategy, kinds, None, workers)
    outcomes(of_ranks, 2, tmp_path / "run", strategy, kinds, ("stop", STOP), workers)
    begun = [torch.load(tmp_path / "run" / f"rank{rank}.pt") for rank in range(2)]
    ended = run(of_ranks, 2, tmp_path / "run", strategy, kinds, None, workers)
    for firsts, rests, wholes in zip(begun, ended, expected, strict=True):
        for (first, _), (rest, ours), (whole, weights) in zip(firsts, rests, wholes, strict=True):
            assert min(rest) > (1, 1)
            assert {**first, **rest} == whole
            if strategy != "asynchronous":  # whose pipeline is emptied by a stop
                assert all(torch.equal(ours[name], value) for name, value in weights.items())


@pytest.mark.full
@pytest.mark.parametrize("strategy", ["dp", "asynchronous", "synchronous"])
def test_killed_ranks_read_their_epoch_again(strategy: str, tmp_path: Path) -> None:
    expected = run(of_ranks, 2, tmp_path / "undisturbed", strategy, ("shuffled",))
    outcomes(of_ranks, 2, tmp_path / "run", strategy, ("shuffled",), ("crash", CRASH))
    ended = run(of_ranks, 2, tmp_path / "run", strategy, ("shuffled",))
    for [(read, ours)], [(whole, weights)] in zip(ended, expected, strict=True):
        assert min(read) == (2, 0)
        assert read.items() <= whole.items()
        assert all(torch.equal(ours[name], value) for name, value in weights.items())
