"""More that lies: files that runs leave, files of data, and numbers on the command line.

All are made from a training on a few clouds, by :data:`TRAIN`, and what it has left.
"""

from __future__ import annotations

import io
import json
import os
import pickle
import shutil
import struct
import zipfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from sparsepipe.runs.ledger import CSV, PARQUET, gather
from tests.support.lies import DEEP, NAN, Case, Subject, of_document, special

_OF_ANY_DATA = (
    *("data.resolution=8", "data.batch_size=2", "data.num_workers=0", "data.seed=0"),
    *("model=dense_vgg11_bn", "model.width=0.0625", "task.gallery=0"),
    *("hardware.accelerator=cpu", "hardware.cpu_devices=1"),
    *("trainer.max_epochs=1", "trainer.max_steps=1"),
    *("name=table2", "paths.cache=cache", "paths.outputs=outputs"),
)
_DATA = (*_OF_ANY_DATA, "data=modelnet40_points", "data.root=bundle")
TRAIN = (*_DATA, "parallel=single")
_FOLDER = (
    *("data=folder", "data.root=shapes", "data.strict=true", "data.split=split.csv"),
    *("data.num_points=16", "data.cached_points=16", "data.cache_workers=1"),
)
_TRAIN_ON_FOLDER = (*_OF_ANY_DATA, *_FOLDER, "parallel=single")
_CLASSES, _RUN = ("cup", "pen"), "outputs/table2/run"
_CLOUD = np.random.default_rng(0).random((16, 3)).round(3)


def training_files(folder: Path) -> None:
    """Writes what trainings read: an archive, or files and the table that divides them."""
    rows = ["file,split"]
    for number, name in enumerate(_CLASSES * 2):
        path = folder / "shapes" / name / f"{number}.npy"
        path.parent.mkdir(parents=True, exist_ok=True)
        np.save(path, _CLOUD + number)
        rows.append(f"{name}/{number}.npy,{'train' if number < 2 else 'test'}")
    (folder / "split.csv").write_text("\n".join(rows) + "\n")
    (folder / "bundle").mkdir()
    for split in ("train", "test"):
        (folder / "bundle" / f"{split}.npz").write_bytes(_npz(**_BUNDLE))


def derived_files(folder: Path) -> None:
    """Writes what else there is to read, from the run that :data:`TRAIN` has left."""
    (run,) = (each.parent for each in folder.glob("outputs/table2/*/DONE.json"))
    gather(run.parent, to=folder)
    shutil.copytree(run, folder / "runs" / "table2" / "first")
    shutil.copytree(run, folder / "runs" / "table2" / "second")
    shutil.copy(run / "checkpoints" / "last.ckpt", folder / "model.ckpt")
    (folder / "outputs" / "table2" / "run").symlink_to(run.name)
    for suffix, content in CLOUDS.items():
        (folder / f"cloud{suffix}").write_bytes(content)


def _npy(values: Any) -> bytes:
    stream = io.BytesIO()
    np.save(stream, values)
    return stream.getvalue()


def _npz(**arrays: Any) -> bytes:
    stream = io.BytesIO()
    np.savez(stream, **arrays)
    return stream.getvalue()


def _lines(separator: str = " ", *, before: str = "") -> bytes:
    return (before + "".join(separator.join(map(str, p)) + "\n" for p in _CLOUD.tolist())).encode()


_CORNERS = "0 0 0\n1 0 0\n0 1 0\n0 0 1\n"
_FACES = "3 0 1 2\n3 0 1 3\n3 0 2 3\n3 1 2 3\n"
_PLY = "ply\nformat ascii 1.0\nelement vertex {}\nproperty float x\nproperty float y\n"
_PLY += "property float z\nelement face 4\nproperty list uchar int vertex_indices\nend_header\n"
_STL = bytes(80) + struct.pack("<I", 2)
_STL += 2 * (struct.pack("<12f", *(0, 0, 1), *(0, 0, 0), *(1, 0, 0), *(0, 1, 0)) + bytes(2))
_BUNDLE: Mapping[str, Any] = {
    "points": np.stack([_CLOUD, _CLOUD]),
    "labels": np.array([0, 1]),
    "classes": np.array(_CLASSES),
    "names": np.array(["a", "b"]),
}

