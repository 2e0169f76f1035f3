"""Every figure that this project wants of a GPU, in one command on a bare machine.

    python benchmarks/gpu/run.py --out DIR --minutes 9
    python benchmarks/gpu/run.py --dry-run
    python benchmarks/gpu/run.py --out DIR --part convolutions

Needs torch with CUDA and the packages that a part names, installed or as an unpacked folder of
wheels on PYTHONPATH; no network, and SparsePipe need not be installed. Parts run in order of worth,
each in a process of its own with a time limit. One that fails or takes too long does not end the
others. DIR gets a JSON file for each part, summary.md, and ledger.csv, which ``sparsepipe
task=report experiment=all task.where=DIR`` sets beside the paper's figures. Given again, the
command goes on with what DIR does not have. Without a GPU the parts that need one say so, the
others run in a small size.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path

STARTED_S = time.perf_counter()
HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(HERE), str(HERE.parent), str(ROOT)]

from records import Record, Rows  # noqa: E402
from summary import write_summary  # noqa: E402

from sparsepipe.errors import SparsePipeError  # noqa: E402

DEFAULT_MINUTES = 9.0
_GRACE_S = 5.0
"""For a part that was asked to end, before it is killed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """What is measured together.

    Attributes:
        name: of its module beside this file, and of its record.
        title: in the summary.
        limit_s: of its process, of the default minutes.
        needs_device: it measures nothing without a GPU; others measure small sizes there.
        packages: that it imports beside torch.
    """

    name: str
    title: str
    limit_s: float
    needs_device: bool
    packages: tuple[str, ...]

    @property
    def missing(self) -> list[str]:
        """Packages that are not there."""
        return [name for name in self.packages if find_spec(name) is None]


_FRAMEWORK = ("pytorch_lightning", "torchmetrics", "hydra", "omegaconf", "trimesh", "pandas")
PARTS = (
    Part(
        name="device_tests",
        title="Tests that need a device",
        limit_s=105,
        needs_device=True,
        packages=("pytest", *_FRAMEWORK),
    ),
    Part(
        name="convolutions",
        title="Sparse convolutions of VGG16-BN at 50³",
        limit_s=95,
        needs_device=False,
        packages=("numpy",),
    ),
    Part(
        name="trainings",
        title="Training steps, epochs, memory and largest batches",
        limit_s=180,
        needs_device=True,
        packages=(*_FRAMEWORK, "pyarrow", "matplotlib", "scipy"),
    ),
    Part(
        name="profiles",
        title="SmartProfile",
        limit_s=100,
        needs_device=False,
        packages=(*_FRAMEWORK, "matplotlib", "scipy"),
    ),
    Part(
        name="shared_device",
        title="A pipeline of two ranks on one device",
        limit_s=60,
        needs_device=True,
        packages=("pytorch_lightning", "torchmetrics"),
    ),
)


def main() -> None:
    """Runs the parts that are asked for; the exit status is 1 where one of them failed."""
    options = _options()
    chosen = [part for part in PARTS if options.part in (None, part.name)]
    scaled = [_scaled(part, options.minutes) for part in chosen]
    try:
        if options.worker:
            _work(scaled[0], options.out, Path(options.work))
        elif options.dry_run:
            _tell_plan(scaled, options.minutes)
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
    parser.add_argument("--part", choices=[part.name for part in PARTS], help="only this one")
    parser.add_argument("--dry-run", action="store_true", help="say what would run")
    parser.add_argument("--commit", help="of this copy, whose history stayed behind")
    parser.add_argument("--work", help="where data and runs go; by default removed at the end")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.out is None and not options.dry_run:
        parser.error("give --out DIR, the directory of the records, or --dry-run")
    if options.minutes <= 0:
        parser.error("--minutes must be above 0")
    return options


def _scaled(part: Part, minutes: float) -> Part:
    return replace(part, limit_s=part.limit_s * minutes / DEFAULT_MINUTES)


def _tell_plan(parts: Sequence[Part], minutes: float) -> None:
    from machine import at_hand

    machine = at_hand()
    print(f"{machine['device'] or 'no CUDA device'}, torch {machine['torch']}")
    for number, part in enumerate(parts, start=1):
        print(f"{number}. {part.name}: {part.title}, at most {part.limit_s:.0f} s")
        if part.missing:
            print(f"   missing: {', '.join(part.missing)}")
        if machine["device"] is None:
            print("   " + ("needs a device: skipped" if part.needs_device else "a small size"))
    total_s = sum(part.limit_s for part in parts)
    print(f"at most {total_s:.0f} s of {60 * minutes:.0f} s")


