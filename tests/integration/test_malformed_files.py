"""Malformed files of each format: each is refused by name, soon and with a remedy.

Faults are made from valid files that the command takes.
"""

from __future__ import annotations

import io
import json
import os
import pickle
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
import pytest
import torch

from sparsepipe.runs.ledger import CSV, PARQUET, gather
from tests.support.paths import environment

_MOST_S, _MOST_BYTES = 20.0, 1.5 * 2**30
_DEEP = 100_000
Content = bytes | Callable[[Path], object]
Fault = Callable[[bytes], Content]
"""What makes malformed content, or what makes it at a path, of valid content."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """A kind of file, the command that reads it without the files ``removed``, and faults.

    With ``is_refused`` the command ends with an error, otherwise it may do without the file.
    """

    file: str
    arguments: tuple[str, ...]
    faults: dict[str, Fault]
    removed: tuple[str, ...] = ()
    is_refused: bool = True


def constant(content: Content) -> Fault:
    return lambda valid: content


def first(share: float) -> Fault:
    return lambda valid: valid[: int(share * len(valid))]


def replaced(old: str, new: str) -> Fault:
    def fault(valid: bytes) -> bytes:
        assert old.encode() in valid
        return valid.replace(old.encode(), new.encode(), 1)

    return fault


def checkpoint(change: Callable[[dict[str, Any]], Any]) -> Fault:
    def fault(valid: bytes) -> bytes:
        stream = io.BytesIO()
        torch.save(change(torch.load(io.BytesIO(valid), weights_only=False)), stream)
        return stream.getvalue()

    return fault


def _npy(values: Any) -> bytes:
    stream = io.BytesIO()
    np.save(stream, values)
    return stream.getvalue()


def _npz(**arrays: Any) -> bytes:
    stream = io.BytesIO()
    np.savez(stream, **arrays)
    return stream.getvalue()


def _bomb(name: str) -> Content:
    """An archive with a member of 2 GiB of zeros."""

    def write(path: Path) -> None:
        with (
            zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive,
            archive.open(name, "w", force_zip64=True) as member,
        ):
            for _ in range(128):
                member.write(bytes(1 << 24))

    return write


def _zeros(path: Path) -> None:
    with path.open("wb") as stream:
        stream.truncate(8 << 30)


def _laughs() -> bytes:
    """Each line holds the line before ten times."""
    lines = ["a0: &a0 [x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 12)]
    return "\n".join([*lines, "hosts: *a11", ""]).encode()


class _Code:
    """Its pickle runs a program."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("echo hello",)


_INVENTORY = """
hosts:
  - name: one
    devices:
      - {name: slow, count: 1, accelerator: cuda, memory_bytes: 12.0e+9, tflops: 10.0,
         profile: {sparse_vgg16_bn: profile.json}}
    link: {bytes_per_s: 1.0e+9, latency_s: 1.0e-5}
  - name: two
    devices:
      - {name: fast, count: 2, accelerator: cuda, profile: {sparse_vgg16_bn: profile.json}}
    link: {bytes_per_s: 1.0e+9}
link: {bytes_per_s: 1.0e+8}
"""
_LAYER = {"kind": "Linear", "forward_s": 1e-3, "backward_s": 2e-3, "activation_bytes": 1e5}
_PROFILE = {
    "meta": {"model": "sparse_vgg16_bn", "batch_size": 4, "input_bytes": 4096.0},
    "layers": [
        {"index": n, "name": f"layer {n}", "parameter_bytes": 1e4, **_LAYER} for n in range(4)
    ],
}
_PLAN = {
    "config": "1-2",
    "stages": [
        {"layers": [0, 1], "devices": ["one/slow/0"]},
        {"layers": [2, 3], "devices": ["two/fast/0", "two/fast/1"]},
    ],
    "bottleneck_s": 0.01,
}
_GRAPH = "".join(
    f"node{n} -- Linear(4, 4) -- forward_compute_time=1.0, backward_compute_time=2.0, "
    "activation_size=1000.0, parameter_size=100.0\n"
    for n in range(1, 5)
) + "".join(f"\tnode{n} -- node{n + 1}\n" for n in range(1, 4))
_RUN = "task: {_target_: sparsepipe.tasks.simulate.Simulate}\nhydra: {overrides: [seed=1]}\n"
_CLASSES = ("cup", "pen")
_CLOUD = np.random.default_rng(0).random((16, 3)).round(3)
_BUNDLE: dict[str, Any] = {
    "points": np.stack([_CLOUD, _CLOUD]),
    "labels": np.array([0, 1]),
    "classes": np.array(_CLASSES),
    "names": np.array(["a", "b"]),
}
_VALID = {
    "inventory.yaml": _INVENTORY.encode(),
    "profile.json": json.dumps(_PROFILE).encode(),
    "plan.json": json.dumps(_PLAN).encode(),
    "graph.txt": _GRAPH.encode(),
    "run/config.yaml": _RUN.encode(),
    "bundle/train.npz": _npz(**_BUNDLE),
    "bundle/test.npz": _npz(**_BUNDLE),
    "cloud.npy": _npy(_CLOUD),
}

