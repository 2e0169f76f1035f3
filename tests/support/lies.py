"""Files that lie: malformed variants of each kind of file that a user gives, by kinds of fault.

All are made from valid files of :class:`Valid`, which the command must take.
"""

from __future__ import annotations

import copy
import io
import json
import os
import random
import shutil
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

import yaml

NAN, INFINITE = float("nan"), float("inf")
DEEP = 100_000
_NO_NUMBER: tuple[Any, ...] = (NAN, INFINITE, -INFINITE, -1, True, "many", [1], {"a": 1})
_TOO_LARGE: tuple[Any, ...] = (1e308, 10**400)
_NO_NAME: tuple[Any, ...] = (7, 1.5, True, date(2024, 5, 1), ["a"], {"a": 1}, None)
_NO_LIST: tuple[Any, ...] = (7, "abc", True, None, {"a": 1}, date(2024, 5, 1))


@dataclass(frozen=True, slots=True)
class Case:
    """A command that reads a malformed file.

    Args:
        subject: which of the files it is.
        kind: of the fault.
        name: of the variant.
        file: is written, relative to the folder of the case; None: the command line lies.
        content: of the file: bytes, or what makes it at a path.
        arguments: of the command, in the folder of the case.
        named: what the message must name: the file, or a key.
        removed: files that are not there.
        is_refused: the command must end with an error; else it may also do without the file.
    """

    subject: str
    kind: str
    name: str
    file: str | None
    content: bytes | Callable[[Path], object]
    arguments: tuple[str, ...]
    named: str
    removed: tuple[str, ...] = ()
    is_refused: bool = True

    def write(self, folder: Path, valid: Path) -> None:
        """Copies the valid files, and replaces the one."""
        shutil.copytree(valid, folder, symlinks=True)
        for name in self.removed:
            (folder / name).unlink(missing_ok=True)
        if self.file is None:
            return
        path = folder / self.file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        if isinstance(self.content, bytes):
            path.write_bytes(self.content)
        else:
            self.content(path)

    def __str__(self) -> str:
        return f"{self.subject}: {self.kind}: {self.name}"


@dataclass(frozen=True, slots=True)
class Subject:
    """A kind of file, its valid content and the command that reads it."""

    name: str
    file: str
    arguments: tuple[str, ...]
    removed: tuple[str, ...] = ()
    is_refused: bool = True

    def case(
        self, kind: str, name: str, content: bytes | Callable[[Path], object], **other: Any
    ) -> Case:
        """A malformed variant; see :class:`Case`."""
        values: dict[str, Any] = {
            "named": Path(self.file).name,
            "removed": self.removed,
            "is_refused": self.is_refused,
            **other,
        }
        return Case(self.name, kind, name, self.file, content, self.arguments, **values)


