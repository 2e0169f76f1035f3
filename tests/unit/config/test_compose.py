"""What the configuration refuses, and that all it offers is sound."""

from __future__ import annotations

import inspect
import itertools
import re
from pathlib import Path

import pytest
import pytorch_lightning as pl
import yaml
from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from hydra.types import RunMode

from sparsepipe import cli
from sparsepipe.config import compose
from sparsepipe.config.check import fits
from sparsepipe.config.compose import CONFIG_NAME, config_dir
from sparsepipe.config.listing import groups_in
from sparsepipe.config.schema import OWN_TRAINER_KEYS, TrainerArguments
from sparsepipe.errors import ConfigError, HardwareError
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
    ("override", "message"),
    [
        ("trainer.max_epoch=3", "'trainer.max_epoch' (nearest: 'trainer.max_epochs')"),
        ("+trainer.max_epoch=3", "'trainer.max_epoch' (nearest: 'trainer.max_epochs')"),
        ("+sede=3", "'sede' (nearest: 'seed')"),
        ("optim.optimizer.momentun=0.5", "(nearest: 'optim.optimizer.momentum')"),
        ("model.widht=16", "(nearest: 'model.width')"),
        ("data.batchsize=4", "(nearest: 'data.batch_size')"),
        ("parallel.strategy.timeout=4", "(nearest: 'parallel.strategy.timeout_s')"),
        ("trainer.max_epochs=abc", "'trainer.max_epochs' must be a whole number or null"),
        ("trainer.max_epochs=1.5", "must be a whole number"),
        ("data.batch_size=many", "'data.batch_size' must be a whole number"),
        ("optim.label_smoothing=null", "'optim.label_smoothing' must be a number"),
        ("optim.label_smoothing=2", "must be a number from 0 to 1, not 2"),
        ("seed=5000000000", "'seed' must be a whole number from 0 to 4294967295"),
        ("optim.optimizer.lr=fast", "'optim.optimizer.lr' must be a number, not 'fast'"),
        ("optim.optimizer.lr=inf", "'optim.optimizer.lr' must be a number of at most 3.4e+38"),
        ("optim.optimizer.lr=nan", "must be a number of at most 3.4e+38 in size, not nan"),
        ("optim.optimizer.lr=1e400", "must be a number of at most 3.4e+38 in size, not inf"),
        ("optim.optimizer.lr=1e308", "must be a number of at most 3.4e+38 in size, not 1e+308"),
        ("task.mode=highest", "'task.mode' must be one of 'max', 'min'"),
        ("model._target_=tests.support.tinyhouse.mpl", "tinyhouse has no mpl"),
        ("model._target_=nohouse.mlp", "there is no module nohouse"),
        ("optim.optimizer=5", "'optim.optimizer' must be a mapping with a _target_"),
        (
            "callbacks.early={_target_: tests.support.tinyhouse.Fault}",
            "'callbacks.early.plan' is missing",
        ),
        ("paths.data=${oc.env:NO_SUCH_VARIABLE}", "cannot be resolved"),
    ],
)
def test_refused(override: str, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        composed("data=vectors", "model=mlp", "parallel=dp", override)
    assert message in error.value.message
    assert error.value.remedy


@pytest.mark.parametrize(("group", "option"), [o for o in OPTIONS if o[0] == "model"])
def test_arguments_of_every_model_are_checked(group: str, option: str) -> None:
    with pytest.raises(ConfigError, match=r"'model\.width' must be a number, not 'abc'"):
        composed(f"{group}={option}", "model.width=abc")


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
    ("arguments", "code", "message"),
    [
        (["trainer.max_epoch=3"], 2, "(nearest: 'trainer.max_epochs')"),
        pytest.param(
            ["+trainer.max_epoch=3"], 2, "(nearest: 'trainer.max_epochs')", marks=pytest.mark.full
        ),
        (["modle=mlp"], 2, "unknown key or group 'modle' (nearest: 'model')"),
        pytest.param(
            ["model=mpl"],
            2,
            "'model' has no option 'mpl' (nearest: 'mlp'); there are: cnn1d, cnn2d, cnn3d,",
            marks=pytest.mark.full,
        ),
        pytest.param(
            ["logger=wandb_offline"],
            2,
            "'logger' has no option 'wandb_offline' (nearest: 'wandb')",
            marks=pytest.mark.full,
        ),
        pytest.param(["experiment=tinny"], 2, "(nearest: 'tiny')", marks=pytest.mark.full),
        pytest.param(
            ["task=fig9/emulatd"], 2, "(nearest: 'paper/fig9_emulated')", marks=pytest.mark.full
        ),
        pytest.param(
            ["trainer.max_epochs=abc"],
            2,
            "must be a whole number or null, not 'abc'",
            marks=pytest.mark.full,
        ),
        pytest.param(
            ["trainer.max_epochs="], 2, "must be a whole number or null", marks=pytest.mark.full
        ),
        (["trainer.max_epochs=[1"], 2, "trainer.max_epochs=[1 cannot be read as key=value"),
    ],
)
def test_command_line_refuses(tmp_path: Path, arguments: list[str], code: int, message: str):
    refused = Shell(tmp_path)(*arguments)
    assert refused.code == code
    assert message in refused.err
    assert "remedy:" in refused.err
    assert "Traceback" not in refused.err
    assert not refused.out
    assert not list(tmp_path.iterdir()), "a refused run leaves nothing behind"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["data=shapes", "seed=0,1", "scale=smoke", "name=a b"],
            "to sweep over them add -m: sparsepipe -m data=shapes seed=0,1 scale=smoke 'name=a b'",
        ),
        (["tags=a,b"], "; a list is 'tags=[a,b]'; a text with commas is 'tags=\"a,b\"'"),
        (["data.root=/a/b, c"], "add -m: sparsepipe -m 'data.root=/a/b, c'; a list is"),
        (["++data.resolution=16,32"], "data.resolution=16,32 has several values"),
        (["data.root=my", "mixed", "parts", "seed=0"], "quotes: 'data.root=my mixed parts'"),
        (["scale=desk", "help"], "`sparsepipe --help` is meant"),
        (["data=shapes", "seed"], "'seed' is no setting, which is a key=value"),
        (["data.root=/a=b/c"], "'data.root=\"/a=b/c\"'"),
        (["data.root=~/parts", "seed=0,1"], "seed=0,1 has several values"),
        (["hydra/launcher=nowhere"], "hydra/launcher=nowhere is not installed"),
    ],
)
def test_what_hydra_refuses_is_explained(overrides: list[str], message: str) -> None:
    loader = compose.config_loader()
    with pytest.raises(HydraException) as error:
        loader.load_configuration(CONFIG_NAME, compose.admit(overrides), run_mode=RunMode.RUN)
    plain = [text.lstrip("+") for text in overrides]
    settings = [text for text in plain if "=" in text]
    text = str(compose.explain(error.value, settings, loader, words=plain, command=plain))
    assert message in text
    assert "seed=[" not in text, "it takes no list"


