"""Domain parallelism from the command line: results, checkpoints, pictures and failures."""

from __future__ import annotations

import csv
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from sparsepipe.utils.files import read_json
from tests.support.command_line import Shell, checkpoint, orphans, rows

Job = Callable[..., Path]
NAMES = ("digits", "blended", "inverted")
SMALL = tuple(
    f"data.domains.{name}.source.{key}={count}"
    for name in NAMES
    for key, count in (("train_images", 32), ("test_images", 20))
)
DOMAINS = (
    *("model=dsn_2d", "model.width=0.1", "model.code=8", "data=digit_domains", "data.targets=2"),
    *("data.batch_size=8", "data.common.val_share=0.2", "trainer.max_epochs=2", *SMALL),
)
SINGLE = (*DOMAINS, "parallel=single", "parallel.devices=1")
RANKS = (*DOMAINS, "parallel=domain", "parallel.devices=3", "hardware.cpu_devices=3")
PICTURES = {
    *(f"confusion_{name}.png" for name in NAMES),
    *("learning_curves.png", "reconstructions.png"),
}


def assert_alike(run: Path, alone: Path) -> None:
    """Weights and figures of two runs within rounding in single precision."""
    ours, theirs = (dict(checkpoint(each)["state_dict"]) for each in (run, alone))
    torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-5)
    for row, other in zip(rows(run), rows(alone), strict=True):
        assert row.keys() == other.keys()
        for name in ("train/loss", "val/loss", "val/accuracy", "val/blended/loss"):
            assert float(row[name]) == pytest.approx(float(other[name]), rel=1e-3), name


@pytest.mark.full
@pytest.mark.usefixtures("networks_for_ranks")
def test_equals_one_process(job: Job) -> None:
    double = "trainer.precision=64-true"  # in single precision rounding adds up
    run, alone = job(*RANKS, double), job(*SINGLE, double)
    assert_alike(run, alone)
    for place, ranks in ((run, 3), (alone, 1)):
        result = read_json(place / "result.json")
        assert result["ranks"] == ranks
        assert result["strategy"] == ("domain" if ranks > 1 else "single")
        assert {path.name for path in place.iterdir()} >= PICTURES
        accuracies = [result[f"test/{name}/accuracy"] for name in NAMES]
        assert result["test/accuracy"] == accuracies[0]
        assert result["test/target_accuracy"] == pytest.approx(sum(accuracies[1:]) / 2)
        with (place / "confusion.csv").open(newline="") as stream:
            counts = [(row["domain"], int(row["shapes"])) for row in csv.DictReader(stream)]
        assert {name: sum(n for of, n in counts if of == name) for name in NAMES} == dict.fromkeys(
            NAMES, 20
        )


@pytest.mark.full
@pytest.mark.usefixtures("networks_for_ranks")
@pytest.mark.parametrize("devices", ["2", "3"])
def test_ranks_with_unequal_numbers_of_domains_equal_one_process(job: Job, devices: str) -> None:
    """With a schedule of the rate, for which Lightning asks all ranks how long loaders are."""
    more = ("optim=adamw", "trainer.precision=64-true")
    roles = "equal" if devices == "2" else "separate"  # of three domains the first rank has one
    places = (f"parallel.devices={devices}", f"hardware.cpu_devices={devices}")
    run = job(*DOMAINS, *more, "parallel=domain", f"parallel.roles={roles}", *places)
    assert_alike(run, job(*SINGLE, *more))


@pytest.mark.full
@pytest.mark.usefixtures("networks_for_ranks")
def test_evaluated_elsewhere_and_on_some(job: Job) -> None:
    run = job(*RANKS)
    trained = read_json(run / "result.json")
    how = ("parallel=single", "parallel.devices=1")
    evaluated = read_json(job("task=evaluate", f"checkpoint={run}", *how) / "result.json")
    for name in NAMES:
        key = f"test/{name}/accuracy"
        assert evaluated[key] == pytest.approx(trained[key], abs=1e-6)
    some = job("task=evaluate", f"checkpoint={run}", *how, "data.evaluated=[inverted]")
    found = read_json(some / "result.json")
    assert found["test/inverted/accuracy"] == pytest.approx(trained["test/inverted/accuracy"])
    assert "test/blended/accuracy" not in found


@pytest.mark.full
def test_one_more_domain(shell: Shell) -> None:
    first = shell(*RANKS, "data.targets=1", "parallel.devices=2")
    more = shell(*RANKS, f"checkpoint={first.run}")
    assert "of domains digits, blended to digits, blended, inverted" in more.err
    assert set(checkpoint(more.run)["state_dict"]) > set(checkpoint(first.run)["state_dict"])
    assert not orphans(shell.cwd)


@pytest.mark.full
def test_an_interrupted_run_goes_on_to_the_same_bits(shell: Shell, tmp_path: Path) -> None:
    expected = Shell(tmp_path / "other")
    expected.cwd.mkdir()
    whole = expected(*RANKS).run
    fault = "rank: 1, place: batch, signum: 9, epoch: 1, count: 2"
    stops = f"callbacks={{stop: {{_target_: tests.support.tinyfaults.Injection, {fault}}}}}"
    broken = shell(*RANKS, stops)
    assert broken.code
    assert "rank 1" in broken.err
    run = shell(*RANKS).run
    ours, theirs = checkpoint(run)["state_dict"], checkpoint(whole)["state_dict"]
    assert all(torch.equal(value, theirs[name]) for name, value in ours.items())
