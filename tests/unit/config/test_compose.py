"""What the configuration refuses, and that all it offers is sound."""

from __future__ import annotations

import inspect
import itertools
import re
import sys
from pathlib import Path
from typing import Annotated, Literal

import pytest
import pytorch_lightning as pl
import yaml
from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from hydra.types import RunMode
from pydantic import Field

from sparsepipe import cli
from sparsepipe.config import compose
from sparsepipe.config.compose import CONFIG_NAME, config_dir
from sparsepipe.config.listing import groups_in
from sparsepipe.config.schema import OWN_TRAINER_KEYS, TrainerArguments
from sparsepipe.config.target import names_in_source, parameters_of
from sparsepipe.errors import ConfigError
from sparsepipe.utils.arguments import checked, wrong_value
from sparsepipe.utils.extensions import DottedPath
from tests.support.command_line import Shell, composed

OPTIONS = [
    (group.name, option.name) for group in groups_in([config_dir()]) for option in group.options
]

GLOBAL = {
    *("debug", "experiment", "hparams_search", "scale"),
    *("paper/depth", "paper/network", "paper/schedule", "paper/trial"),
}
"""Groups that set keys of others."""
OF_BIGCONV = ("cnn1d", "cnn2d", "cnn3d", "fcn2d")
"""Networks whose sizes are for one study's task."""
OF_MULTI_DSN = ("digit_domains", "shape_domains")
"""Likewise, networks of several domains."""


@pytest.mark.parametrize(
    ("group", "option"), [each for each in OPTIONS if each[0] in GLOBAL - {"experiment"}]
)
def test_options_that_set_keys_of_others_compose(group: str, option: str) -> None:
    """Experiments are composed below, and all others by tests of the configuration reference."""
    study = ["experiment=bigconv"] if option in OF_BIGCONV else []
    domains = ["experiment=multi_dsn"] if option in OF_MULTI_DSN else []
    composed(*study, *domains, f"{group}={option}")


def test_all_other_options_have_a_key_of_their_own() -> None:
    assert {group for group, _ in OPTIONS} - GLOBAL <= set(composed().to_dict())


def parts_of(name: str) -> set[str]:
    """Files beside the groups of which one is made, and those that these are made of."""
    given = yaml.safe_load((config_dir() / f"{name}.yaml").read_text()) or {}
    entries = [entry for entry in given.get("defaults", ()) if isinstance(entry, str)]
    direct = {entry[1:].partition("@")[0] for entry in entries if entry.startswith("/")}
    return direct.union(*map(parts_of, direct))


def test_every_file_is_an_option_or_part_of_one() -> None:
    """So that all of them are composed."""
    files = [path.relative_to(config_dir()) for path in config_dir().rglob("*.yaml")]
    options = {f"{group}/{option}" for group, option in OPTIONS}
    reached = options.union(*map(parts_of, options))
    assert {file.with_suffix("").as_posix() for file in files} == {CONFIG_NAME, *reached}