def _run_all(parts: Sequence[Part], options: argparse.Namespace) -> int:
    """Runs the parts one after another; 1 where one failed."""
    options.out.mkdir(parents=True, exist_ok=True)
    work = Path(options.work or tempfile.mkdtemp(prefix="sparsepipe-gpu-"))
    records = []
    try:
        for part in parts:
            records.append(_run(part, options, work))
            write_summary(options.out, [(p.name, p.title) for p in PARTS])
    finally:
        if options.work is None:
            shutil.rmtree(work, ignore_errors=True)
    print(f"\n{options.out / 'summary.md'}")
    return int(any(record.state not in ("finished", "skipped") for record in records))


def _run(part: Part, options: argparse.Namespace, work: Path) -> Record:
    """A part in a process of its own, unless its record is finished."""
    path = _path(options.out, part)
    before = Record.read(path) if path.exists() else None
    if before is not None and before.state == "finished":
        print(f"{part.name}: measured before")
        return before
    print(f"{part.name}: at most {part.limit_s:.0f} s", flush=True)
    started_s = time.monotonic()
    reason = _ended_by(part, options, work)
    seconds = time.monotonic() - started_s + (before.seconds if before else 0.0)
    record = Record.read(path) if path.exists() else Record(
        part=part.name, state="failed", limit_s=part.limit_s, machine={}
    )  # fmt: skip
    record = _ended(record, reason, seconds)
    record.write(path)
    print(f"{part.name}: {record.state} {record.reason} ({seconds:.0f} s)\n", flush=True)
    return record


def _ended(record: Record, reason: str, seconds: float) -> Record:
    """The record of a part whose process is gone."""
    failed = [str(row["row"]) for row in record.failed]
    if record.state == "skipped":
        return replace(record, seconds=seconds)
    if reason:
        late = reason.startswith("over")
        return replace(
            record, state="over its limit" if late else "failed", reason=reason, seconds=seconds
        )
    if failed:
        return replace(record, state="failed", reason=", ".join(failed), seconds=seconds)
    return replace(record, state="finished", reason="", seconds=seconds)


def _ended_by(part: Part, options: argparse.Namespace, work: Path) -> str:
    """Runs a part's process; why it did not end well, empty where it did."""
    command = [
        *(sys.executable, str(HERE / "run.py"), "--worker", "--part", part.name),
        *("--out", str(options.out), "--minutes", str(options.minutes), "--work", str(work)),
    ]
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}
    if options.commit:
        environment["SPARSEPIPE_COMMIT"] = options.commit
    process = subprocess.Popen(command, env=environment, start_new_session=True)
    try:
        code = process.wait(part.limit_s)
    except subprocess.TimeoutExpired:
        return f"over its limit of {part.limit_s:.0f} s"
    finally:
        _end(process)
    return "" if code == 0 else f"its process ended with exit status {code}"


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ends a part's process and all that it has started, whatever ends this one."""
    for signum, wait_s in ((signal.SIGTERM, _GRACE_S), (signal.SIGKILL, _GRACE_S)):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signum)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(wait_s)


def _work(part: Part, out: Path, work: Path) -> None:
    """Measures a part in this process.

    Raises:
        SparsePipeError: its record is another machine's.
    """
    import torch
    from machine import at_hand, unlike

    path, machine = _path(out, part), at_hand()
    fresh = Record(part=part.name, state="under way", limit_s=part.limit_s, machine=machine)
    before = Record.read(path) if path.exists() else fresh
    if before.measured and (difference := unlike(before.machine, machine)):
        raise SparsePipeError(
            f"{path} was measured with another {difference}", remedy="give another --out"
        )
    if part.needs_device and machine["device"] is None:
        replace(fresh, state="skipped", reason="it needs a CUDA device").write(path)
        return
    if part.missing:
        reason = f"it needs packages that are not there: {', '.join(part.missing)}"
        replace(fresh, state="skipped", reason=reason).write(path)
        return
    module = importlib.import_module(part.name)
    print(f"{part.name}: ready after {time.perf_counter() - STARTED_S:.1f} s", flush=True)
    replace(fresh, rows=before.rows, columns=module.COLUMNS).write(path)
    device = torch.device("cuda" if machine["device"] else "cpu")
    module.measure(Rows(path), device=device, work=work)


def _path(out: Path, part: Part) -> Path:
    return out / f"{part.name}.json"


if __name__ == "__main__":
    main()