def test_an_option_that_there_is_not() -> None:
    with pytest.raises(ConfigError, match=r"there is no option --hlep \(nearest: '--help'\)"):
        compose.options_first(["data=shapes", "--hlep"])


@pytest.mark.parametrize(("launcher", "extra"), [("joblib", "joblib"), ("submitit_slurm", "slurm")])
def test_the_extra_of_a_missing_launcher_is_named(launcher: str, extra: str) -> None:
    error = HydraException(f"In 'hydra/config': Could not find 'hydra/launcher/{launcher}'")
    text = str(compose.explain(error, [], compose.config_loader()))
    assert f"pip install 'sparsepipe[{extra}]'" in text


@pytest.mark.parametrize(
    ("override", "message"),
    [
        *((each, r"has no option '.*'; there are: \w") for each in (
            "logger=null", "scale=1", "data=10", "parallel=2,3", "logger=[csv,1]"
        )),
        ("hydra/launcher=null", r"'hydra/launcher' has no option 'null'$"),
    ],
)  # fmt: skip
def test_groups_take_names_alone(override: str, message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        compose.refuse_values_of_groups([override], compose.config_loader())
    assert re.search(message, refused.value.message)


def test_an_option_like_none_that_there_is_has_them_listed_once() -> None:
    refused = compose.explain(ValueError(), ["hardware=/my/lab.yaml"], compose.config_loader())
    assert refused.message.count("two_speeds") == 1


def test_names_of_options_and_mappings_in_their_place_are_taken() -> None:
    given = ["logger=[csv,wandb]", "data=shapes,digits", "~hparams_search", "seed=1"]
    given += ["experiment=glob(ta*)", "data='shapes'", "callbacks={own: {_target_: a.B}}"]
    compose.refuse_values_of_groups(given, compose.config_loader())


def test_the_command_without_arguments_trains_a_narrow_network_on_few_shapes() -> None:
    spec = composed(*cli.FIRST)
    assert spec.scale == "desk"
    assert spec.data.get("source")["train_per_class"] == 50


@pytest.mark.parametrize("words", [["-m", "--cfg", "job"], ["seed=0,1", "--info", "--multirun"]])
def test_a_sweep_is_not_printed(words: list[str]) -> None:
    with pytest.raises(ConfigError, match=r"-m and --(cfg|info): a sweep is not printed"):
        compose.refuse_printed_sweep(words)


def test_options_may_stand_between_overrides() -> None:
    given = ["data=shapes", "-m", "seed=0,1", "--config-dir", "own", "name=x"]
    expected = ["-m", "--config-dir", "own", "data=shapes", "seed=0,1", "name=x"]
    assert compose.options_first(given) == expected


def test_a_directory_of_groups_must_be_there(tmp_path: Path) -> None:
    compose.refuse_missing_directories(["seed=1", "--config-dir", str(tmp_path)])
    for words in (["--config-dir", "/nowhere"], ["-cd=/nowhere"], ["--config-dir=/nowhere"]):
        with pytest.raises(ConfigError, match="/nowhere: there is no such directory"):
            compose.refuse_missing_directories(["seed=1", *words])


def test_more_devices_than_there_are(job) -> None:
    with pytest.raises(HardwareError, match="999 devices are requested, the inventory has"):
        job("parallel=dp", "parallel.devices=999", "hardware.accelerator=cpu")


def test_several_devices_need_a_strategy(job) -> None:
    with pytest.raises(ConfigError, match="without a strategy"):
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


@pytest.mark.parametrize(
    ("value", "hint", "expected"),
    [
        (True, int, False),
        (1, float, True),
        (1.0, int, False),
        ("a", str | None, True),
        (None, str | None, True),
        ([1], tuple[int, ...], True),
        ("x", Path, True),
        (object(), pl.Trainer, True),
        ("fast", float | pl.Trainer, False),
        (0.5, float | pl.Trainer, True),
        ("node", pl.Trainer | None, True),
    ],
)
def test_fits(value: object, hint: object, expected: bool) -> None:
    assert fits(value, hint) is expected
