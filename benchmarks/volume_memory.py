"""How much memory the prediction of label volumes takes.

By windows, in fresh processes: what a process holds beyond what it held before it read the scan,
for scans of growing size, as ``.nii`` and as ``.nii.gz``. It should grow with the window, not with
the scan, except that a compressed scan is held as it is stored. Whole scans, by ``task=predict`` in
one process and over a grid of two ranks: the most that one of the processes holds. Only anonymous
and shared memory counts (``RssAnon`` and ``RssShmem``, as of temporary files that are no disk's):
pages of mapped files can be dropped at any time.

    python benchmarks/volume_memory.py
    python benchmarks/volume_memory.py --scans 512 --window 96
"""

from __future__ import annotations

import argparse
import gzip
import itertools
import multiprocessing
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import nibabel
import numpy as np
import torch
from torch import nn

from sparsepipe.data.volumes.preparation import Preparation
from sparsepipe.runs.model import VolumeModel

CLASSES = ("outside", "bright", "brightest")
MB = 1e6
SHARE = 0.6
"""Memory of each of two ranks, relative to one process: the goal."""
_INTERVAL_S = 0.005


def anonymous_bytes(pid: str = "self") -> int:
    """Bytes of memory of a process that belong to no file on a disk."""
    lines = Path("/proc", pid, "status").read_text().splitlines()
    kept = [line.split()[1] for line in lines if line.startswith(("RssAnon:", "RssShmem:"))]
    return 1024 * sum(map(int, kept))


def family(pid: str) -> Iterator[str]:
    """Yields a process and all processes below it."""
    yield pid
    with suppress(OSError):  # one has ended
        for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
            yield from family(child)


@contextmanager
def watched() -> Iterator[list[int]]:
    """Yields a list to which the most memory that this process held in the block is appended."""
    ended, most, found = threading.Event(), anonymous_bytes(), list[int]()

    def watch() -> None:
        nonlocal most
        while not ended.wait(_INTERVAL_S):
            most = max(most, anonymous_bytes())

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield found
    finally:
        ended.set()
        thread.join()
    found.append(most)


def write_scan(path: Path, size: int) -> None:
    """Writes a cube of int16 as ``.nii`` or ``.nii.gz``, slice by slice."""
    header = nibabel.Nifti1Header()
    header.set_data_dtype(np.int16)
    header.set_data_shape((size,) * 3)
    header["vox_offset"], header["magic"] = 352, b"n+1"
    header.set_sform(np.diag([0.8, 0.8, 0.8, 1]), 1)
    rng = np.random.default_rng(0)
    with gzip.open(path, "wb", 1) if path.suffix == ".gz" else path.open("wb") as file:
        file.write(header.binaryblock + bytes(4))
        for _ in range(size):
            file.write(rng.integers(-1000, 1000, (size, size), np.int16).tobytes())


def by_windows(path: str, window: int) -> tuple[int, float]:
    """Bytes that a prediction takes beyond what the process held before it, and its seconds."""
    torch.manual_seed(0)
    torch.set_num_threads(2)
    network = nn.Sequential(nn.Conv3d(1, 4, 3, padding=1), nn.ReLU(), nn.Conv3d(4, len(CLASSES), 1))
    preparation = Preparation(orientation="LPS", intensity="zscore")
    model = VolumeModel(network, CLASSES, preparation, patch=(window,) * 3)
    with tempfile.TemporaryDirectory() as folder:
        write_scan(Path(folder) / "small.nii", window)
        model.predict(Path(folder) / "small.nii")  # imports
    before, started_s = anonymous_bytes(), time.perf_counter()
    with watched() as found:
        model.predict(path, overlap=0.25, save=path.replace("scan.", "labels."))
    return found[0] - before, time.perf_counter() - started_s


def command(folder: Path, *words: str) -> int:
    """Runs the command line; returns the most memory of a process that computes, in bytes."""
    most, words = 0, (sys.executable, "-m", "sparsepipe", *words)
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    quiet = subprocess.DEVNULL
    process = subprocess.Popen(words, cwd=folder, env=environment, stdout=quiet, stderr=quiet)
    while process.poll() is None:
        for pid in family(str(process.pid)):
            with suppress(OSError):  # it has ended
                most = max(most, anonymous_bytes(pid))
        time.sleep(_INTERVAL_S)
    if process.returncode:
        raise SystemExit(f"{' '.join(words)} failed")
    return most


def whole(folder: Path, size: int, width: float) -> tuple[int, int]:
    """Most bytes of one process, and of one of two ranks, that predict a whole scan."""
    for kind in ("inputs", "labels"):
        (folder / "data" / kind).mkdir(parents=True)
    for number in range(4):
        values = np.random.default_rng(number).integers(0, 3, (16, 16, 16), np.uint8)
        for kind in ("inputs", "labels"):
            nibabel.Nifti1Image(values, np.eye(4)).to_filename(folder / f"data/{kind}/{number}.nii")
    write_scan(folder / "scan.nii", size)
    trained = (
        *("data=volume_files", "data.root=data", "data.labels=voxel", "data.val_share=0.25"),
        *(f"data.source.classes=[{','.join(CLASSES)}]", "model=unet3d", "model.levels=3"),
        *(f"model.width={width}", "trainer.max_epochs=1", "task.gallery=0"),
    )
    cpu = "hardware.cpu_devices=2"
    command(folder, *trained, cpu, "parallel=single", "parallel.devices=1", "name=trained")
    (run,) = (folder / "outputs" / "trained").glob("*/config.yaml")
    predict = ("task=predict", f"checkpoint={run.parent}", "input=scan.nii", "task.gallery=0", cpu)
    alone = command(folder, *predict, "parallel=single", "parallel.devices=1")
    return alone, command(folder, *predict, "parallel=spatial", "parallel.devices=2")


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures and prints everything."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    sides: dict[str, Any] = {"type": int, "nargs": "*", "help": "voxels a side"}
    parser.add_argument("--scans", default=[64, 128, 256], **sides)
    parser.add_argument("--window", type=int, default=48, help="voxels a side")
    parser.add_argument("--whole", default=[96], **sides)
    parser.add_argument("--width", type=float, default=0.5, help="of the U-Net on whole scans")
    options = parser.parse_args(arguments)
    context = multiprocessing.get_context("spawn")
    for size, suffix in itertools.product(options.scans, ("nii", "nii.gz")):
        with tempfile.TemporaryDirectory() as name, context.Pool(1) as pool:
            path = Path(name) / f"scan.{suffix}"
            write_scan(path, size)
            taken, seconds = pool.apply(by_windows, (str(path), options.window))
        print(
            f"windows of {options.window}^3 on {size}^3 as {suffix}: {taken / MB:,.0f} MB, "
            f"{taken / (4 * size**3):.2f} times the scan in float32; {seconds:.1f} s",
            flush=True,
        )
    for size in options.whole:
        with tempfile.TemporaryDirectory() as name:
            alone, shared = whole(Path(name), size, options.width)
        print(
            f"whole {size}^3: one process {alone / MB:,.0f} MB, each of two ranks at most "
            f"{shared / MB:,.0f} MB: {shared / alone:.2f} (goal at most {SHARE}), "
            + ("met" if shared <= SHARE * alone else "MISSED"),
            flush=True,
        )


if __name__ == "__main__":
    main()
