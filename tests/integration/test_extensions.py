"""Extensions from outside of the package, by dotted path: the examples of docs/extending.md."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from sparsepipe.config.build import build_data, build_module
from sparsepipe.config.check import check
from sparsepipe.errors import ConfigError, PlanError
from sparsepipe.launch.job import run_job
from sparsepipe.partition.devices import Choice
from sparsepipe.partition.problem import Problem
from sparsepipe.schedule import Plan, synchronous_by_name
from sparsepipe.schedule import check as check_schedule
from sparsepipe.strategies.pipeline.synchronous import SynchronousPipelineStrategy
from sparsepipe.utils.files import read_json
from tests.support.command_line import composed
from tests.support.guide_cases import write_files
from tests.support.simulated_cases import SEARCHED, result
from tests.support.simulated_cases import run as simulated


@pytest.fixture(autouse=True)
def importable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path / "examples"))
    for path in write_files("extending", tmp_path / "examples"):
        assert len(path.read_text().splitlines()) <= 30, "examples are short enough to be read"
        monkeypatch.delitem(sys.modules, path.stem, raising=False)


@pytest.fixture
def arrays(tmp_path: Path) -> Path:
    """Points on spheres and in cubes."""
    rng = np.random.default_rng(0)
    for split, count in (("train", 12), ("test", 6)):
        points_SP3 = rng.uniform(-1, 1, (count, 256, 3)).astype(np.float32)
        labels_S = np.arange(count) % 2
        balls_BP3 = points_SP3[labels_S == 0]
        points_SP3[labels_S == 0] = balls_BP3 / np.linalg.norm(balls_BP3, axis=-1, keepdims=True)
        np.save(tmp_path / f"{split}_points.npy", points_SP3)
        np.save(tmp_path / f"{split}_labels.npy", labels_S)
    return tmp_path


def test_a_source_and_a_backend_of_ones_own_train(arrays: Path) -> None:
    spec = composed(
        "data=modelnet40_points", "data.source._target_=data_source.Arrays",
        f"data.root={arrays}", "data.num_points=128", "data.resolution=16", "data.num_workers=0",
        "data.val_share=0.25", "data.batch_size=4", "model=sparse_vgg11_bn", "model.width=0.125",
        "backend._target_=sparse_backend.Float64Backend",
    )  # fmt: skip
    data = build_data(spec)
    data.prepare_data()
    data.setup("fit")
    assert data.classes == ("ball", "box")
    module = build_module(spec, data)
    batch = next(iter(data.train_dataloader()))
    first = module.layers[0]
    assert first.backend.name == "float64"
    logits_BK = module(batch["input"])
    assert logits_BK.shape == (4, 2)
    assert logits_BK.dtype == torch.float32
    logits_BK.sum().backward()
    assert first.kernel.grad is not None


@pytest.mark.usefixtures("workplace")
def test_a_task_of_ones_own_makes_a_run() -> None:
    task = {"_target_": "parameter_count.CountParameters", "trainable": True}
    spec = composed("experiment=tiny").replace(task=task)
    check(spec.to_dict())
    directory = run_job(spec)
    result = read_json(directory.result)
    assert (result["task_name"], result["kind"]) == ("count_parameters", "counted")
    assert result["parameters"] > 0
    wrong = spec.replace({"task.trainabel": True})
    with pytest.raises(ConfigError, match=r"nearest: 'task\.trainable'"):
        check(wrong.to_dict())


PAPER = ("task=partition", "hardware=paper_8gpu", "task.bandwidth_bytes_per_s=60e6")


def plan_by(outputs: Path, *overrides: str) -> Plan:
    done = run_job(composed(f"paths.outputs={outputs}", *PAPER, *overrides))
    return Plan.from_json(done.plan.read_text())


def test_a_search_of_ones_own(tmp_path: Path) -> None:
    plan = plan_by(tmp_path, "task.search=partition_search.even_layers")
    assert plan.replicas_of_stages == (1,) * 8
    assert {stage.num_layers for stage in plan.stages} == {6, 7}
    assert plan.details["strategy"] == "partition_search.even_layers"


def test_a_cost_model_of_ones_own(tmp_path: Path) -> None:
    own = plan_by(tmp_path, "task.search=dp", "task.cost_model=cost_model.SharedLinks")
    theirs = plan_by(tmp_path, "task.search=dp", "task.cost_model=pipedream")
    (own_s,), (theirs_s,) = own.details["stage_times_s"], theirs.details["stage_times_s"]
    assert own_s > theirs_s
    assert own.details["cost_model"]["class"] == "cost_model.SharedLinks"
    assert "class" not in theirs.details["cost_model"]


def test_a_schedule_of_ones_own(tmp_path: Path) -> None:
    path = "pipeline_schedule.first_in_first_out"
    plan = Plan.of(config="2-1", cuts=[2], num_layers=4)
    made = synchronous_by_name(path, plan, 2, microbatches=4)
    check_schedule(made)
    assert str(made.actions[2][4]) == "B0.0", "after all forwards the first backward"
    own, gpipe = (
        result(simulated(tmp_path, *SEARCHED, f"task.schedule={name}", "task.microbatches=4"))
        for name in (path, "gpipe")
    )
    assert own["schedule"] == path
    assert own["minibatch_s"] > 0
    assert own["plan_config"] == gpipe["plan_config"]
    strategy = SynchronousPipelineStrategy(schedule=path, config="1-1")  # type: ignore[arg-type]
    assert strategy.schedule == path


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("task.search=partition_search.even_layer", "nearest: 'even_layers'"),
        ("task.cost_model=collections.Counter", "instead of a cost model"),
    ],
)
def test_a_name_that_leads_nowhere(tmp_path: Path, override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        plan_by(tmp_path, override)


def test_stages_that_are_no_plan_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import partition_search  # type: ignore[import-not-found]

    def half(problem: Problem) -> list[Choice]:
        return [Choice(first=0, end=problem.spans.num_layers - 1, counts=problem.pool.counts)]

    monkeypatch.setattr(partition_search, "even_layers", half)
    with pytest.raises(PlanError, match=r"partition_search.even_layers is not a valid plan"):
        plan_by(tmp_path, "task.search=partition_search.even_layers")
