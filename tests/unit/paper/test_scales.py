"""What the paper's tables and figures sweep, and what each scale makes of their jobs."""

from __future__ import annotations

import itertools

import pytest
from hydra import compose as hydra_compose
from hydra import initialize_config_dir

from sparsepipe.config import compose
from sparsepipe.config.run_spec import RunSpec
from sparsepipe.errors import ConfigError
from sparsepipe.paper.printed import printed
from tests.support.command_line import composed
from tests.support.reported_runs import batch_of

TABLE_2 = {
    (int(row["resolution"]), int(row["num_gpus"]), row["network"], float(row["point_ratio_p"]),
     int(row["batch_size"]))
    for row in printed("table2")
}  # fmt: skip
"""As the paper prints them."""


def jobs(experiment: str, *arguments: str) -> list[list[str]]:
    return batch_of(f"experiment={experiment}", *arguments)


def config_of(overrides: list[str]) -> RunSpec:
    return composed(*overrides)


def cell(config: RunSpec) -> tuple[int, int, str, float, int]:
    data, devices = config.data.arguments, config.parallel.devices
    grid, network = data["resolution"], data["representation"]
    return grid, devices, network, data["point_ratio"], data["batch_size"]


@pytest.mark.full
def test_table_2_trains_what_the_paper_prints_and_nothing_else(monkeypatch) -> None:
    monkeypatch.setenv("MODELNET40", "somewhere")
    configs = [config_of(job) for job in jobs("table2", "scale=paper")]
    trained = [c for c in configs if c.task.locate().name == "train"]
    searched = [c for c in configs if c.task.locate().name == "fit_batch"]
    assert len(configs) == len(trained) + len(searched) == 24
    assert sorted(map(cell, trained)) == sorted(TABLE_2)
    alone = {row[:4] for row in TABLE_2 if row[1] == 1}
    assert {cell(c)[:4] for c in searched} == alone
    assert len(searched) == len(alone)
    for config in configs:
        kind = "dense" if cell(config)[2] == "dense" else "sparse"
        assert config.model.path == f"sparsepipe.models.{kind}_vgg16_bn"
        assert config.data.get("root") == "somewhere"
        assert (config.model.get("width"), config.trainer.max_epochs) == (1.0, 90)
        assert config.optim.optimizer.path == "torch.optim.SGD"
        optimizer = {k: config.optim.optimizer.arguments[k] for k in ("lr", "momentum", "nesterov")}
        assert optimizer == {"lr": 0.01, "momentum": 0.9, "nesterov": False}
        assert config.optim.schedule is None
        assert (config.data.get("num_points"), config.data.get("cached_points")) == (4096, 16384)
        assert config.data.get("augment")["enabled"] is False
        assert config.scale == "paper"


@pytest.mark.full
def test_fig_8_goes_over_four_resolutions_of_both_networks() -> None:
    configs = [config_of(job) for job in jobs("fig8", "scale=desk")]
    assert sorted((c.data.get("resolution"), c.representation) for c in configs) == [
        *itertools.product((32, 50, 100, 200), ("dense", "sparse"))
    ]
    assert {c.task.locate().name for c in configs} == {"train_if_fits"}
    assert {c.task.get("budget_bytes") for c in configs} == {2.75e9}
    assert {c.data.get("batch_size") for c in configs} == {16}


def test_a_sweep_is_small_unless_the_command_line_has_another_scale() -> None:
    assert all("scale=smoke" in job for job in jobs("table2"))
    desk = jobs("table2", "scale=desk", "data.resolution=32")
    assert len(desk) == 12
    assert all("scale=desk" in job and "++data.resolution=32" in job for job in desk)


@pytest.mark.parametrize("scale", ["smoke", "desk"])
def test_four_devices_share_the_batch_of_one(scale: str) -> None:
    one, four = (
        config_of(["experiment=table2", f"scale={scale}", f"paper/trial={trial}"])
        for trial in ("one_device", "four_devices")
    )
    assert (one.parallel.devices, four.parallel.devices) == (1, 4)
    assert four.hardware.get("cpu_devices") == 4
    assert one.data.get("batch_size") == 4 * four.data.get("batch_size")
    assert one.scale == four.scale == scale
    assert "paper" not in four.to_dict()