_SIMULATE = (
    *("task=simulate", "task.minibatches=4", "task.timeline_minibatches=4"),
    *("paths.outputs=outputs", "hardware=file", "hardware.source=inventory.yaml"),
)
_ANY_DATA = (
    *("data.resolution=8", "data.batch_size=2", "data.num_workers=0", "data.seed=0"),
    *("model=dense_vgg11_bn", "model.width=0.0625", "task.gallery=0", "parallel=single"),
    *("hardware.accelerator=cpu", "hardware.cpu_devices=1", "trainer.max_epochs=1"),
    *("trainer.max_steps=1", "name=table2", "paths.cache=cache", "paths.outputs=outputs"),
)
_TRAIN = (*_ANY_DATA, "data=modelnet40_points", "data.root=bundle")
_PREDICT = ("task=predict", "hardware.accelerator=cpu", "paths.outputs=predicted")
_REPORT = ("task=report", "task.exhibits=[table2]", "paths.outputs=reported")
_COMPARE = ("task=compare", "runs=[runs/table2/first,runs/table2/second]", "paths.outputs=runs")
_LAST = "outputs/table2/run/checkpoints/last.ckpt"
_BEGUN = ("outputs/table2/run/DONE.json", "outputs/table2/run/checkpoints/fitted.json")


def _other_weights(whole: dict[str, Any]) -> Any:
    name = next(iter(whole["state_dict"]))
    return {**whole, "state_dict": {**whole["state_dict"], name: torch.zeros(3)}}


