"""``--from RUN``: the configuration of a run, and what the command sets on top."""

from __future__ import annotations

from pathlib import Path

import pytest
from omegaconf import OmegaConf

from sparsepipe.config.compose import admit, config_dir, printed_text
from sparsepipe.config.finished_run import NOT_RECORDED, replayed
from sparsepipe.config.listing import groups_in
from sparsepipe.config.run_spec import RunSpec
from sparsepipe.errors import ConfigError
from tests.support.command_line import Shell, composed
from tests.support.paths import CONF


def recorded(tmp_path: Path, *overrides: str) -> RunSpec:
    """A run's ``config.yaml`` in ``tmp_path``, with its overrides as the command records them."""
    spec = composed(*overrides)
    values = spec.to_dict()
    words = [word for word in overrides if not word.startswith(NOT_RECORDED)]
    values["hydra"] = {"overrides": words, "choices": {}}
    (tmp_path / "config.yaml").write_text(RunSpec.from_dict(values).to_yaml())
    return spec


def from_run(words: list[str]) -> list[str]:
    return replayed(words, [group.name for group in groups_in([config_dir()])])


def again(tmp_path: Path, *overrides: str) -> RunSpec:
    words = from_run(["--config-dir", str(CONF), "--from", str(tmp_path), *overrides])
    assert words[:2] == ["--config-dir", str(CONF)]
    return composed(*words[2:])


RUN = (
    *("data=modelnet40", "data.root='/somewhere else, it\\'s here'", "paths.outputs=elsewhere"),
    *("model=dense_vgg11_bn", "model.width=0.25", "seed=3", "optim=adamw", "data.resolution=20"),
    *("parallel=gpipe", "parallel.devices=2", "hardware.cpu_devices=2", "tags=[a,'b c']"),
    *("callbacks=[early_stopping]", "hardware.accelerator=cpu", "name=first"),
    *("checkpoint=first.ckpt", "checkpoint_strict=false", "input=parts"),
)


STUDY = ("experiment=staleness", "scale=smoke", "parallel.strategy.mode=none")


@pytest.mark.parametrize("words", [RUN, STUDY])
def test_it_is_the_same_configuration(tmp_path: Path, words: tuple[str, ...]) -> None:
    spec = recorded(tmp_path, *words)
    found = again(tmp_path)
    assert found.flat() == spec.flat()
    assert found.identity() == spec.identity()


def test_what_follows_from_a_setting_still_does(tmp_path: Path) -> None:
    recorded(tmp_path, *RUN)
    found = again(tmp_path, "seed=7")
    assert (found.seed, found.data.get("seed"), found.model.get("width")) == (7, 7, 0.25)


def test_a_group_of_the_command_takes_the_place_of_the_runs(tmp_path: Path) -> None:
    recorded(tmp_path, *RUN, "optim.optimizer.betas=[0.8,0.9]", "optim.optimizer.lr=0.5")
    found = again(tmp_path, "optim=sgd", "optim.optimizer.momentum=0.5")
    assert found.optim.optimizer.path == "torch.optim.SGD"
    assert found.optim.optimizer.arguments["lr"] == 0.01
    assert found.optim.optimizer.arguments["momentum"] == 0.5
    assert "betas" not in found.optim.optimizer.arguments
    assert found.data.get("resolution") == 20
    plain = again(tmp_path, "parallel=single", "parallel.devices=1")
    assert (plain.parallel.strategy, plain.parallel.plan) == (None, None)


def test_options_stay_in_front(tmp_path: Path) -> None:
    recorded(tmp_path, "data=shapes", "seed=4")
    words = from_run(["-m", f"--from={tmp_path}", "optim.optimizer.lr=0.1,0.2"])
    assert (words[0], words[-1]) == ("-m", "optim.optimizer.lr=0.1,0.2")
    assert "seed=4" in words
    assert from_run(["seed=1"]) == ["seed=1"]


def test_what_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        from_run(["--from", str(tmp_path)])
    (tmp_path / "config.yaml").write_text("a: 1")
    with pytest.raises(ConfigError, match="not a valid configuration of a run"):
        from_run(["--from", str(tmp_path)])
    with pytest.raises(ConfigError, match="cannot be read"):
        from_run(["seed=1", "--from"])


@pytest.mark.parametrize(
    "word",
    [
        *("--config-dir=there", "--experimental-rerun=config.pickle", "-m", "seed"),
        *("force=true", "hydra.job.env_set.A=1", "+hydra/launcher=joblib", "paths.outputs=there"),
        *("name=${oc.env:HOME}", "++tags=['a ${ oc.env: HOME}']", "name=${${name}:HOME}"),
        *(r"name=$\{oc.env\:HOME\}", "name='${oc.${seed}:HOME}'", "+model@hydra.x=tiny"),
    ],
)
def test_what_no_run_records_is_not_taken_from_it(tmp_path: Path, word: str) -> None:
    recorded(tmp_path, "data=shapes")
    config = tmp_path / "config.yaml"
    config.write_text(config.read_text().replace("- data=shapes", f"- seed=4\n  - {word!r}"))
    with pytest.raises(ConfigError, match="records the override"):
        from_run(["--from", str(tmp_path)])
    if word.startswith("name"):
        assert "seed=4" in from_run(["--from", str(tmp_path), "name=mine"])


def test_a_task_that_only_prints_begins_from_no_run() -> None:
    task = {"_target_": "sparsepipe.runs.disk.clean", "ask": False}
    with pytest.raises(ConfigError, match="makes no run"):
        printed_text(OmegaConf.create({"task": task, "from_run": "config.yaml"}), [])


@pytest.mark.parametrize(
    "node",
    [
        "{_target_: torch.optim.lr_scheduler.StepLR, _partial_: true, step_size: 2}",
        "{step_size: 2, _partial_: true, _target_: torch.optim.lr_scheduler.StepLR}",
    ],
)
def test_a_node_that_is_named_anew_replaces_the_former(node: str) -> None:
    node = f"optim.schedule={node}"
    spec = composed("data=shapes", "optim=adamw", node)
    assert spec.optim.schedule is not None
    assert set(spec.optim.schedule.arguments) == {"_partial_", "step_size"}
    assert admit([node]) == ["++optim.schedule=null", f"++{node}"]
    swept = f"{node},{{gamma: 1, _target_: a.b}}"
    assert admit([swept]) == ["++optim.schedule=null", f"++{swept}"]
    inner = "optim.schedule={a: {_target_: b}}"
    assert admit([inner]) == [f"++{inner}"]


@pytest.mark.full
def test_the_command_finds_the_run_again(shell: Shell) -> None:
    run = shell("seed=2", "paths.outputs=there", "trainer.max_epochs=1").run
    again = shell("--from", str(run))
    assert (again.run, "finished before" in again.err) == (run, True)
    other = shell(f"--from={run}", "seed=3").run
    assert (other.parent, other != run) == (run.parent, True)
    found = RunSpec.load(other / "config.yaml")
    assert (found.seed, found.trainer.max_epochs) == (3, 1)
    missing = shell("--from", "nowhere")
    assert (missing.code, "cannot be read" in missing.err) == (2, True)
    several = shell("--from", str(run), "seed=0,1")
    assert f" --from {run} seed=0,1" in several.err.partition("sparsepipe -m ")[2]
    assert "Traceback" not in several.err
