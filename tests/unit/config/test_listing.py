"""``task=list``: what there is to choose from."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hydra.conf import ConfigSourceInfo
from hydra.core.object_type import ObjectType
from omegaconf import OmegaConf

from sparsepipe.config.compose import config_dir, config_loader, printed_text
from sparsepipe.config.listing import first_comment, groups_in, list_options
from sparsepipe.errors import ConfigError
from sparsepipe.launch.prepare import resolve_run
from tests.support.command_line import Shell, composed

OURS = groups_in([config_dir()])
LOADER = config_loader()


def hydras(group: str, below: str = "") -> Iterator[str]:
    """Options as Hydra finds them."""
    place = f"{group}/{below}".rstrip("/")
    yield from (below + name for name in LOADER.get_group_options(place, ObjectType.CONFIG))
    for name in LOADER.get_group_options(place, ObjectType.GROUP):
        yield from hydras(group, f"{below}{name}/")


def hydras_groups() -> Iterator[str]:
    """A directory without options of its own holds groups; ``base`` what options are made of."""
    for name in {*LOADER.list_groups("")} - {"base", "hydra"}:
        if LOADER.get_group_options(name, ObjectType.CONFIG):
            yield name
        else:
            below = LOADER.get_group_options(name, ObjectType.GROUP)
            yield from (f"{name}/{each}" for each in below if each != "base")


def listed(text: str) -> set[tuple[str, str]]:
    """Groups and options in what the task prints."""
    blocks = [block.splitlines() for block in text.strip().split("\n\n")]
    return {
        (block[0].partition("  ")[0].partition("=")[0], line.split()[0])
        for block in blocks
        for line in block[1:]
        if re.match(r"  \S", line)
    }


def test_groups_and_options_are_those_that_hydra_finds() -> None:
    assert {group.name for group in OURS} == {*hydras_groups()}
    for group in OURS:
        assert [option.name for option in group.options] == sorted(hydras(group.name))


@pytest.mark.parametrize("group", OURS, ids=lambda group: group.name)
def test_every_group_and_option_has_a_line(group) -> None:
    assert group.line, "a comment beside it in the defaults of conf/config.yaml"
    without = [option.name for option in group.options if not option.line]
    assert not without, "their files begin without a comment"
    long = [option.name for option in group.options if len(option.line) > 200]
    assert not long, "the first sentence of their comments is to be one line"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("# One. Two\nkey: 1", "One"),
        ("# @package _global_\n# One\n# and a half. Two", "One and a half"),
        ("# Fig. 9, see conf/a.yaml: simulated.", "Fig. 9, see conf/a.yaml: simulated"),
        ("# A sweep; with a table", "A sweep"),
        ("# One (of two; or three. Or four). Five", "One (of two; or three. Or four)"),
        ("# As a sweep:\n#   sparsepipe -m\n", "As a sweep"),
        ("key: 1 # no first comment\n# One", ""),
        ("", ""),
    ],
)
def test_the_line_is_the_first_sentence(text: str, said: str) -> None:
    assert first_comment(text) == said


def test_own_options_beside_ours(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "own.yaml").write_text("# My network.\n_target_: mine.Net\n")
    (tmp_path / "model" / "sparse_vgg16_bn.yaml").write_text("# Hidden by the house's own.\n")
    (tmp_path / "hydra" / "launcher").mkdir(parents=True)
    (tmp_path / "hydra" / "launcher" / "cluster.yaml").write_text("partition: gpu\n")
    found = {group.name: group for group in groups_in([config_dir(), tmp_path])}
    lines = {option.name: option.line for option in found["model"].options}
    assert lines["own"] == "My network"
    assert lines["sparse_vgg16_bn"].startswith("Sparse VGG16-BN")
    assert found["model"].default == "sparse_vgg16_bn"
    (mine,) = found["hydra/launcher"].options
    assert mine.name == "cluster"
    text = list_options([config_dir(), tmp_path], width=80, group="hydra/launcher")
    assert "cluster  (its file begins without a comment)" in text


def test_a_group_that_is_not_there() -> None:
    with pytest.raises(ConfigError, match=r"unknown group 'modle' \(nearest: 'model'\)"):
        list_options([config_dir()], width=100, group="modle")


def test_the_command_lists_own_options_too_and_leaves_nothing_behind(tmp_path: Path) -> None:
    # An experiment that wants data which are not there, and a network that cannot be imported.
    said = Shell(tmp_path)("experiment=modelnet40_points", "task=list", "model._target_=no.where")
    assert said.code == 0, said.err
    assert not said.err
    ours = {(group.name, option.name) for group in OURS for option in group.options}
    theirs = {("data", "vectors"), ("model", "mlp"), ("model", "own"), ("experiment", "tiny"),
              ("hardware", "cores"), ("paper/trial", "batch_search"),
              ("paper/trial", "two_ranks")}  # fmt: skip
    assert listed(said.out) == ours | theirs
    assert not list(tmp_path.iterdir())


def test_nothing_large_is_imported(tmp_path: Path) -> None:
    code = (
        "import sys; from sparsepipe.cli import main; sys.argv[1:] = ['task=list']\n"
        "try: main()\n"
        "except SystemExit as end: print(end.code, {'torch', 'matplotlib'} & {*sys.modules})"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=120,
        check=True,
    )  # fmt: skip
    assert done.stdout.splitlines()[-1] == "0 set()"


def test_no_run_is_made_of_it() -> None:
    config = OmegaConf.create({"task": {"_target_": "sparsepipe.config.listing.list_options"}})
    source = ConfigSourceInfo(path=str(config_dir()), schema="file", provider="main")
    assert "task=train" in (printed_text(config, [source]) or "")
    with pytest.raises(ConfigError, match="every job of a sweep would print the same"):
        resolve_run(composed("task=list"))