SUBJECTS = {
    "inventory": Subject(
        file="inventory.yaml",
        arguments=(*_SIMULATE, "parallel=dp"),
        faults={
            "nan": replaced("bytes_per_s: 1.0e+8", "bytes_per_s: .nan"),
            "aliases of aliases": constant(_laughs()),
            "an endless device": constant(lambda path: path.symlink_to("/dev/zero")),
        },
    ),
    "profile": Subject(
        file="profile.json",
        arguments=(*_SIMULATE, "parallel=dp"),
        faults={
            "a huge number": replaced('"forward_s": 0.001', '"forward_s": 1e400'),
            "deep lists": constant(b"[" * _DEEP + b"]" * _DEEP),
            "a pipe": constant(os.mkfifo),
        },
    ),
    "graph": Subject(
        file="graph.txt",
        arguments=(*_SIMULATE, "parallel=dp", "task.profiles={slow: graph.txt, fast: graph.txt}"),
        faults={
            "a cycle": lambda valid: valid + b"\tnode4 -- node1\n",
            "inf": replaced("forward_compute_time=1.0", "forward_compute_time=inf"),
            "8 GB of zeros": constant(_zeros),
        },
    ),
    "plan": Subject(
        file="plan.json",
        arguments=(*_SIMULATE, "parallel=pipeline", "parallel.plan.file=plan.json"),
        faults={
            "a gap": replaced("[2, 3]", "[3, 3]"),
            "half of it": first(0.5),
            "a directory": constant(Path.mkdir),
        },
    ),
    "run": Subject(
        file="run/config.yaml",
        arguments=("--from", "run", *_SIMULATE, "parallel=dp"),
        faults={
            "code": constant(b"hosts: !!python/object/apply:os.system [echo hello]\n"),
            "binary": constant(bytes(range(256))),
            "a link to itself": constant(lambda path: path.symlink_to(path.name)),
        },
    ),
    "ledger.csv": Subject(
        file=CSV,
        arguments=(*_REPORT, f"task.where={CSV}"),
        faults={
            "no heading": lambda valid: valid.partition(b"\n")[2],
            "UTF-16": constant("run_id\n1\n".encode("utf-16")),
            "missing": constant(lambda path: None),
        },
    ),
    "ledger.parquet": Subject(
        file=PARQUET,
        arguments=(*_REPORT, f"task.where={PARQUET}"),
        faults={"most of it": first(0.9), "empty": constant(b""), "text": constant(b"run_id\n1\n")},
    ),
    "result": Subject(
        file="runs/table2/first/result.json",
        arguments=_COMPARE,
        is_refused=False,
        faults={
            "a list": constant(b"[1]"),
            "deep mappings": constant(b'{"a":' * _DEEP + b"1" + b"}" * _DEEP),
            "half a character": constant(b'{"name": "\\ud800"}'),
        },
    ),
    "metrics": Subject(
        file="runs/table2/first/metrics.csv",
        arguments=_COMPARE,
        is_refused=False,
        faults={
            "no heading": lambda valid: valid.partition(b"\n")[2],
            "a long field": lambda valid: valid.partition(b"\n")[0] + b'\n"' + b"a" * 200_000,
            "zeros": constant(bytes(4096)),
        },
    ),
    "a checkpoint to go on with": Subject(
        file=_LAST,
        arguments=_TRAIN,
        removed=_BEGUN,
        faults={
            "most of it": first(0.9),
            "no optimizer": checkpoint(
                lambda whole: {k: v for k, v in whole.items() if k != "optimizer_states"}
            ),
            "pickled code": constant(pickle.dumps(_Code())),
        },
    ),
    "a model": Subject(
        file="model.ckpt",
        arguments=(*_PREDICT, "checkpoint=model.ckpt", "input=cloud.npy"),
        faults={
            "code": checkpoint(lambda whole: {**whole, "extra": _Code()}),
            "weights of another shape": checkpoint(_other_weights),
            "an archive of much": constant(_bomb("archive/data.pkl")),
        },
    ),
    "bundle": Subject(
        file="bundle/train.npz",
        arguments=_TRAIN,
        faults={
            "labels beyond": constant(_npz(**{**_BUNDLE, "labels": np.array([0, 2])})),
        },
    ),
    "npy": Subject(
        file="cloud.npy",
        arguments=(*_PREDICT, "checkpoint=model.ckpt", "input=cloud.npy"),
        faults={
            "rows": replaced("(16, 3), }" + " " * 9, "(16" + "0" * 9 + ", 3), }"),
            "code": constant(_npy(np.array([[_Code()] * 3] * 2))),
            "nan": constant(_npy(np.full((4, 3), np.nan))),
        },
    ),
}

NUMBERS = {
    "seed": "nan",
    "trainer.max_epochs": "inf",
    "trainer.gradient_clip_val": "1e400",
    "data.batch_size": "1000000000000",
    "data.resolution": "1e308",
    "model.width": "nan",
    "optim.optimizer.lr": "-1",
    "task.gallery": "-1",
}
_NAMED = {"optim.optimizer.lr": "optim.optimizer", "model.width": "model"}
"""What messages name where torch refuses a value."""