@pytest.mark.parametrize(
    ("scale", "batch"), [("smoke", 4), pytest.param("desk", 16, marks=pytest.mark.full)]
)
@pytest.mark.parametrize("parallel", ["single", "dp", "pipeline", "hete_mp"])
def test_elsewhere_each_device_takes_the_batch_of_one_whatever_the_number_of_devices(
    parallel: str, scale: str, batch: int
) -> None:
    for devices in ("1", "2", "4", "auto"):
        asked = [f"parallel={parallel}", f"parallel.devices={devices}"]
        config = config_of([*asked, f"scale={scale}"])
        assert config.data.get("batch_size") == batch


def test_a_scale_goes_with_any_data_and_its_values_give_way() -> None:
    asked = ["experiment=table2", "scale=desk", "data=modelnet40_points", "data.root=there"]
    config = config_of([*asked, "trainer.max_epochs=7"])
    assert config.data.get("source") == {
        "_target_": "sparsepipe.data.sources.NpzBundle",
        "_partial_": True,
    }
    assert (config.trainer.max_epochs, config.model.get("width")) == (7, 0.25)


def test_without_a_scale_all_is_as_it_was() -> None:
    config = composed("data=shapes")
    assert "scale" not in config.to_dict()
    source = config.data.get("source")
    assert (source["train_per_class"], source["test_per_class"]) == (200, 52)
    assert "scale" not in config.identity()
    assert composed("data=shapes", "scale=smoke").identity()["scale"] == "smoke"


def test_figure_7_takes_the_authors_batch_where_a_scale_is_not_smaller(monkeypatch) -> None:
    monkeypatch.setenv("MODELNET40", "somewhere")
    found = {
        scale: config_of(["experiment=fig7", *scale]).to_dict()["data"]
        for scale in ((), ("scale=paper",), ("scale=desk",), ("scale=smoke",))
    }
    assert [data["batch_size"] for data in found.values()] == [64, 64, 16, 4]
    assert {data["resolution"] for data in found.values()} == {50}


@pytest.mark.parametrize("experiment", ["fig9", "table3"])
def test_what_is_computed_from_others_measurements_is_the_same_run_at_any_scale(
    experiment: str,
) -> None:
    without = config_of([f"experiment={experiment}"])
    assert "paper" not in without.to_dict()
    for scale in ("smoke", "desk", "paper"):
        assert config_of([f"experiment={experiment}", f"scale={scale}"]) == without, scale


def test_a_scale_narrows_what_fig_9_sweeps() -> None:
    smoke, desk, whole = (jobs("fig9", *scale) for scale in (["scale=smoke"], ["scale=desk"], []))
    assert desk == whole
    assert len(whole) == 4 * 4 * 5
    assert len(smoke) == 5
    for job in smoke:
        assert {"task=paper/fig9_simulated_125", "hardware=paper_5gpu"} <= set(job)
    wider = jobs("fig9", "scale=smoke", "hardware=paper_5gpu,paper_8gpu")
    assert {word for job in wider for word in job if word.startswith("hardware")} == {
        "hardware=paper_5gpu",
        "hardware=paper_8gpu",
    }
    assert len(wider) == 10


def test_a_scale_narrows_what_the_study_of_depth_sweeps() -> None:
    smoke, whole = (jobs("pipeline_depth", *scale) for scale in (["scale=smoke"], []))
    assert len(whole) == 5 * 3 * 2
    assert sorted(sorted(word for word in job if "experiment=" not in word) for job in smoke) == [
        ["++paper.partition=straight", "paper/depth=emulated_4", "paper/schedule=serial"],
        ["++paper.partition=straight", "paper/depth=emulated_4", "paper/schedule=sync_1f1b"],
    ]
    wider = jobs("pipeline_depth", "scale=smoke", "paper.partition=variance,straight")
    assert len(wider) == 2 * 2


def test_a_scale_of_such_an_experiment_is_refused_where_nothing_stands_for_it() -> None:
    with initialize_config_dir(str(compose.config_dir()), version_base="1.3"):
        swept = hydra_compose("config", ["experiment=table3", "scale=smoke"])  # not admitted
    with pytest.raises(ConfigError, match="table3 computes with recorded"):
        compose.resolve(swept)
