"""The chapters of networks of several domains: their jobs, cells, gains and pictures."""

from __future__ import annotations

import pytest

from sparsepipe.paper.chapters.multi_dsn import MULTI_DSN, MULTI_DSN_MEMORY
from sparsepipe.report.dot_plot import beside_each_other
from sparsepipe.runs.ledger_table import Row
from sparsepipe.tasks.measure_steps import outcome
from tests.support.report_cases import value
from tests.support.reported_runs import made_by

MB = 1_000_000


def trained(
    way: str, seed: int, *overrides: str, network: str = "digit", **accuracies: float
) -> Row:
    """A training with these accuracies of its domains."""
    words = (f"paper/network={network}_domains", f"paper.training={way}", *overrides)
    given = ("experiment=multi_dsn", "paper.extent=desk", *words, f"seed={seed}")
    mean = sum(accuracies.values()) / len(accuracies)
    found = {f"test/{name}/accuracy": each for name, each in accuracies.items()}
    own = {"run_id": f"{way}{seed}{''.join(overrides)}", "seed": seed}
    return {**made_by(*given, **found), **own, "test/target_accuracy": mean}


def measured(workers: int, peak_mb: int) -> Row:
    sizes = [
        {
            "size": [64 * times] * 2,
            "peak_bytes": peak_mb * times * MB,
            "saved_bytes": times * MB,
            "fits": True,
            "limited_by": None,
            "step_s": 1.0,
        }
        for times in (1, 2)
    ]
    words = ("experiment=multi_dsn_memory", "paper.extent=desk", f"parallel.devices={workers}")
    usual = {"hardware_accelerator": "cpu", "machine_cores": 2, "threads_per_rank": 1}
    made = made_by(*words, **outcome(sizes), **usual)
    return {**made, "ranks": workers, "run_id": f"on{workers}"}


def test_gains_are_of_equal_seeds_and_the_labels_are_those_of_each_target() -> None:
    rows = [
        trained("source_only", 0, noisy=0.5, thick=0.7),
        trained("source_only", 1, noisy=0.6, thick=0.7),
        trained("dsn", 0, noisy=0.6, thick=0.6),
        trained("dsn", 2, noisy=0.9, thick=0.9),  # no training on the source has its seed
        trained("supervised", 0, "data.source=noisy", noisy=0.95, thick=0.2),
        trained("supervised", 0, "data.source=thick", noisy=0.1, thick=0.85),
    ]
    (block,) = MULTI_DSN.blocks(rows)
    assert block.title == "scale desk; digit domains"
    assert value(block, "source_only", "noisy") == pytest.approx(55)
    assert value(block, "gain", "noisy") == pytest.approx(10)
    assert value(block, "gain", "thick") == pytest.approx(-10)
    assert value(block, "gain", "mean of the targets") == pytest.approx(0)
    assert value(block, "supervised", "noisy") == pytest.approx(95)
    assert value(block, "supervised", "thick") == pytest.approx(85)
    assert value(block, "supervised", "mean of the targets") is None  # of six nobody has trained
    assert beside_each_other(MULTI_DSN, block) is not None


def test_memory_of_a_worker_is_set_against_that_of_one_target() -> None:
    rows = [measured(1, 8), measured(2, 4), measured(8, 5)]
    (block,) = MULTI_DSN_MEMORY.blocks(rows)
    assert value(block, "memory", "1 + 1", "128 x 128 pixels", "1") == pytest.approx(16)
    assert value(block, "over_two", "1 + 1", "128 x 128 pixels", "1") is None
    assert value(block, "over_two", "1 + 7", "64 x 64 pixels", "8") == pytest.approx(1.25)
    assert value(block, "memory", "1 + 4", "64 x 64 pixels", "5") is None
    assert MULTI_DSN_MEMORY.draw is not None
    assert MULTI_DSN_MEMORY.draw(block) is not None