class Commands:
    """Runs commands one after the other, each in a fork of one process."""

    def __init__(self, stdin: IO[str], stdout: IO[str], folder: Path) -> None:
        self.stdin, self.stdout, self.folder, self._count = stdin, stdout, folder, 0

    def __call__(self, cwd: Path, arguments: tuple[str, ...]) -> dict[str, Any]:
        print(json.dumps({"cwd": str(cwd), "arguments": arguments}), file=self.stdin, flush=True)
        found: dict[str, Any] = json.loads(self.stdout.readline())
        return found

    def copied(self, *, without: tuple[str, ...] = ()) -> Path:
        """A directory with all valid files but some."""
        self._count += 1
        folder = self.folder.with_name(str(self._count))
        shutil.copytree(self.folder, folder, symlinks=True)
        for name in without:
            (folder / name).unlink()
        return folder


@pytest.fixture(scope="module")
def commands(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Commands]:
    """Commands, and valid files: those above, and what a training on some of them leaves."""
    folder = tmp_path_factory.mktemp("lies") / "valid"
    for name, content in _VALID.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    program = Path(__file__).parents[1] / "support" / "programs" / "forked_commands.py"
    with subprocess.Popen(
        [sys.executable, str(program)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=folder,
        env=environment(),
    ) as process:
        assert process.stdin
        assert process.stdout
        found = Commands(process.stdin, process.stdout, folder)
        trained = found(folder, _TRAIN)
        assert trained["code"] == 0, trained["output"]
        (run,) = (each.parent for each in folder.glob("outputs/table2/*/DONE.json"))
        gather(run.parent, to=folder)
        for name in ("first", "second"):
            shutil.copytree(run, folder / "runs" / "table2" / name)
        shutil.copy(run / "checkpoints" / "last.ckpt", folder / "model.ckpt")
        (run.parent / "run").symlink_to(run.name)
        yield found
        process.stdin.close()


def faults_of(ended: dict[str, Any], *, named: str, is_refused: bool) -> list[str]:
    """What is wrong with how a command ended."""
    output, refused = ended["output"], ended["code"] > 0
    wrong = {
        f"it took {ended['seconds']:.0f} s": ended["seconds"] > _MOST_S,
        f"it took {ended['peak_bytes'] / 2**20:.0f} MiB": ended["peak_bytes"] > _MOST_BYTES,
        f"its exit code was {ended['code']}": ended["code"] < int(is_refused),
        "it ended in a traceback": "Traceback" in output,
        f"it does not name {named}": refused and named not in output,
        "it names no remedy": refused and "remedy:" not in output,
    }
    return [*(text for text, is_so in wrong.items() if is_so), output[-300:]]


@pytest.mark.parametrize(
    "name",
    [n if n in ("bundle", "plan") else pytest.param(n, marks=pytest.mark.full) for n in SUBJECTS],
)
def test_a_valid_file_is_taken(commands: Commands, name: str) -> None:
    subject = SUBJECTS[name]
    ended = commands(commands.copied(without=subject.removed), subject.arguments)
    assert ended["code"] == 0, ended["output"]
    assert "Traceback" not in ended["output"]


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        pytest.param(name, fault, marks=[pytest.mark.full] if number else [])
        for name, subject in SUBJECTS.items()
        for number, fault in enumerate(subject.faults)
    ],
)
def test_a_malformed_file_is_refused(commands: Commands, name: str, fault: str) -> None:
    subject = SUBJECTS[name]
    folder = commands.copied(without=subject.removed)
    path = folder / subject.file
    content = subject.faults[fault](path.read_bytes())
    path.unlink()
    path.write_bytes(content) if isinstance(content, bytes) else content(path)
    ended = commands(folder, subject.arguments)
    *wrong, output = faults_of(ended, named=path.name, is_refused=subject.is_refused)
    assert not wrong, output


@pytest.mark.full
@pytest.mark.parametrize("key", NUMBERS)
def test_a_number_that_a_key_hardly_means(commands: Commands, key: str) -> None:
    """What can be done with it is done, and soon."""
    others = tuple(each for each in _TRAIN if not each.startswith(f"{key}="))
    ended = commands(commands.copied(), (*others, f"{key}={NUMBERS[key]}"))
    named = _NAMED.get(key, key.rpartition(".")[2])
    *wrong, output = faults_of(ended, named=named, is_refused=False)
    assert not wrong, output