@pytest.mark.parametrize("experiment", [o for group, o in OPTIONS if group == "experiment"])
def test_whatever_an_experiment_sweeps_composes(
    experiment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MODELNET40", "somewhere")
    with initialize_config_dir(str(config_dir()), version_base="1.3"):
        config = hydra_compose(CONFIG_NAME, [f"experiment={experiment}"], return_hydra_config=True)
    swept = [f"{name}={value}" for name, value in (config.hydra.sweeper.params or {}).items()]
    values = [
        [f"{override.get_key_element()}={value}" for value in override.sweep_string_iterator()]
        for override in OverridesParser.create().parse_overrides(swept)
        if override.is_sweep_override()
    ]
    for together in itertools.zip_longest(*values) if values else [()]:
        one_of_each = [override for override in together if override is not None]
        assert composed(f"experiment={experiment}", *one_of_each).name == experiment


def test_help_lists_the_options_that_compose(tmp_path: Path) -> None:
    """And not the files that options are made of."""
    said = Shell(tmp_path)("--help")
    assert said.code == 0, said.err
    listed = {
        (group, option)
        for group, options in re.findall(r"^([\w/]+): (.+)$", said.out, re.MULTILINE)
        for option in options.split(", ")
    }
    ours = (f"{group}/{option}".rpartition("/") for group, option in OPTIONS)
    assert listed == {
        *((directory, option) for directory, _, option in ours),
        ("data", "vectors"),
        ("model", "mlp"),
        ("model", "own"),
        ("experiment", "tiny"),
        ("hardware", "cores"),
        ("paper/trial", "batch_search"),
        ("paper/trial", "two_ranks"),
    }


def test_trainer_arguments_are_lightnings() -> None:
    known = set(inspect.signature(pl.Trainer).parameters)
    # Decided by other groups or by the run directory (sparsepipe/tasks/task.py).
    elsewhere = {"accelerator", "callbacks", "default_root_dir", "devices", "enable_checkpointing",
                 "logger", "num_nodes", "strategy", "use_distributed_sampler"}  # fmt: skip
    fields = set(TrainerArguments.__dataclass_fields__)
    ours = fields - {*OWN_TRAINER_KEYS}
    assert ours | elsewhere == known
    assert not ours & elsewhere
    assert set(yaml.safe_load((config_dir() / "trainer/default.yaml").read_text())) == fields


@pytest.mark.parametrize(
    ("override", "named"),
    [
        ("+trainer.max_epoch=3", "'trainer.max_epoch' (nearest: 'trainer.max_epochs')"),
        ("+sede=3", "'sede' (nearest: 'seed')"),
        ("parallel.serach.serach=dp", "(nearest: 'parallel.search')"),
        ("optim.optimizer.momentun=0.5", "(nearest: 'optim.optimizer.momentum')"),
        ("model.widht=16", "(nearest: 'model.width')"),
        ("data.batchsize=4", "(nearest: 'data.batch_size')"),
        ("parallel.strategy.timeout=4", "(nearest: 'parallel.strategy.timeout_s')"),
        ("trainer.max_epochs=1.5", "'trainer.max_epochs' must be a whole number, not 1.5"),
        ("trainer.max_epochs=true", "'trainer.max_epochs' must be a whole number, not True"),
        ("data.batch_size=many", "'data.batch_size' must be a whole number"),
        ("optim.label_smoothing=null", "'optim.label_smoothing' must be a number"),
        ("optim.label_smoothing=2", "must be less than or equal to 1, not 2"),
        ("optim.optimizer.lr=fast", "'optim.optimizer.lr' must be a number, not 'fast'"),
        ("optim.optimizer.lr=nan", "'optim.optimizer.lr' must be a finite number, not nan"),
        ("task.mode=highest", "'task.mode' must be 'max' or 'min'"),
        ("model._target_=tests.support.tinyhouse.mpl", "tinyhouse has no mpl (nearest: "),
        ("model._target_=nohouse.mlp", "module nohouse not found"),
        ("optim.optimizer=5", "'optim.optimizer' must be a mapping with a _target_"),
        (
            "callbacks.early={_target_: tests.support.tinyhouse.Fault}",
            "'callbacks.early.plan' is missing",
        ),
        ("paths.data=${oc.env:NO_SUCH_VARIABLE}", "cannot be resolved"),
    ],
)
def test_refused(override: str, named: str) -> None:
    with pytest.raises(ConfigError) as error:
        composed("data=vectors", "model=mlp", "parallel=dp", override)
    assert named in error.value.message
    assert error.value.remedy


@pytest.mark.parametrize(("group", "option"), [o for o in OPTIONS if o[0] == "model"])
def test_arguments_of_every_model_are_checked(group: str, option: str) -> None:
    with pytest.raises(ConfigError, match=r"'model\.width' must be a number, not 'abc'"):
        composed(f"{group}={option}", "model.width=abc")


def test_limits_of_constructors_are_those_of_the_configuration() -> None:
    with pytest.raises(ConfigError, match=r"'data\.batch_size' must be greater than or equal to 1"):
        composed("data=shapes", "data.batch_size=0")


def test_data_follow_the_model() -> None:
    def representation(*overrides: str) -> str:
        return composed(*overrides).data.get("representation")

    for name, expected in (("dense", "dense"), ("sparse", "sparse")):
        for depth in (11, 13, 16, 19):
            model = f"model={name}_vgg{depth}_bn"
            assert representation(model) == expected
        assert representation(model, "experiment=modelnet40_points") == expected
    assert representation("model=dense_vgg16_bn", "data.representation=dense_surface") == (
        "dense_surface"
    )


def test_arguments_left_out_of_the_yaml_can_be_set() -> None:
    config = composed("data=vectors", "model=mlp", "optim.optimizer.foreach=true")
    assert config.optim.optimizer.get("foreach") is True


def test_several_mistakes_are_reported_at_once() -> None:
    with pytest.raises(ConfigError, match=r"max_epoch'.*widht") as error:
        composed("data=vectors", "model=mlp", "trainer.max_epoch=1", "trainer.widht=2")
    assert error.value.message.count("unknown key") == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["trainer.max_epoch=3"], "(nearest: 'trainer.max_epochs')"),
        (["modle=mlp"], "unknown key 'modle' (nearest: 'model')"),
        (["trainer.max_epochs=[1"], "the configuration cannot be composed"),
        (["logger=null"], "'logger' has no option 'null'"),
        (["data=shapes", "seed=0,1"], "data=shapes seed=0,1; write a list as"),
    ],
)
def test_command_line_refuses(tmp_path: Path, arguments: list[str], message: str):
    refused = Shell(tmp_path)(*arguments)
    assert refused.code == 2
    assert message in refused.err
    assert "remedy:" in refused.err
    assert "Traceback" not in refused.err
    assert not refused.out
    assert not list(tmp_path.iterdir()), "a refused run leaves nothing behind"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["model=unet"], "'model' has no option 'unet' (nearest: 'unet3d')"),
        (["task=fig9/emulatd"], "(nearest: 'paper/fig9_emulated')"),
        (["++data.resolution=16,32"], "++data.resolution=16,32 has several values"),
        (["data.root=my", "mixed"], "with quotes around a value with spaces"),
        (["hydra/launcher=nowhere"], "hydra/launcher=nowhere is not installed"),
    ],
)
def test_what_hydra_refuses_is_explained(overrides: list[str], message: str) -> None:
    loader = compose.config_loader()
    with pytest.raises(HydraException) as error:
        loader.load_configuration(CONFIG_NAME, compose.admit(overrides), run_mode=RunMode.RUN)
    settings = [text for text in overrides if "=" in text]
    assert message in str(compose.explain(error.value, settings))