def valid_files(folder: Path) -> None:
    """Writes one valid file of each kind."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "inventory.yaml").write_text(yaml.safe_dump(INVENTORY, sort_keys=False))
    (folder / "profile.json").write_text(json.dumps(PROFILE))
    (folder / "plan.json").write_text(json.dumps(PLAN))
    (folder / "graph.txt").write_text(GRAPH)
    (folder / "run").mkdir()
    (folder / "run" / "config.yaml").write_text(RUN)


INVENTORY = {
    "hosts": [
        {
            "name": "one",
            "devices": [
                {
                    "name": "slow",
                    "count": 1,
                    "accelerator": "cuda",
                    "memory_bytes": 12e9,
                    "tflops": 10.0,
                    "memory_bytes_per_s": 1e11,
                    "profile": {"sparse_vgg16_bn": "profile.json"},
                }
            ],
            "link": {"bytes_per_s": 1e9, "latency_s": 1e-5},
        },
        {
            "name": "two",
            "devices": [
                {
                    "name": "fast",
                    "count": 2,
                    "accelerator": "cuda",
                    "memory_bytes": 12e9,
                    "profile": {"sparse_vgg16_bn": "profile.json"},
                }
            ],
            "link": {"bytes_per_s": 1e9},
        },
    ],
    "link": {"bytes_per_s": 1e8},
}
PROFILE = {
    "meta": {"model": "sparse_vgg16_bn", "batch_size": 4, "input_bytes": 4096.0},
    "layers": [
        {
            "index": index,
            "name": f"layer {index}",
            "kind": "Linear",
            "forward_s": 1e-3,
            "backward_s": 2e-3,
            "activation_bytes": 1e5,
            "parameter_bytes": 1e4,
            "saved_bytes": 1e5,
        }
        for index in range(4)
    ],
}
PLAN = {
    "config": "1-2",
    "stages": [
        {"layers": [0, 1], "devices": ["one/slow/0"]},
        {"layers": [2, 3], "devices": ["two/fast/0", "two/fast/1"]},
    ],
    "bottleneck_s": 0.01,
    "rank_times_s": [
        {"device": name, "forward": 0.001, "backward": 0.002, "update": 0.0, "load": 0.001}
        for name in ("slow", "fast", "fast")
    ],
    "measured": {"slow": "profile.json"},
}
GRAPH = "".join(
    f"node{n} -- Linear(4, 4) -- forward_compute_time=1.0, backward_compute_time=2.0, "
    "activation_size=1000.0, parameter_size=100.0\n"
    for n in range(1, 5)
) + "".join(f"\tnode{n} -- node{n + 1}\n" for n in range(1, 4))
RUN = "task: {_target_: sparsepipe.tasks.simulate.Simulate}\nhydra: {overrides: [seed=1]}\n"

_OUTPUTS = "paths.outputs=outputs"
_SIMULATE = ("task=simulate", "task.minibatches=4", "task.timeline_minibatches=4", _OUTPUTS)
_FILES = ("hardware=file", "hardware.source=inventory.yaml")
_BOTH = "task.profiles={{slow: {0}, fast: {0}}}"

SUBJECTS: Mapping[str, Subject] = {
    subject.name: subject
    for subject in (
        Subject("inventory", "inventory.yaml", (*_SIMULATE, "parallel=dp", *_FILES)),
        Subject("profile", "profile.json", (*_SIMULATE, "parallel=dp", *_FILES)),
        Subject(
            "graph",
            "graph.txt",
            (*_SIMULATE, "parallel=dp", *_FILES, _BOTH.format("graph.txt")),
        ),
        Subject(
            "plan",
            "plan.json",
            (*_SIMULATE, "parallel=pipeline", "parallel.plan.file=plan.json", *_FILES),
        ),
        Subject(
            "run",
            "run/config.yaml",
            ("--from", "run", *_SIMULATE, "parallel=dp", *_FILES),
        ),
    )
}


def cases() -> list[Case]:
    """All malformed files."""
    found: list[Case] = []
    for subject, document in (
        ("inventory", INVENTORY),
        ("profile", PROFILE),
        ("plan", PLAN),
    ):
        found += of_document(SUBJECTS[subject], document)
    found += _of_graph(SUBJECTS["graph"])
    found += _of_plan(SUBJECTS["plan"])
    for subject in SUBJECTS.values():
        found += special(subject)
    return found


_NUMBER_KEYS = (
    *("count", "memory_bytes", "tflops", "memory_bytes_per_s", "bytes_per_s", "latency_s"),
    *("forward_s", "backward_s", "activation_bytes", "parameter_bytes", "saved_bytes"),
    *("index", "input_bytes", "layers.", "bottleneck_s", "forward", "backward", "update"),
    "load",
)
_NAME_KEYS = ("name", "kind", "device", "devices.", "profile.", "slow")


def of_document(subject: Subject, document: Any) -> Iterator[Case]:
    """The document with one value of it replaced."""

    def case(kind: str, name: str, value: Any) -> Case:
        return subject.case(kind, name, _text(value, as_yaml=subject.file.endswith("yaml")))

    for path, value in _places(document):
        last = path[-1] if isinstance(path[-1], str) else f"{path[-2]}."
        where = ".".join(map(str, path))
        if isinstance(value, int | float) and last in _NUMBER_KEYS:
            wrong: list[tuple[str, Any]] = [("numbers", each) for each in _NO_NUMBER]
            wrong += [("numbers", each) for each in _TOO_LARGE]
            if last == "count":
                wrong += [("numbers", each) for each in (0.5, 10**9, 10**12, None)]
        elif isinstance(value, str) and last in _NAME_KEYS:
            wrong = [("names", each) for each in _NO_NAME]
        elif isinstance(value, list):
            wrong = [("structure", each) for each in _NO_LIST]
            if last == "rank_times_s":  # which may be missing
                wrong.remove(("structure", None))
        elif isinstance(value, dict):
            wrong = [("structure", each) for each in (7, "abc", [1], date(2024, 5, 1))]
        else:
            continue
        for kind, each in wrong:
            if isinstance(each, date) and not subject.file.endswith("yaml"):
                continue  # a text in JSON
            yield case(kind, f"{where}={_short(each)}", _with(document, path, each))
    for name, value in (("number", 7), ("text", "abc"), ("list", [1, 2]), ("null", None)):
        yield case("structure", f"the whole is a {name}", value)


def _places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    if path:
        yield path, value
    if isinstance(value, dict | list):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for key, item in items:
            if not (isinstance(value, list) and key > 0):  # one element stands for all
                yield from _places(item, (*path, key))


def _with(document: Any, path: Sequence[Any], value: Any) -> Any:
    changed = copy.deepcopy(document)
    inner = changed
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    return changed


def _text(value: Any, *, as_yaml: bool) -> bytes:
    if as_yaml:
        return yaml.safe_dump(value, sort_keys=False).encode()
    return json.dumps(value, default=str).encode()


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) < 30 else f"{text[:20]}..."


def _of_graph(subject: Subject) -> Iterator[Case]:
    for number in ("inf", "1e400", "nan", "1e308", "-1", "many", "[1;inf]", ""):
        for name in ("forward_compute_time=1.0", "activation_size=1000.0"):
            text = GRAPH.replace(name, f"{name.partition('=')[0]}={number}", 1)
            yield subject.case("numbers", f"{name}={number}", text.encode())
    for name, text in {
        "cycle": GRAPH + "\tnode4 -- node1\n",
        "self": GRAPH + "\tnode2 -- node2\n",
        "unknown node": GRAPH + "\tnode2 -- node9\n",
        "a node twice": GRAPH + GRAPH,
        "no fields": "node1 -- Linear(4, 4)\n",
        "prose": "Once upon a time\n",
    }.items():
        yield subject.case("structure", name, text.encode())


def _of_plan(subject: Subject) -> Iterator[Case]:
    """Plans whose parts are as they should be and do not fit together."""
    for name, stages, more in (
        ("beyond the layers of the model", ([0, 1], [2, 60]), {}),
        ("before the end of the model", ([0, 1], [2, 2]), {}),
        ("a gap", ([0, 1], [3, 3]), {}),
        ("an overlap", ([0, 2], [2, 3]), {}),
        ("backwards", ([1, 0], [2, 3]), {}),
        ("three numbers", ([0, 1, 2], [2, 3]), {}),
        ("another config", ([0, 1], [2, 3]), {"config": "2-1"}),
    ):
        plan: dict[str, Any] = copy.deepcopy({**PLAN, **more})
        for stage, layers in zip(plan["stages"], stages, strict=True):
            stage["layers"] = layers
        yield subject.case("structure", name, _text(plan, as_yaml=False))


def special(subject: Subject) -> Iterator[Case]:
    """What any file may be in place of one of its kind."""
    case, drawn = subject.case, random.Random(0)
    yield case("special files", "pipe", os.mkfifo)
    yield case("special files", "/dev/zero", lambda path: path.symlink_to("/dev/zero"))
    yield case("special files", "directory", Path.mkdir)
    yield case("special files", "missing", lambda path: None)
    yield case("special files", "link to itself", lambda path: path.symlink_to(path.name))
    yield case("special files", "a file of 8 GB of zeros", _sparse)
    yield case("structure", "empty", b"")
    yield case("structure", "binary", drawn.randbytes(4096))
    yield case("structure", "zeros", bytes(4096))
    yield case("structure", "a zip", _zip())
    yield case("structure", "latin-1", "hosts: Gerät\xff".encode("latin-1"))
    yield case("structure", "UTF-16", "{'hosts': []}".encode("utf-16"))
    yield case("structure", "half a character", b'{"hosts": "\\ud800", "layers": ["\xed\xa0\x80"]}')
    yield case("structure", "deep lists", b"[" * DEEP + b"]" * DEEP)
    yield case("structure", "deep mappings", b'{"a":' * DEEP + b"1" + b"}" * DEEP)
    yield case("structure", "deep stages", b'{"stages":' + b"[" * DEEP + b"]" * DEEP + b"}")
    yield case("structure", "a number of 10,000 digits", b'{"hosts": ' + b"9" * 10_000 + b"}")
    if subject.file.endswith(".yaml"):
        yield case("structure", "aliases of aliases", _laughs())
        yield case("structure", "code", b"hosts: !!python/object/apply:os.system [echo hello]\n")


def _sparse(path: Path) -> None:
    with path.open("wb") as stream:
        stream.truncate(8 << 30)


def _zip() -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as archive:
        archive.writestr("a", bytes(100))
    return stream.getvalue()


def _laughs() -> bytes:
    """Each line holds the line before ten times."""
    lines = ["a0: &a0 [x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 12)]
    return "\n".join([*lines, "hosts: *a11", ""]).encode()
