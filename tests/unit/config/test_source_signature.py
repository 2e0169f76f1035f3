"""Signatures read from source are those that an import shows."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from sparsepipe.config.check import describe
from sparsepipe.config.compose import config_dir
from sparsepipe.config.source_signature import (
    Parameters,
    Unreadable,
    has_attribute_in_source,
    source_parameters,
)
from sparsepipe.config.target import imported_parameters

OURS = sorted(
    {
        target
        for file in config_dir().rglob("*.yaml")
        for target in re.findall(r"_target_: ([\w.]+)", file.read_text())
        if not target.startswith(("sparsepipe.sweep", "sparsepipe.paper.report_sweep"))
    }
)
OTHERS = [
    "pytorch_lightning.callbacks.EarlyStopping",
    "pytorch_lightning.callbacks.ModelCheckpoint",
    "pytorch_lightning.callbacks.RichProgressBar",
    "pytorch_lightning.strategies.DDPStrategy",
    "torch.nn.Linear",
    "torch.optim.Adam",
    "torch.optim.lr_scheduler.ReduceLROnPlateau",
]
_OWN = """
from __future__ import annotations
import dataclasses
from dataclasses import dataclass, field
from functools import cache, partial
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal, Optional
from sparsepipe.config.schema import Limits
if TYPE_CHECKING:
    from collections.abc import Sequence
    from torch import Tensor
Size = Annotated[int, Limits(1, 2**4)]

def several(first: Size, /, second: "float | Tensor", *rest: int, third: Size = 1, **more): ...
def _by_depth(depth: int, width: float, *, sizes: Sequence[int], kind: Literal["a", "b"] = "a"): ...
shallow = partial(_by_depth, 3)
narrow = partial(_by_depth, 3, width=0.5)
same = several
several.prints_only = True

class Base:
    def __init__(self, size: Size | None, *, name: str = "x") -> None: ...
    @classmethod
    def of(cls, path: str) -> "Base": ...
class Heir(Base):
    prints_only = True
class Empty: ...
@dataclass
class Point:
    x: float
    y: Optional[float] = None
    count: ClassVar[int] = 0
    hidden: int = field(init=False, default=0)
    names: list[str] = field(default_factory=list)
@dataclass(frozen=True)
class Solid(Point):
    z: "int" = dataclasses.field(kw_only=True)

@cache
def cached(x: int): ...
class Made:
    def __new__(cls, x: int): ...
class Both(Base, Point): ...
class Text(str): ...
"""


def in_words(found: Parameters) -> tuple[object, ...]:
    """Types by their short names: a class that is not imported has its own name only."""
    types = {
        name: re.sub(r"[\w.]+\.(?=\w)", "", describe(hint)) for name, hint in found.types.items()
    }
    types = {
        name: text.replace("Union[Path, str", "Union[str, Path") for name, text in types.items()
    }
    return types, found.required, found.open


@pytest.fixture
def own_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "own_signatures.py").write_text(
        _OWN.replace("@dataclass(frozen=True)", "@dataclass")
    )
    monkeypatch.syspath_prepend(tmp_path)
    yield "own_signatures"
    sys.modules.pop("own_signatures", None)


@pytest.mark.parametrize("target", [*OURS, *OTHERS])
def test_as_imported(target: str) -> None:
    types, required, is_open = in_words(source_parameters(target))
    expected, *others = in_words(imported_parameters(target))
    assert [required, is_open] == others
    # Of types that C defines, source shows nothing.
    assert {name: text for name, text in types.items() if text != "Any"} == {
        name: text for name, text in expected.items() if types[name] != "Any"
    }


@pytest.mark.parametrize(
    "name", ["several", "shallow", "narrow", "same", "Base", "Heir", "Base.of", "Heir.of", "Empty",
             "Point", "Solid"],
)  # fmt: skip
def test_own_definitions_as_imported(own_module: str, name: str) -> None:
    found = source_parameters(f"{own_module}.{name}")
    assert own_module not in sys.modules
    expected = imported_parameters(f"{own_module}.{name}")
    assert in_words(found)[1:] == in_words(expected)[1:]
    if name not in (
        "several",
        "same",
        "shallow",
        "narrow",
    ):  # for a type checker alone: no hints when imported
        assert in_words(found) == in_words(expected)


def test_types_for_a_type_checker_alone(own_module: str) -> None:
    types = source_parameters(f"{own_module}.several").types
    assert describe(types["third"]) == "a whole number from 1 to 16"
    assert describe(types["second"]) == "a number"


@pytest.mark.parametrize(
    "name", ["cached", "Made", "Both", "Text", "missing", "Base.missing", "Size"]
)
def test_what_source_does_not_show(own_module: str, name: str) -> None:
    with pytest.raises(Unreadable):
        source_parameters(f"{own_module}.{name}")


def test_a_file_that_is_written_anew_is_read_anew(own_module: str, tmp_path: Path) -> None:
    assert "first" not in source_parameters(f"{own_module}.narrow").types
    (tmp_path / "own_signatures.py").write_text("def narrow(first): ...\n")
    assert source_parameters(f"{own_module}.narrow").required == ("first",)


def test_a_module_that_needs_what_is_not_installed(own_module: str, tmp_path: Path) -> None:
    (tmp_path / "own_signatures.py").write_text("import nosuchpackage\ndef narrow(first): ...\n")
    with pytest.raises(Unreadable, match="nosuchpackage"):
        source_parameters(f"{own_module}.narrow")


def test_attributes(own_module: str) -> None:
    assert has_attribute_in_source(f"{own_module}.several", "prints_only")
    assert has_attribute_in_source(f"{own_module}.Heir", "prints_only")
    assert not has_attribute_in_source(f"{own_module}.Base", "prints_only")
    assert not has_attribute_in_source(f"{own_module}.shallow", "prints_only")
    with pytest.raises(Unreadable):
        has_attribute_in_source("no.where", "prints_only")
