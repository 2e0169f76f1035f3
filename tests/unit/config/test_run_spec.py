"""The parsed configuration: what it keeps, how it changes, and what it is read from."""

from __future__ import annotations

import pickle
from dataclasses import FrozenInstanceError
from pathlib import Path

import pytest
import yaml

from sparsepipe.config.run_spec import RunSpec
from sparsepipe.config.target import Target
from sparsepipe.errors import ConfigError
from tests.support.command_line import composed


def test_it_keeps_exactly_the_keys_that_were_given() -> None:
    spec = composed("data=shapes", "parallel=hete_mp", "logger=wandb")
    again = RunSpec.from_dict(spec.to_dict())
    assert again == spec
    assert again.to_dict() == spec.to_dict()
    assert pickle.loads(pickle.dumps(spec)) == spec
    assert "plan" not in composed("parallel=single").to_dict()["parallel"]


def test_attributes_are_typed() -> None:
    spec = composed("data=shapes", "parallel=gpipe", "trainer.limit_train_batches=3")
    assert spec.model == Target(spec.model.path, spec.model.arguments)
    assert spec.model.name == "sparse_vgg16_bn"
    assert "backend" not in spec.model.settings
    assert spec.parallel.synchronous is not None
    assert spec.parallel.synchronous.option == "gpipe"
    assert spec.trainer.batches_limit == 3
    with pytest.raises(FrozenInstanceError):
        spec.seed = 3  # type: ignore[misc]


def test_a_changed_copy_leaves_the_first_as_it_is() -> None:
    spec = composed("data=shapes", "parallel=dp")
    other = spec.replace({"trainer.max_epochs": 1, "data.batch_size": 2}, callbacks={})
    assert (other.trainer.max_epochs, other.data.get("batch_size")) == (1, 2)
    assert spec.trainer.max_epochs != 1
    alone = spec.replace({"parallel.strategy": None})
    assert (spec.parallel.is_data_parallel, alone.parallel.is_data_parallel) == (True, False)
    task = spec.replace(task=Target("a.b", {"c": 1}))
    assert task.to_dict()["task"] == {"_target_": "a.b", "c": 1}


def test_groups_that_a_run_does_not_use_are_part_of_its_identity() -> None:
    spec = composed("data=shapes").without("trainer", "model", "optim")
    assert spec.trainer.max_epochs is None
    assert spec.identity()["model._target_"] == spec.identity()["trainer._target_"] == "none"


@pytest.mark.parametrize(
    "key",
    [
        *("checkpoint_strict=false", "task.test_weights=last", "data.source.fill=0.0"),
        *("trainer.matmul_precision=highest", "loss.lovasz=1.0", "data.patch=[8,8,8]"),
    ],
)
def test_runs_of_versions_without_a_key_keep_their_identity(key: str) -> None:
    spec = composed("data=volume_files")
    values = spec.to_dict()
    del values["checkpoint_strict"], values["input"], values["task"]["test_weights"]
    del values["data"]["source"]["fill"], values["data"]["source"]["ignore"]
    del values["trainer"]["matmul_precision"], values["loss"]
    former = RunSpec.from_dict(values)
    assert former.identity() == spec.identity()
    changed = composed("data=volume_files", key)
    name, _, value = key.partition("=")
    assert changed.identity() == {**spec.identity(), name: yaml.safe_load(value)}


PATCHES = ("patch", "patches_per_volume", "batches_per_epoch", "balance")
PREPARATION = ("orientation", "spacing", "intensity", "channels")


@pytest.mark.parametrize("data", ["volumes", "images", "signals", "volume_files"])
def test_runs_before_patches_keep_their_identity(data: str) -> None:
    spec = composed(f"data={data}")
    values = spec.to_dict()
    for key in PATCHES:
        del values["data"][key]
    for key in PREPARATION if data == "volume_files" else ():
        del values["data"]["source"][key]
    assert RunSpec.from_dict(values).identity() == spec.identity()


def test_predictions_before_label_volumes_keep_their_identity() -> None:
    spec = composed("task=predict")
    values = spec.to_dict()
    del values["task"]["overlap"], values["task"]["probabilities"]
    assert RunSpec.from_dict(values).identity() == spec.identity()


def test_it_is_read_from_a_run_directory(tmp_path: Path) -> None:
    spec = composed("data=shapes", "force=true")
    path = tmp_path / "config.yaml"
    path.write_text(spec.to_yaml())
    assert "force" not in yaml.safe_load(path.read_text())
    assert RunSpec.load(path) == spec.replace(force=False)
    assert "directory" in yaml.safe_load(path.read_text())["hydra"]
    assert not RunSpec.load(path).to_dict()["hydra"], "trackers get this, wherever a run goes on"


def test_what_cannot_be_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        RunSpec.load(tmp_path / "config.yaml")
    values = composed("data=shapes").to_dict()
    del values["trainer"]
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(values))
    with pytest.raises(ConfigError, match=r"not complete.*'trainer'") as caught:
        RunSpec.load(tmp_path / "config.yaml")
    assert "another version" in caught.value.remedy


def test_a_target_builds_with_what_it_takes() -> None:
    target = Target("fractions.Fraction", {"numerator": 3})
    assert target.replace(denominator=2).build() == 1.5
    assert target.build_with(denominator=2, numerator=5) == 1.5, "its own arguments count"
    with pytest.raises(ConfigError, match=r"fractions\.Fraction cannot be built"):
        target.build(denominators=2)