CLOUDS: Mapping[str, bytes] = {
    ".npy": _npy(_CLOUD),
    ".npz": _npz(points=_CLOUD),
    ".txt": _lines(),
    ".csv": _lines(",", before="x,y,z\n"),
    ".off": f"OFF\n4 4 0\n{_CORNERS}{_FACES}".encode(),
    ".ply": (_PLY.format(4) + _CORNERS + _FACES).encode(),
    ".stl": _STL,
    ".obj": b"v 0 0 0\nv 1 0 0\nv 0 1 0\nv 0 0 1\nf 1 2 3\nf 1 2 4\n",
}

_PREDICT = ("task=predict", "hardware.accelerator=cpu", "paths.outputs=predicted")
_REPORT = ("task=report", "task.exhibits=[table2]", "paths.outputs=reported")
_COMPARE = ("task=compare", "runs=[runs/table2/first,runs/table2/second]", "paths.outputs=runs")
_FINISHED = tuple(f"{_RUN}/{name}" for name in ("DONE.json", "checkpoints/fitted.json"))

SUBJECTS: Mapping[str, Subject] = {
    subject.name: subject
    for subject in (
        Subject("ledger.csv", CSV, (*_REPORT, f"task.where={CSV}")),
        Subject("ledger.parquet", PARQUET, (*_REPORT, f"task.where={PARQUET}")),
        Subject("result", "runs/table2/first/result.json", _COMPARE, is_refused=False),
        Subject(
            "reported result",
            "runs/table2/first/result.json",
            (*_REPORT, "task.where=runs/table2/first"),
            is_refused=False,
        ),
        Subject(
            "end",
            "runs/table2/first/DONE.json",
            (*_REPORT, "task.where=runs/table2/first"),
            is_refused=False,
        ),
        Subject("metrics", "runs/table2/first/metrics.csv", _COMPARE, is_refused=False),
        Subject("resumed metrics", f"{_RUN}/metrics.csv", TRAIN, removed=_FINISHED),
        Subject("resumed", f"{_RUN}/checkpoints/last.ckpt", TRAIN, removed=_FINISHED),
        Subject(
            "checkpoint", "model.ckpt", (*_PREDICT, "checkpoint=model.ckpt", "input=cloud.npy")
        ),
        Subject("weights", "model.ckpt", (*TRAIN, "seed=2", "checkpoint=model.ckpt")),
        Subject("split", "split.csv", _TRAIN_ON_FOLDER),
        Subject("cloud of a folder", "shapes/cup/0.npy", _TRAIN_ON_FOLDER),
        Subject("bundle", "bundle/train.npz", TRAIN),
        *(
            Subject(
                f"cloud{suffix}",
                f"cloud{suffix}",
                (*_PREDICT, "checkpoint=model.ckpt", f"input=cloud{suffix}"),
            )
            for suffix in CLOUDS
        ),
    )
}


def cases(valid: Path) -> list[Case]:
    """All malformed files and numbers; made from the valid files in a folder."""
    found: list[Case] = [*_numbers()]
    for subject in SUBJECTS.values():
        content = (valid / subject.file).read_bytes()
        if not subject.name.startswith("cloud.") or subject.name in ("cloud.npz", "cloud.off"):
            found += special(subject)
        found += _cut(subject, content)
        if subject.file.endswith(".json"):
            found += of_document(subject, json.loads(content))
        elif subject.file.endswith(".csv") and not subject.name.startswith("cloud"):
            found += _of_table(subject, content.decode())
        elif subject.file.endswith(".ckpt"):
            found += _of_checkpoint(subject, torch.load(io.BytesIO(content), weights_only=False))
    found += _of_clouds()
    found += _of_bundle(SUBJECTS["bundle"])
    return [
        replace(each, is_refused=each.is_refused and not _is_begun_without(each))
        for each in found
        # Fingerprints are made of files of any size, which takes as long as reading them.
        if not ("8 GB" in each.name and each.subject in ("weights", "cloud of a folder"))
    ]


