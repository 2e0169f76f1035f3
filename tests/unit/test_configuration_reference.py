"""The configuration reference has every group, option and key that Hydra finds in conf/."""

from __future__ import annotations

import functools
import importlib.util
import re
import sys
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hydra import compose, initialize_config_dir
from hydra.core.object_type import ObjectType
from omegaconf import OmegaConf

from sparsepipe.config.compose import config_dir, config_loader, resolve
from sparsepipe.config.listing import groups_in
from sparsepipe.config.schema import Config

SCRIPT = Path(__file__).parents[2] / "docs" / "site" / "configuration.py"
KEYS = {entry.name for entry in fields(Config)}
"""Of the top level. Groups that are none set keys of others."""


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("configuration_reference", SCRIPT)
    module = sys.modules["configuration_reference"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def pages(script: ModuleType) -> dict[str, str]:
    return script.pages(config_dir())


def hydras_groups() -> list[str]:
    return [group.name for group in groups_in([config_dir()])]


def options(group: str, below: str = "") -> Iterator[str]:
    loader, place = config_loader(), f"{group}/{below}".rstrip("/")
    yield from (below + name for name in loader.get_group_options(place, ObjectType.CONFIG))
    for name in loader.get_group_options(place, ObjectType.GROUP):
        yield from options(group, f"{below}{name}/")


@functools.cache
def composed(*overrides: str) -> dict[str, Any]:
    """The values of a configuration that passes its check."""
    with initialize_config_dir(str(config_dir()), version_base="1.3"):
        config = compose("config", list(overrides))
    resolve(config.copy())
    return OmegaConf.to_container(config)


def keys(value: Any, at: str) -> Iterator[str]:
    yield at
    if isinstance(value, dict):
        for key, item in value.items():
            yield from keys(item, f"{at}.{key}")


def rows(page: str) -> dict[str, list[str]]:
    """The cells of each row that begins with a key."""
    lines = re.findall(r"^\| `([\w.]+)` \|(.*)\|$", page, re.MULTILINE)
    return {key: [cell.strip() for cell in cells.split(" | ")] for key, cells in lines}


def test_every_group_has_a_page_with_its_options(pages: dict[str, str]) -> None:
    groups = hydras_groups()
    assert set(pages) == {"index", "general", *(group.replace("/", "-") for group in groups)}
    assert len(groups) > 10
    for group in groups:
        page = group.replace("/", "-")
        assert f"[{group}]({page}.md)" in pages["index"]
        found = re.findall(r"^\| \[`([\w/]+)`\]", pages[page], re.MULTILINE)
        assert sorted(found) == sorted(options(group))


@pytest.mark.parametrize("group", [group for group in hydras_groups() if group in KEYS])
def test_every_key_of_every_option_has_a_row(pages: dict[str, str], group: str) -> None:
    listed = rows(pages[group])
    for option in options(group):
        value = composed(f"{group}={option}")[group]
        assert not {*keys(value, group)} - {*listed, group}, option


def test_keys_outside_the_groups_have_a_row_with_comment(pages: dict[str, str]) -> None:
    listed = rows(pages["general"])
    outside = KEYS - set(hydras_groups())
    top = {key: value for key, value in composed().items() if key in outside}
    assert not {key for name in top for key in keys(top[name], name)} - set(listed)
    assert not outside - set(listed)
    assert [key for key, cells in listed.items() if not cells[-1]] == []


def test_values_are_those_that_hydra_composes(script: ModuleType) -> None:
    """Where a base file and a file that builds on it write the same key, the latter counts."""
    for option in options("parallel"):
        value = composed(f"parallel={option}")["parallel"]
        for key, found in script.keys_of(config_dir(), f"parallel/{option}").items():
            there: Any = value
            for part in key.split("."):
                there = there[part]
            if found.value is not None and "$" not in found.value:
                assert OmegaConf.create(f"x: {found.value}").x == there, (option, key)


def test_types_and_comments_are_those_of_the_schema_and_the_files(pages: dict[str, str]) -> None:
    data = rows(pages["data"])
    assert data["data.resolution"][:2] == ["`32`", "a whole number from 1 to 2097152"]
    assert data["data.resolution"][2].startswith("voxels along each side of the grid")
    assert data["data.span"][2].startswith("The grid spans each shape's extent on every axis")
    assert rows(pages["general"])["seed"][1] == "a whole number from 0 to 4294967295"
    assert rows(pages["hardware"])["hardware.time_scale"][1] == "a number from 0.001 to 10000"
    assert "`0.001`" not in pages["hardware"]
    assert "[pipeline.md](../docs/pipeline.md)" in pages["parallel"]