@pytest.mark.parametrize(("launcher", "extra"), [("joblib", "joblib"), ("submitit_slurm", "slurm")])
def test_the_extra_of_a_missing_launcher_is_named(launcher: str, extra: str) -> None:
    error = HydraException(f"In 'hydra/config': Could not find 'hydra/launcher/{launcher}'")
    text = str(compose.explain(error, []))
    assert f"pip install 'sparsepipe[{extra}]'" in text


def test_an_option_like_none_that_there_is_has_them_listed_once() -> None:
    refused = compose.explain(HydraException(), ["hardware=/my/lab.yaml"])
    assert refused is not None
    assert refused.message.count("two_speeds") == 1


def test_the_command_without_arguments_trains_a_narrow_network_on_few_shapes() -> None:
    spec = composed(*cli.FIRST)
    assert spec.scale == "desk"
    assert spec.data.get("source")["train_per_class"] == 50


def test_options_may_stand_between_overrides() -> None:
    given = ["data=shapes", "-m", "seed=0,1", "--config-dir", "own", "name=x"]
    expected = (["-m", "--config-dir", "own"], ["data=shapes", "seed=0,1", "name=x"])
    assert compose.split_options(given) == expected


def test_several_devices_need_a_strategy(job) -> None:
    with pytest.raises(ConfigError, match="no strategy is set"):
        job("parallel=single", "parallel.devices=2", "hardware.accelerator=cpu")