def _is_begun_without(case: Case) -> bool:
    """Whether a directory has no runs, or a run has nothing to go on with."""
    if case.name == "directory":
        return case.subject.startswith("ledger")
    return case.name in ("missing", "link to itself") and case.subject.startswith("resumed")


def _cut(subject: Subject, content: bytes) -> Iterator[Case]:
    is_text = subject.file.endswith((".csv", ".txt", ".obj", ".ply"))
    for share in () if is_text else (0.3, 0.9):  # a shorter text is a text
        yield subject.case("structure", f"{share:.0%} of it", content[: int(share * len(content))])


def _of_table(subject: Subject, text: str) -> Iterator[Case]:
    head, *lines = text.splitlines()
    yield subject.case("structure", "no heading", "\n".join(lines).encode())
    other = text.replace(",", ";").encode()  # which tables of users may have
    refused = subject.is_refused and subject.name != "split"
    yield subject.case("structure", "semicolons", other, is_refused=refused)
    long = f'{head}\n"{"a" * 200_000}"\n'.encode()  # which only Python's own reader refuses
    yield subject.case("structure", "a long field", long, is_refused=False)
    yield subject.case("structure", "another heading", f"a,b\n{lines[0]}\n".encode())
    half = f"{head}\n{lines[0][:3]}".encode()
    yield subject.case("structure", "half a line", half, is_refused=False)


def _of_checkpoint(subject: Subject, whole: dict[str, Any]) -> Iterator[Case]:
    state, record = whole["state_dict"], whole["sparsepipe"]
    name = next(iter(state))

    def other(**changes: Any) -> Any:
        return {**whole, **changes}

    values: dict[str, Any] = {
        "a list": [1, 2],
        "a number": 7,
        "nothing": {},
        "no weights": other(state_dict={}),
        "weights that are numbers": other(state_dict=dict.fromkeys(state, 1.0)),
        "weights that are a list": other(state_dict=[*state.values()]),
        "one tensor less": other(state_dict={k: v for k, v in state.items() if k != name}),
        "one of another shape": other(state_dict={**state, name: torch.zeros(3)}),
        "one of 1e12 elements": other(state_dict={**state, name: torch.zeros(1).expand(10**12)}),
        "one that is complex": other(state_dict={**state, name: state[name].to(torch.cfloat)}),
        "one that is sparse": other(state_dict={**state, name: state[name].to_sparse()}),
        "one on no device": other(state_dict={**state, name: state[name].to("meta")}),
        "an object": other(extra=Path("x")),
        "code": _Code(),
    }
    if subject.name != "resumed":
        values |= {
            "a record that is a list": other(sparsepipe=[1]),
            "classes that are a number": other(sparsepipe={**record, "classes": 7}),
            "one class less": other(sparsepipe={**record, "classes": list(_CLASSES[:1])}),
            "a configuration that is a text": other(sparsepipe={**record, "config": "x"}),
            "an empty configuration": other(sparsepipe={**record, "config": {}}),
        }
    else:
        place = whole["callbacks"]["RunCheckpoint"]
        values |= {
            "no callbacks": {k: v for k, v in whole.items() if k != "callbacks"},
            "no place": other(callbacks={}),
            "a place that is a list": other(callbacks={"RunCheckpoint": [1]}),
            "an epoch that is a text": other(callbacks={"RunCheckpoint": {**place, "epoch": "x"}}),
            "no optimizer": {k: v for k, v in whole.items() if k != "optimizer_states"},
            "no loops": {k: v for k, v in whole.items() if k != "loops"},
        }
    for variant, value in values.items():
        stream = io.BytesIO()
        torch.save(value, stream)
        # What says nothing of the training may serve as weights, which the commands differ in.
        is_refused = subject.name == "checkpoint" or not _may_serve(variant)
        yield subject.case("checkpoints", variant, stream.getvalue(), is_refused=is_refused)
    yield subject.case("checkpoints", "pickled code", pickle.dumps(_Code()))
    yield subject.case("checkpoints", "a pickled list", pickle.dumps([1]))
    yield subject.case("checkpoints", "an array", _npy(np.zeros(3)))
    yield subject.case("checkpoints", "a zip of much", _bomb("archive/data.pkl"))


def _may_serve(variant: str) -> bool:
    return any(
        word in variant for word in ("record", "class", "configuration", "complex", "sparse")
    )


