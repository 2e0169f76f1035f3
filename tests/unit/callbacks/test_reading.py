"""What a resumed training reads is what an undisturbed one would have read."""

from __future__ import annotations

import multiprocessing
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.processes import outcomes, run
from tests.support.reading_cases import CRASH, STOP, train

RESUMED = (
    "shared", "shuffled", "weighted", "subset", "plain", "within", "buckets", "epochs", "counting",
    "private", "single", "fetching", "collating", "persistent", "beside", "state", "unsized",
    "late",
)  # fmt: skip
REPEATED = ("stream", "class")
"""Loaders whose epoch begins again."""
IN_PROCESS = ("state", "late", "unsized", "class")
QUICK = ("weighted", "counting", "persistent")
CASES = [
    *((kind, 0) for kind in (*RESUMED, *REPEATED)),
    *(
        pytest.param(kind, 2, marks=[] if kind in QUICK else pytest.mark.full)
        for kind in (*RESUMED, *REPEATED)
        if kind not in IN_PROCESS
    ),
]


TORCHDATA = ("torchdata", "torchdata-stream")


@pytest.mark.parametrize(
    ("kind", "workers"),
    [*CASES, *((kind, 0) for kind in TORCHDATA),
     *(pytest.param(kind, 2, marks=pytest.mark.full) for kind in TORCHDATA)],
)  # fmt: skip
def test_a_resumed_training_is_the_undisturbed_one(
    kind: str, workers: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Stopped within an epoch, then killed within the next one."""
    if kind in TORCHDATA:
        pytest.importorskip("torchdata.stateful_dataloader")
    expected, weights = train(tmp_path / "undisturbed", kind, workers)
    found = {}
    for end in (("stop", STOP), ("crash", CRASH), None):
        read, ours = train(tmp_path / "run", kind, workers, end=end)
        assert kind in REPEATED or end == ("stop", STOP) or (1, 1) not in read
        found.update(read)
    assert ("repeats epoch 2" in caplog.text) == (kind in REPEATED)
    assert ("random numbers of its workers" in caplog.text) == (kind in TORCHDATA and workers > 0)
    assert found == expected
    assert all(torch.equal(ours[name], value) for name, value in weights.items())


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
    kinds = ("shuffled", "buckets", "persistent") if workers else ("weighted", "beside", "state")
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
    expected = run(of_ranks, 2, tmp_path / "undisturbed", strategy, ("buckets",))
    outcomes(of_ranks, 2, tmp_path / "run", strategy, ("buckets",), ("crash", CRASH))
    ended = run(of_ranks, 2, tmp_path / "run", strategy, ("buckets",))
    for [(read, ours)], [(whole, weights)] in zip(ended, expected, strict=True):
        assert min(read) == (2, 0)
        assert read.items() <= whole.items()
        assert all(torch.equal(ours[name], value) for name, value in weights.items())


def test_an_order_that_may_be_another_one_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The loader has an iterator of its own, which goes on from epoch to epoch."""
    train(tmp_path, "reused", end=("crash", CRASH))
    train(tmp_path, "reused")
    assert "may be another one: ReusedIterator does not read by its Repeating" in caplog.text


def test_a_sampler_that_draws_another_order_each_time_repeats_its_epoch(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    train(tmp_path, "hidden", end=("stop", STOP))
    assert "repeats epoch 2" in caplog.text
    assert "Hidden draws another order each time" in caplog.text
    read, _ = train(tmp_path, "hidden", end=("stop", STOP))
    assert min(read) == (1, 0)
