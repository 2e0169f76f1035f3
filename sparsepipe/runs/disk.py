"""The disk space of runs: removing checkpoints that a run does not keep, or those of many runs."""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import suppress
from importlib.resources.abc import Traversable
from pathlib import Path

from sparsepipe.config.schema import KeptCheckpoints
from sparsepipe.errors import ConfigError, NoRunsError
from sparsepipe.runs.ledger import run_directories
from sparsepipe.runs.lock import locked
from sparsepipe.runs.rundir import RunDir
from sparsepipe.utils.files import expanded, markdown_table, writing


def superfluous(directory: RunDir, keep: KeptCheckpoints) -> list[Path]:
    """The checkpoints of a run that ``trainer.checkpoints=keep`` does not keep.

    ``best`` keeps the last checkpoint if there is no best one, as without a validation; ``last``
    keeps the best one if there is no last one.
    """
    there = sorted(directory.checkpoints.glob("*.ckpt"))
    if keep == "both":
        return []
    order = {
        "best": (directory.best, directory.last),
        "last": (directory.last, directory.best),
        "none": (),
    }[keep]
    kept = next((path for path in order if path in there), None)
    return [path for path in there if path != kept]


def size_bytes(paths: Iterable[Path]) -> int:
    """Total bytes of the files; a file with several hard links counts once, a missing one as 0."""
    found: dict[tuple[int, int], int] = {}
    for path in paths:
        with suppress(OSError):
            state = path.lstat()
            found[state.st_dev, state.st_ino] = state.st_size
    return sum(found.values())


def size_text(size: int) -> str:
    """A size in bytes as text, such as ``0.4 MB`` or ``12.3 GB``."""
    return f"{size / 1e9:,.1f} GB" if size >= 1e9 else f"{size / 1e6:,.1f} MB"


def keep_checkpoints(directory: RunDir, keep: KeptCheckpoints) -> str:
    """Removes the checkpoints that a finished run does not keep.

    Returns:
        A line with the size of the run's directory and of the checkpoints that remain.
    """
    with writing(directory.checkpoints):
        for path in superfluous(directory, keep):
            path.unlink(missing_ok=True)
    files = [path for path in directory.path.rglob("*") if path.is_file()]
    kept = sorted(directory.checkpoints.glob("*.ckpt"))
    whole = f"on disk: {size_text(size_bytes(files))}"
    if not kept:
        return f"{whole}, without checkpoints (trainer.checkpoints={keep})"
    names = ", ".join(path.name for path in kept)
    return (
        f"{whole}, of which {size_text(size_bytes(kept))} are {names} (trainer.checkpoints={keep})"
    )


def clean(
    directories: Sequence[Traversable],
    *,
    width: int,
    where: str,
    experiment: str | None = None,
    keep: KeptCheckpoints = "none",
    ask: bool = True,
) -> str:
    """Lists checkpoints of finished runs, and removes them after asking.

    Args:
        directories: directories of configurations, which tasks that only print get; not used.
        width: width of the terminal; not used, since paths are not cut.
        where: the directory in and below which runs are searched for.
        experiment: name of the experiment whose runs are listed; None: all.
        keep: which checkpoints of each run to keep.
        ask: whether to ask before anything is removed.

    Returns:
        A line about what was removed, or why nothing was.
    """
    del directories, width
    place = expanded(where)
    if not place.is_dir():
        raise NoRunsError(
            f"directory {place} not found",
            remedy="set paths.outputs or task.where to the directory of the runs",
        )
    runs = [RunDir(path.absolute()) for path in run_directories(place)]
    experiments = sorted({run.path.parent.name for run in runs})
    if experiment is not None and experiment not in experiments:
        raise NoRunsError(
            f"{place} has no runs of the experiment {experiment!r}",
            remedy="set task.where to the directory of its runs; known here: "
            f"{', '.join(experiments) or 'none'}",
        )
    runs = [run for run in runs if experiment in (None, run.path.parent.name)]
    inside = [run for run in runs if run.checkpoints.resolve().is_relative_to(place.resolve())]
    others = ""
    if count := len(runs) - len(inside):
        others = (
            f"\n\nleft alone: checkpoints of runs that are outside {place}, behind links: {count}"
        )
    runs = inside
    found = {run: files for run in runs if run.done.exists() and (files := superfluous(run, keep))}
    unfinished = [[*run.checkpoints.glob("*.ckpt")] for run in runs if not run.done.exists()]
    if count := sum(map(bool, unfinished)):
        size = size_text(size_bytes(path for files in unfinished for path in files))
        several = f"{count} unfinished runs keep" if count > 1 else "1 unfinished run keeps"
        others += f"\n\n{several} {size} of checkpoints, from which the same commands continue"
    if not found:
        return f"no finished run in {place} has a checkpoint to remove{others}"
    rows, total = [], 0
    for run, files in found.items():
        kept = [path for path in run.checkpoints.glob("*.ckpt") if path not in files]
        freed = size_bytes([*files, *kept]) - size_bytes(kept)
        names = ", ".join(path.name for path in files)
        rows.append([os.path.relpath(run.path), names, f"{freed / 1e6:,.1f}"])
        total += freed
    rows.append(["together", "", f"{total / 1e6:,.1f}"])
    sys.stdout.write(f"{markdown_table(['finished run', 'checkpoints', 'MB'], rows)}{others}\n\n")
    sys.stdout.flush()
    if ask and not sys.stdin.isatty():
        raise ConfigError(
            "nothing is removed, since without a terminal nobody can be asked",
            remedy="set task.ask=false to remove the listed checkpoints without asking",
        )
    answer = "n" if ask else "y"
    with suppress(EOFError):
        if ask:
            answer = input(f"remove these checkpoints ({size_text(total)})? [y/N] ")
    if answer.strip().lower() not in ("y", "yes"):
        return "nothing is removed"
    counts = Counter(_removed(run, files) for run, files in found.items())
    done = f"removed checkpoints of {counts[True]} run{'' if counts[True] == 1 else 's'}"
    left = f"; skipped {counts[False]}, used by other processes" if counts[False] else ""
    return done + left


clean.prints_only = True  # type: ignore[attr-defined]


def _removed(run: RunDir, files: Sequence[Path]) -> bool:
    try:
        with locked(run):
            if not run.done.exists():
                return False
            with writing(run.checkpoints):
                for path in files:
                    path.unlink(missing_ok=True)
            return True
    except ConfigError:
        return False