class _Code:
    """Its pickle runs a program."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("echo hello",)


def _bomb(name: str, size_bytes: int = 1 << 31) -> Callable[[Path], object]:
    """What makes an archive with a member of zeros, which is a thousandth as large."""

    def write(path: Path) -> None:
        with (
            zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive,
            archive.open(name, "w", force_zip64=True) as member,
        ):
            for _ in range(size_bytes >> 24):
                member.write(bytes(1 << 24))

    return write


def _header(shape: str, kind: str = "<f8") -> bytes:
    """The begin of an array's file."""
    text = f"{{'descr': '{kind}', 'fortran_order': False, 'shape': {shape}, }}".ljust(117) + "\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text.encode()


def _of_clouds() -> Iterator[Case]:
    for suffix, number, text in (
        (suffix, number, CLOUDS[suffix].decode())
        for suffix in (".txt", ".csv", ".off", ".ply", ".obj")
        for number in ("inf", "1e400", "nan", "1e308", "many")
    ):
        first = {".off": "1 0 0", ".ply": "1 0 0", ".obj": "1 0 0"}.get(suffix, str(_CLOUD[3, 1]))
        wrong = text.replace(first, first.replace("1", number, 1) if " " in first else number, 1)
        yield SUBJECTS[f"cloud{suffix}"].case("numbers", number, wrong.encode())
    for number in ("1000000000000", "-1", "inf", "many"):
        off = CLOUDS[".off"].replace(b"4 4 0", f"{number} 4 0".encode(), 1)
        ply = (_PLY.format(number) + _CORNERS + _FACES).encode()
        yield SUBJECTS["cloud.off"].case("numbers", f"{number} vertices", off)
        yield SUBJECTS["cloud.ply"].case("numbers", f"{number} vertices", ply)
    faces = CLOUDS[".off"].replace(b"3 0 1 2", b"3 0 1 999999999", 1)
    yield SUBJECTS["cloud.off"].case("numbers", "a face of no vertex", faces)
    faces = CLOUDS[".obj"].replace(b"f 1 2 3", b"f 1 2 999999999", 1)
    yield SUBJECTS["cloud.obj"].case("numbers", "a face of no vertex", faces, is_refused=False)
    many = _STL[:80] + struct.pack("<I", 2**32 - 1) + _STL[84:]
    yield SUBJECTS["cloud.stl"].case("numbers", "4e9 triangles", many)
    nans = _STL[:84] + struct.pack("<12f", *[NAN] * 12) + _STL[132:]
    yield SUBJECTS["cloud.stl"].case("numbers", "nan", nans)
    npy: dict[str, bytes] = {
        "1e12 rows": _header("(1000000000000, 3)") + bytes(48),
        "1e30 rows": _header(f"({10**30}, 3)") + bytes(48),
        "-1 rows": _header("(-1, 3)") + bytes(48),
        "objects": _header("(2, 3)", "|O") + pickle.dumps(_Code()),
        "texts": _npy(np.array([["a", "b", "c"]])),
        "dates": _npy(np.array([["2024-05-01"] * 3], "datetime64[D]")),
        "complex numbers": _npy(np.ones((4, 3), complex)),
        "nan": _npy(np.full((4, 3), np.nan)),
        "1e308": _npy(np.full((4, 3), 1e308)),
        "one number": _npy(np.float64(1)),
        "no rows": _npy(np.zeros((0, 3))),
        "a header of code": b"\x93NUMPY\x01\x00\x20\x00__import__('os').system('echo')\n",
        "a deep header": b"\x93NUMPY\x02\x00" + struct.pack("<I", 2 * DEEP) + b"[" * 2 * DEEP,
    }
    for name, content in npy.items():
        yield SUBJECTS["cloud.npy"].case("arrays", name, content)
        yield SUBJECTS["cloud of a folder"].case("arrays", name, content)
    yield from _of_archive(SUBJECTS["cloud.npz"], npy)


