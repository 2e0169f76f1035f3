"""What ranks read of each other: values, and nothing that runs a stranger's code."""

from __future__ import annotations

import enum
import importlib
import os
import pickle
from collections import Counter, OrderedDict, defaultdict, deque
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from sparsepipe.errors import ConfigError, DataError
from sparsepipe.runtime import safe_pickle
from sparsepipe.runtime.collectives import process_group
from sparsepipe.runtime.transport.serialization import parse
from sparsepipe.sparse import SparseTensor
from tests.support.processes import run_shared


class Colour(enum.Enum):
    RED = 1


class Pair(NamedTuple):
    left: int
    right: int


@dataclass(frozen=True, slots=True)
class Fields:
    name: str
    sizes: list[int] = field(default_factory=list)


@dataclass
class Acts:
    """Is filled without its ``__init__`` and ``__post_init__``."""

    command: str

    def __post_init__(self) -> None:
        os.system(self.command)


@dataclass
class Cleans:
    command: str

    def __del__(self) -> None:
        os.system(self.command)


class Plain:
    """Of which nobody knows what it does when it is made."""


class Runs:
    """As an attacker writes it: reading its pickle calls a function."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.call = function, arguments

    def __reduce__(self) -> Any:
        return self.call


class Fills(Runs):
    """Reading its pickle fills what the call has made, or what it names."""

    def __init__(self, function: Any, arguments: tuple[Any, ...], state: Any) -> None:
        self.call = (function, arguments, state)


VALUES = [
    None,
    {"loss": 0.5, 3: [True, (1, "b"), {4, 5}, b"\0", 1 + 2j]},
    [Colour.RED, Pair(1, 2), Fields("a", [1])],
    [OrderedDict(a=1), defaultdict(list, a=[1]), deque([1], maxlen=2), Counter("aab")],
    [Path("a/b"), timedelta(1), range(3), slice(1, 2), 2**70, int],
    [np.float32(1.5), np.int64(3), np.arange(6).reshape(2, 3), np.arange(6).reshape(2, 3).T],
    [
        np.array(["a", "bc"]),
        np.zeros((0, 3), ">f2"),
        np.array(2j),
        np.datetime64("2026-01-02", "h"),
    ],
    [torch.max, torch.mean, sum, max],
    [torch.float16, torch.device("cpu"), torch.Size([1, 2]), torch.channels_last],
]


@pytest.mark.parametrize("value", VALUES, ids=lambda value: type(value).__name__)
def test_values_come_back(value: Any) -> None:
    found = safe_pickle.loads(safe_pickle.dumps(value))
    assert repr(found) == repr(value)
    assert type(found) is type(value)


def test_tensors_come_back_once_each() -> None:
    shared = torch.randn(3, requires_grad=True)
    sites = torch.zeros(2, 4, dtype=torch.int32)
    value = {"a": [shared, shared], "b": SparseTensor(torch.ones(2, 1), sites, batch_size=1)}
    found = safe_pickle.loads(safe_pickle.dumps(value))
    assert found["a"][0] is found["a"][1]
    assert torch.equal(found["a"][0], shared)
    assert torch.equal(found["b"].coords, sites)


def test_a_part_of_a_tensor_is_sent_without_the_rest() -> None:
    """Also of a received one, whose storage may end within a number."""
    storage = torch.arange(33, dtype=torch.uint8)
    received = torch.empty(0, dtype=torch.float64)
    received.set_(storage.untyped_storage(), 0, (4,), (1,))
    large = torch.arange(1e6)
    data = safe_pickle.dumps([received, large[5]])
    assert len(data) < 10_000
    first, second = safe_pickle.loads(data)
    assert torch.equal(first, received)
    assert second == 5


def test_errors_come_back_with_their_remedy() -> None:
    found = safe_pickle.loads(safe_pickle.dumps(DataError("a is missing", remedy="add a")))
    assert (type(found), found.message, found.remedy) == (DataError, "a is missing", "add a")


@pytest.mark.parametrize(
    "value",
    [
        *(Plain(), Cleans("true"), os.system, len, lambda: 0, Runs(os.system, "true"), Plain),
        *(np.array([None]), np.zeros(2, [("a", "u1")]), np.dtype("u1"), np.ma.array([1])),
    ],
    ids=lambda value: getattr(value, "__name__", type(value).__name__) + type(value).__name__,
)
def test_what_could_act_is_not_sent(value: Any) -> None:
    with pytest.raises(safe_pickle.Unsendable) as error:
        safe_pickle.dumps([value])
    assert "a value that cannot be pickled safely: " in error.value.what
    assert "register_pytree_node" in error.value.remedy


def test_a_dataclass_is_filled_and_not_initialised(tmp_path: Path) -> None:
    value = object.__new__(Acts)
    value.command = f"touch {tmp_path / 'mark'}"
    assert safe_pickle.loads(safe_pickle.dumps(value)) == value
    value.more = 1  # type: ignore[attr-defined]
    with pytest.raises(safe_pickle.Unsendable):
        safe_pickle.dumps(value)
    assert not (tmp_path / "mark").exists()


ADDRESS = {"data": (0, False), "shape": (2,), "typestr": "|O", "version": 3}
"""What numpy would read objects from."""
ATTACKS = {
    "calls": Runs(os.system, "touch {mark}"),
    "evaluates": Runs(eval, "open('{mark}', 'w')"),
    "makes": Runs(Acts, "touch {mark}"),
    "loads": Runs(torch.storage._load_from_bytes, b""),
    "makes an array": Runs(np.ndarray, (1,), np.dtype("O"), bytes(8)),
    "fills": Fills(OrderedDict, (), {"__array_interface__": ADDRESS}),
    "names a class": OrderedDict,
    "makes a class": Runs(enum.Enum, "Name", "a b"),
}


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
@pytest.mark.parametrize("attack", ATTACKS.values(), ids=ATTACKS)
def test_what_a_stranger_sends_runs_nothing(tmp_path: Path, attack: Any) -> None:
    mark = tmp_path / "mark"
    if isinstance(attack, Runs):
        function, arguments, *state = attack.call
        filled = tuple(a.format(mark=mark) if isinstance(a, str) else a for a in arguments)
        attack = Runs(function, *filled)
        attack.call = (function, filled, *state)
    for protocol in range(6):
        assert_refused(pickle.dumps(attack, protocol))
    assert not mark.exists()


def assert_refused(attack: bytes) -> None:
    with pytest.raises((safe_pickle.UnreadableMessage, pickle.UnpicklingError)):
        safe_pickle.loads((0).to_bytes(8, "little") + attack)
    header = len(attack).to_bytes(8, "little") + b"\0" + attack
    with pytest.raises((safe_pickle.UnreadableMessage, pickle.UnpicklingError)):
        parse([torch.frombuffer(bytearray(header), dtype=torch.uint8)])
    with pytest.raises((pickle.UnpicklingError, RuntimeError, EOFError)):  # in place of tensors
        safe_pickle.loads(len(attack).to_bytes(8, "little") + attack)


def described(*description: Any, then: bytes = b"") -> bytes:
    """A pickle of a description, with instructions about what is made of it."""
    return pickle.dumps(description, 4)[:-1] + pickle.BINPERSID + then + pickle.STOP


HERE = __name__


@pytest.mark.parametrize(
    "attack",
    [
        *(described("array", bytes(8), kind, (1,), "C") for kind in ("|O", "<i4,<i4", "|V8")),
        described("array", bytes(8), "<f8\n", (1,), "C"),
        described("array", bytes(8), "<f8", (2,), "C"),
        described("unknown", 1),
        described("made", "eval", ("1",)),
        described("torch", "load"),
        described("class", "type"),
        described("reduction", "torch.load"),
        described("member", HERE, "Pair", "left"),
        described("node", HERE, "Plain", [], None),
        described("error", HERE, "Plain", "a", "b"),
        described("named tuple", HERE, "Plain", (1,)),
        described("dataclass", HERE, "Plain", {}),
        described("dataclass", HERE, "Fields", {"name": "a", "sizes": [], "more": 1}),
        described("dataclass", HERE, "Cleans", {"command": "true"}),
        # What is made is neither called nor filled.
        described("reduction", "sum", then=pickle.dumps([1], 4)[2:-1] + pickle.REDUCE),
        described("member", HERE, "Colour", "RED", then=pickle.EMPTY_DICT + pickle.BUILD),
    ],
)
def test_a_description_makes_nothing_but_values(attack: bytes) -> None:
    with pytest.raises(safe_pickle.UnreadableMessage):
        safe_pickle.loads((0).to_bytes(8, "little") + attack)


@pytest.mark.parametrize("name", ["unused", "lazy.unused", "lazy"])
def test_no_module_is_imported_for_a_stranger(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Neither a module of an imported package, nor one that its own function would import."""
    package = tmp_path / "package_in_use"
    package.mkdir()
    lazily = "def __getattr__(name): raise SystemExit('imported')"
    for file, text in (("__init__", ""), ("unused", "raise SystemExit"), ("lazy", lazily)):
        (package / f"{file}.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    importlib.import_module("package_in_use.lazy")
    attack = described("dataclass", f"package_in_use.{name}", "Fly", {})
    with pytest.raises(safe_pickle.UnreadableMessage, match="unknown on this rank"):
        safe_pickle.loads((0).to_bytes(8, "little") + attack)


def exchanged(rank: int) -> tuple[Any, ...]:
    own = None if rank == 1 else {"rank": rank, "state": torch.full((rank + 1,), float(rank))}
    everyone = process_group.gather_objects(own)
    first = process_group.gather_objects((rank, "x" * rank), everywhere=False)
    said = process_group.broadcast_object(f"of {rank}", source=1)
    try:
        process_group.gather_objects(Plain())
    except ConfigError as error:
        refused = error.message
    return [(each["rank"], each["state"].tolist()) for each in everyone], first, said, refused


def test_collectives_exchange_values_of_unlike_length() -> None:
    found = run_shared(exchanged, 3)
    name = f"{Plain.__module__}.Plain"
    refused = "gathering a value of each rank: this rank's value holds a value that cannot be "
    refused += f"pickled safely: {name}"
    for rank, (everyone, first, said, message) in enumerate(found):
        assert everyone == [(0, [0.0]), (2, [2.0, 2.0, 2.0])]
        assert first == ([(0, ""), (1, "x"), (2, "xx")] if rank == 0 else [])
        assert (said, message) == ("of 1", refused)
