"""Every figure that this project wants of a GPU, by one command on a bare machine.

    python benchmarks/gpu/run.py --out DIR --minutes 9
    python benchmarks/gpu/run.py --dry-run
    python benchmarks/gpu/run.py --out DIR --part convolutions

Needs torch with CUDA and the packages that a part names, installed or as an unpacked folder of
wheels on PYTHONPATH; no network, and SparsePipe need not be installed. Parts run in order of worth,
each in a process of its own with a time limit. One that fails or takes too long does not end the
others; what a start has no time for, the next one takes. DIR gets a JSON file for each part,
summary.md, and ledger.csv, which ``sparsepipe task=report experiment=all task.where=DIR`` sets
beside the paper's figures. Given again, the command goes on with what DIR does not have. Without a
GPU the parts that need one say so, the others run in a small size.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NoReturn

STARTED_S = time.perf_counter()
HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(HERE), str(HERE.parent), str(ROOT)]

from records import Record, Rows, counts  # noqa: E402
from summary import write_summary  # noqa: E402

from sparsepipe.errors import SparsePipeError  # noqa: E402

DEFAULT_MINUTES = 9.0
_GRACE_S = 5.0
"""How long a part's process may take to end before it is killed."""
_LEAST_S = 20.0
"""With less time left, no later part is started."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """What is measured together, in one process.

    Attributes:
        name: the name of its module beside this file, and of its record.
        module: another module, whose ``measure_<name>`` it is; None: its own.
        title: its heading in the summary.
        limit_s: the time limit of its process, in seconds, where all parts have nine minutes.
        needs_device: whether it measures nothing without a GPU; other parts measure small sizes.
        packages: what it imports beside torch.
        later: whether it has only the time that the parts before it leave.
    """

    name: str
    title: str
    limit_s: float
    needs_device: bool
    packages: tuple[str, ...]
    later: bool = False
    module: str | None = None

    @property
    def missing(self) -> list[str]:
        """Packages that are not there."""
        return [name for name in self.packages if find_spec(name) is None]


_FRAMEWORK = ("pytorch_lightning", "torchmetrics", "hydra", "omegaconf", "trimesh", "pandas")
PARTS = (
    Part(
        name="device_tests",
        title="Tests that need a device",
        limit_s=115,
        needs_device=True,
        packages=("pytest", *_FRAMEWORK),
    ),
    Part(
        name="convolutions",
        title="Sparse convolutions of VGG16-BN at 50³",
        limit_s=150,
        needs_device=False,
        packages=("numpy",),
    ),
    Part(
        name="trainings",
        title="Training steps and epochs, sparse over dense, and whether bits repeat",
        limit_s=165,
        needs_device=False,
        packages=(*_FRAMEWORK, "pyarrow", "matplotlib", "scipy"),
    ),
    Part(
        name="profiles",
        title="SmartProfile",
        limit_s=90,
        needs_device=False,
        packages=(*_FRAMEWORK, "matplotlib", "scipy"),
    ),
    Part(
        name="shared_device",
        title="A pipeline of two ranks on one device",
        limit_s=60,
        needs_device=True,
        packages=("pytorch_lightning", "torchmetrics"),
        later=True,
    ),
    Part(
        name="memory",
        title="Memory and largest batches",
        module="trainings",
        limit_s=240,
        needs_device=True,
        packages=(*_FRAMEWORK, "pyarrow", "matplotlib", "scipy"),
        later=True,
    ),
    Part(
        name="shards",
        title="One sample over ranks that share one device",
        limit_s=100,
        needs_device=True,
        packages=("pytorch_lightning", "torchmetrics"),
        later=True,
    ),
    Part(
        name="domain_ranks",
        title="Domains over ranks that share one device",
        limit_s=40,
        needs_device=True,
        packages=("pytorch_lightning", "torchmetrics"),
        later=True,
    ),
)


def main() -> None:
    """Runs the parts; the exit status is 1 where one of them failed."""
    options = _options()
    chosen = [part for part in PARTS if options.part in (None, part.name)]
    scaled = [_scaled(part, options.minutes) for part in chosen]
    try:
        if options.parent is not None:
            _work(scaled[0], options)
        elif options.dry_run:
            _print_plan(scaled, options)
        else:
            sys.exit(_run_all(scaled, options))
    except SparsePipeError as error:
        sys.exit(f"{error.message}\n{error.remedy}")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="directory of the records")
    parser.add_argument("--minutes", type=float, default=DEFAULT_MINUTES, help="for all parts (9)")
    parser.add_argument("--part", choices=[part.name for part in PARTS], help="run only this one")
    parser.add_argument("--dry-run", action="store_true", help="print what would run")
    parser.add_argument("--commit", help="the commit of this copy, whatever history it has")
    parser.add_argument(
        "--work", type=Path, help="directory for data and runs; by default a new one, then removed"
    )
    parser.add_argument("--parent", type=int, help=argparse.SUPPRESS)  # of a part's process
    options = parser.parse_args()
    if options.out is None and not options.dry_run:
        parser.error("give --out DIR, the directory of the records, or --dry-run")
    if options.out is not None and options.out.exists() and not options.out.is_dir():
        parser.error(f"--out {options.out} is a file: give a directory")
    if not (math.isfinite(options.minutes) and options.minutes > 0):
        parser.error("--minutes must be a number above 0")
    return options


def _scaled(part: Part, minutes: float) -> Part:
    return replace(part, limit_s=part.limit_s * minutes / DEFAULT_MINUTES)


def _print_plan(parts: Sequence[Part], options: argparse.Namespace) -> None:
    machine = _machine(options)
    print(f"{machine['device'] or 'no CUDA device'}, torch {machine['torch']}")
    for number, part in enumerate(parts, start=1):
        when = " of what is left" if part.later else ""
        print(f"{number}. {part.name}: {part.title}, at most {part.limit_s:.0f} s{when}")
        if part.missing:
            print(f"   missing: {', '.join(part.missing)}")
        if machine["device"] is None:
            print("   " + ("needs a device: skipped" if part.needs_device else "a small size"))
    total_s = sum(part.limit_s for part in parts if not part.later)
    print(f"at most {total_s:.0f} s of {60 * options.minutes:.0f} s")


def _machine(options: argparse.Namespace) -> dict[str, Any]:
    """What :mod:`machine` says, in a process that is gone when the first part wants the device."""
    command = [sys.executable, str(HERE / "machine.py")]
    ran = subprocess.run(
        command, env=_environment(options), stdout=subprocess.PIPE, text=True, check=False
    )
    if ran.returncode:
        raise SparsePipeError(
            "torch does not tell which device there is",
            remedy="mend what the traceback above says",
        )
    found: dict[str, Any] = json.loads(ran.stdout)
    return found


def _environment(options: argparse.Namespace) -> dict[str, str]:
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    named = {"SPARSEPIPE_COMMIT": options.commit} if options.commit else {}
    return {**os.environ, **named, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}


def _run_all(parts: Sequence[Part], options: argparse.Namespace) -> int:
    """Runs the parts one after another; 1 where one failed.

    Raises:
        SparsePipeError: there is a record of another machine or commit.
    """
    for signum in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(signum) != signal.SIG_IGN:  # as nohup has it
            signal.signal(signum, _end_by_signal)
    options.out.mkdir(parents=True, exist_ok=True)
    machine = _machine(options)
    for part in PARTS:  # the summary has them all
        _refuse_another(machine, _path(options.out, part))
    work = options.work or Path(tempfile.mkdtemp(prefix="sparsepipe-gpu-"))
    try:
        states = [_run(_timed(part, options), options, work, machine).state for part in parts]
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    finally:
        if options.work is None:
            shutil.rmtree(work, ignore_errors=True)
        write_summary(options.out, [(part.name, part.title) for part in PARTS])
        print(f"\n{options.out / 'summary.md'}")
    return int(any(state not in ("finished", "skipped") for state in states))


def _timed(part: Part, options: argparse.Namespace) -> Part:
    """The part with the time that is left for it; none if there is too little."""
    if not part.later or options.part is not None:
        return part
    left_s = 60 * options.minutes - (time.perf_counter() - STARTED_S) - 2 * _GRACE_S
    return replace(part, limit_s=min(part.limit_s, left_s) if left_s > _LEAST_S else 0.0)


def _end_by_signal(signum: int, frame: object) -> NoReturn:
    del frame
    sys.exit(128 + signum)


def _refuse_another(machine: Mapping[str, Any], path: Path) -> None:
    """Refuses to add to a record of another machine or commit."""
    from machine import unlike

    record = Record.read(path) if path.exists() else None
    if record is None or not record.rows:
        return
    if difference := unlike(record.machine, machine):
        raise SparsePipeError(
            f"{path} was measured with another {difference}", remedy="give another --out"
        )


def _run(part: Part, options: argparse.Namespace, work: Path, machine: Mapping[str, Any]) -> Record:
    """Runs a part in a process of its own, unless its record is finished."""
    path = _path(options.out, part)
    fresh = Record(part=part.name, state="under way", limit_s=part.limit_s, machine=machine)
    before = Record.read(path) if path.exists() else fresh
    if before.state == "finished" and all(map(counts, before.rows)):
        print(f"{part.name}: measured before")
        return before
    skipped = _reason_to_skip(part, machine)
    if skipped:
        return _written(replace(before, state="skipped", reason=skipped), path)
    if not part.limit_s:
        reason = "no time was left for it: the same command goes on with it"
        return _written(replace(before, state="over its limit", reason=reason), path)
    print(f"{part.name}: at most {part.limit_s:.0f} s", flush=True)
    replace(before, state="under way", limit_s=part.limit_s, machine=machine).write(path)
    started_s, reason = time.monotonic(), "its start was ended by a signal"
    try:
        reason = _ended_by(part, options, work)
    finally:
        seconds = before.seconds + time.monotonic() - started_s
        ended = _ended(replace(Record.read(path), seconds=seconds), reason)
        _written(ended, path)
    return ended


def _reason_to_skip(part: Part, machine: Mapping[str, Any]) -> str:
    if part.needs_device and machine["device"] is None:
        return "it needs a CUDA device"
    return f"packages are missing: {', '.join(part.missing)}" if part.missing else ""


def _written(record: Record, path: Path) -> Record:
    record.write(path)
    how = ": ".join(filter(None, [record.state, record.reason]))
    print(f"{record.part}: {how} ({record.seconds:.0f} s)\n", flush=True)
    return record


def _ended(record: Record, reason: str) -> Record:
    """The record of a part whose process is gone."""
    if reason:
        late = reason.startswith("over its limit")
        return replace(record, state="over its limit" if late else "failed", reason=reason)
    failed = ", ".join(str(row["row"]) for row in record.failed)
    return replace(record, state="failed" if failed else "finished", reason=failed)


def _ended_by(part: Part, options: argparse.Namespace, work: Path) -> str:
    """Runs a part's process; why it did not end well, empty where it did."""
    command = [
        *(sys.executable, str(HERE / "run.py"), "--parent", str(os.getpid())),
        *("--part", part.name, "--out", str(options.out), "--work", str(work)),
    ]
    process = subprocess.Popen(command, env=_environment(options), start_new_session=True)
    try:
        code = process.wait(part.limit_s)
    except subprocess.TimeoutExpired:
        return f"over its limit of {part.limit_s:.0f} s"
    finally:
        _end(process)
    return "" if code == 0 else f"its process ended with exit status {code}"


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ends a part's process group; those of its processes that have left it follow their parent."""
    for signum in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signum)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_GRACE_S)


def _work(part: Part, options: argparse.Namespace) -> None:
    """Measures a part in this process, which ends with the one that has started it."""
    import torch

    from sparsepipe.utils.process import end_with_parent

    end_with_parent(options.parent)
    path, module = _path(options.out, part), importlib.import_module(part.module or part.name)
    replace(Record.read(path), columns=module.COLUMNS).write(path)
    print(f"{part.name}: ready after {time.perf_counter() - STARTED_S:.1f} s", flush=True)
    device = torch.device("cuda" if Record.read(path).machine["device"] else "cpu")
    measure = getattr(module, f"measure_{part.name}" if part.module else "measure")
    measure(Rows(path), device=device, work=options.work)


def _path(out: Path, part: Part) -> Path:
    return out / f"{part.name}.json"


if __name__ == "__main__":
    main()