def test_identity_leaves_out_what_changes_nothing() -> None:
    base = composed("data=vectors").identity()
    same = composed("data=vectors", "data.num_workers=3", "force=true", "logger=wandb",
                    "tags=[a]")  # fmt: skip
    assert same.identity() == base
    # The inventory's fingerprint and the number of ranks stand for these.
    same = composed("data=vectors", "hardware.accelerator=cpu", "parallel.devices=auto",
                    "task.gallery=3", "trainer.enable_autolog_hparams=false",
                    "trainer.checkpoints=none")  # fmt: skip
    assert same.identity() == base
    assert composed("data=vectors", "seed=1").identity() != base
    stop = "callbacks={stop: {_target_: pytorch_lightning.callbacks.EarlyStopping, monitor: a}}"
    assert composed("data=vectors", stop).identity() != base


@pytest.mark.parametrize("task", ["train", "profile", "fit_batch", "simulate", "paper/table1"])
def test_identities_have_the_recorded_name_of_a_task(task: str) -> None:
    config = composed("experiment=tiny", f"task={task}", "parallel=single")
    assert config.identity()["task._target_"].startswith("sparsepipe.experiment.")


@pytest.mark.parametrize(
    ("value", "hint", "fits"),
    [
        (True, int, False),
        (1, float, True),
        (1.0, int, False),
        (None, str | None, True),
        ([1], tuple[int, ...], True),
        ("x", Path, True),
        ("fast", float | pl.Trainer, False),
        (0.5, float | pl.Trainer, True),
        ("node", pl.Trainer | None, False),
        ("a", DottedPath | Literal["exact"], False),
        ("a.b", DottedPath | Literal["exact"], True),
    ],
)
def test_values_of_a_type(value: object, hint: object, fits: bool) -> None:
    assert (wrong_value(value, hint) is None) is fits


def test_arguments_of_a_function_are_checked_by_its_hints() -> None:
    @checked
    def draw(count: Annotated[int, Field(ge=1)], *, kind: Literal["a", "b"] = "a") -> int:
        del kind
        return count

    assert draw(2, kind="b") == 2
    for arguments, name in (({"count": 0}, "count=0"), ({"count": 1, "kind": "c"}, "kind='c'")):
        with pytest.raises(ConfigError, match=name) as error:
            draw(**arguments)
        assert error.value.remedy


_OWN = """
from __future__ import annotations
from dataclasses import dataclass
from functools import partial
from typing import Protocol

def several(first, *, third=1): ...
narrow = partial(several, 3)
def open_to_all(first, **more): ...
class Base:
    def __init__(self, size, *, name="x"): ...
class Heir(Base): ...
@dataclass
class Point(Protocol):
    x: float
@dataclass
class Solid(Point):
    z: int = 0
class Made:
    def __new__(cls, x): ...
"""


def test_names_are_read_from_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_names.py").write_text(_OWN)
    (tmp_path / "reexported.py").write_text("from own_names import Heir as Known")
    monkeypatch.syspath_prepend(tmp_path)
    expected = {
        "own_names.several": {"first", "third"},
        "own_names.narrow": {"first", "third"},
        "own_names.Base": {"self", "size", "name"},
        "reexported.Known": {"self", "size", "name"},
        "own_names.Solid": {"x", "z"},
        **dict.fromkeys(("own_names.open_to_all", "own_names.Made", "no.where", "own_names.a")),
    }
    assert {name: names_in_source(name) for name in expected} == expected
    assert "own_names" not in sys.modules


TARGETS = sorted(
    {
        target
        for file in config_dir().rglob("*.yaml")
        for target in re.findall(r"_target_: ([\w.]+)", file.read_text())
    }
)


@pytest.mark.parametrize("target", TARGETS)
def test_names_in_source_are_those_of_the_signature(target: str) -> None:
    found = names_in_source(target)
    assert found is None or {*parameters_of(target).types} <= found