def _of_archive(subject: Subject, arrays: Mapping[str, bytes]) -> Iterator[Case]:
    """Archives whose ``points`` are these arrays, and others."""
    for name, content in arrays.items():
        stream = io.BytesIO()
        with zipfile.ZipFile(stream, "w") as archive:
            archive.writestr("points.npy", content)
        yield subject.case("arrays", name, stream.getvalue())
    yield subject.case("arrays", "a single array", _npy(_CLOUD))
    yield subject.case("arrays", "no points", _npz(other=_CLOUD, another=_CLOUD))
    yield subject.case("arrays", "much", _bomb("points.npy"))
    whole = CLOUDS[".npz"]
    at = whole.index(b"PK\x01\x02")
    encrypted = whole[: at + 8] + bytes([whole[at + 8] | 1]) + whole[at + 9 :]
    unknown = whole[: at + 10] + struct.pack("<H", 99) + whole[at + 12 :]
    yield subject.case("arrays", "encrypted", encrypted)
    yield subject.case("arrays", "of unknown compression", unknown)


def _of_bundle(subject: Subject) -> Iterator[Case]:
    for name, arrays in {
        "fewer names": {"names": np.array(["a"])},
        "fewer labels": {"labels": np.array([0])},
        "labels beyond the classes": {"labels": np.array([0, 2])},
        "labels below 0": {"labels": np.array([0, -1])},
        "labels that are texts": {"labels": np.array(["cup", "pen"])},
        "labels that are nan": {"labels": np.array([0, np.nan])},
        "no classes": {"classes": np.array([], str)},
        "a class twice": {"classes": np.array(["cup", "cup"])},
        "half a character": {"classes": np.array(["cup", "\ud800"])},
        "points that are nan": {"points": np.full((2, 16, 3), np.nan)},
        "points that are flat": {"points": np.zeros((2, 48))},
        "a scale that is nan": {"scale": np.array(np.nan)},
        "an offset that is inf": {"offset": np.array([0, np.inf, 0])},
    }.items():
        yield subject.case("arrays", name, _npz(**{**_BUNDLE, **arrays}))


_NUMBERS = ("inf", "1e400", "1e308", "nan", "1000000000000", "-1")
_KEYS: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(
        (
            *("trainer.max_epochs", "trainer.max_steps", "trainer.limit_train_batches", "seed"),
            *("trainer.gradient_clip_val", "trainer.accumulate_grad_batches", "parallel.grace_s"),
            *("data.batch_size", "data.resolution", "data.num_points", "data.num_workers"),
            *("data.val_share", "data.point_ratio", "model.width", "optim.optimizer.lr"),
            *("optim.label_smoothing", "hardware.cpu_devices", "task.gallery", "trainer.max_time"),
        ),
        TRAIN,
    ),
    **dict.fromkeys(
        ("data.cached_points", "data.cache_workers", "data.lock_wait_s", "data.split"),
        _TRAIN_ON_FOLDER,
    ),
    "parallel.devices": (*_DATA, "parallel=dp"),
    "parallel.max_restarts": (*_DATA, "parallel=dp"),
    "parallel.strategy.timeout_s": (*_DATA, "parallel=dp"),
    "parallel.strategy.microbatches": (*_DATA, "parallel=gpipe"),
    "parallel.plan.cuts": (
        *(*_DATA, "parallel=pipeline", "parallel.plan.config=1-1", "hardware.cpu_devices=2"),
    ),
}


_NAMED = {"optim.optimizer.lr": "optim.optimizer", "model.width": "model"}
"""What messages name where torch refuses a value."""


def _numbers() -> Iterator[Case]:
    """Numbers that a key hardly means: what can be done with them is done, and soon."""
    for key, arguments in _KEYS.items():
        for number in _NUMBERS:
            value = f"[{number}]" if key.endswith("cuts") else number
            others = tuple(each for each in arguments if not each.startswith(f"{key}="))
            yield Case(
                subject="command line",
                kind="numbers",
                name=f"{key}={number}",
                file=None,
                content=b"",
                arguments=(*others, f"{key}={value}"),
                named=_NAMED.get(key, key.rpartition(".")[2]),
                is_refused=False,
            )


def records(document: dict[str, Any]) -> list[Case]:
    """Malformed records of a sweep's job, which no command reads alone."""
    subject = Subject("record", "jobs/0/record.json", ())
    return [*special(subject), *of_document(subject, document)]
