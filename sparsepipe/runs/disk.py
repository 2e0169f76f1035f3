"""What runs take on disk: the checkpoints that a finished run keeps, and removing those of many."""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from importlib.resources.abc import Traversable
from pathlib import Path

from sparsepipe.config.schema import KeptCheckpoints
from sparsepipe.errors import ConfigError, NoRunsError
from sparsepipe.runs.lock import locked
from sparsepipe.runs.run_tree import run_directories
from sparsepipe.runs.rundir import RunDir
from sparsepipe.utils.files import expanded, writing
from sparsepipe.utils.tables import markdown_table


def superfluous(directory: RunDir, keep: KeptCheckpoints) -> list[Path]:
    """The checkpoints of a run that a setting does not keep.

    ``best`` keeps the last one where none is the best, as nothing was validated; ``last`` the best
    one without a last one.
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
    """Bytes of files; one with several names counts once, and one that has just gone not at all."""
    found: dict[tuple[int, int], int] = {}
    for path in paths:
        with suppress(OSError):
            state = path.lstat()
            found[state.st_dev, state.st_ino] = state.st_size
    return sum(found.values())


def size_text(size: int) -> str:
    """Text such as ``0.4 MB`` and ``12.3 GB``."""
    return f"{size / 1e9:,.1f} GB" if size >= 1e9 else f"{size / 1e6:,.1f} MB"


def keep_checkpoints(directory: RunDir, keep: KeptCheckpoints) -> str:
    """Removes the checkpoints of a finished run that it is not to keep.

    Returns:
        What the run takes on disk now, as a line.

    Raises:
        OutputError: a file cannot be removed.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Removable:
    """Checkpoints of a finished run that are to be removed, and what that frees."""

    run: RunDir
    files: tuple[Path, ...]
    freed_bytes: int


def removable(runs: Iterable[RunDir], *, keep: KeptCheckpoints) -> list[Removable]:
    """Checkpoints of those runs that are finished; ``keep`` is as ``trainer.checkpoints``."""
    found = []
    for run in runs:
        files = superfluous(run, keep) if run.done.exists() else []
        if files:
            others = {path for path in run.checkpoints.glob("*.ckpt") if path not in files}
            freed = size_bytes([*files, *others]) - size_bytes(others)
            found.append(Removable(run=run, files=tuple(files), freed_bytes=freed))
    return found


def _runs(where: Path, experiment: str | None) -> list[RunDir]:
    runs = [RunDir(path.absolute()) for path in run_directories(where)]
    if experiment is None:
        return runs
    names = sorted({run.path.parent.name for run in runs})
    chosen = [run for run in runs if run.path.parent.name == experiment]
    if not chosen:
        raise NoRunsError(
            f"{where} has no runs of the experiment {experiment!r}",
            remedy=f"name one of {', '.join(names) or 'its experiments'}",
        )
    return chosen


def unfinished(runs: Iterable[RunDir]) -> str:
    """What unfinished runs keep, as a line below a list of checkpoints; empty if they keep none."""
    files = [[*run.checkpoints.glob("*.ckpt")] for run in runs if not run.done.exists()]
    count = sum(map(bool, files))
    if not count:
        return ""
    size = size_text(size_bytes([path for each in files for path in each]))
    several = f"{count} unfinished runs keep" if count > 1 else "1 unfinished run keeps"
    return f"\n\n{several} {size} of checkpoints, from which the same commands go on"


def clean(
    directories: Sequence[Traversable],
    *,
    width: int,
    where: str,
    experiment: str | None = None,
    keep: KeptCheckpoints = "none",
    ask: bool = True,
) -> str:
    """Lists checkpoints of finished runs, and removes them after a question.

    Args:
        directories: of configurations; not used.
        width: of the terminal; not used, as paths are not cut.
        where: a directory of runs.
        experiment: only its runs.
        keep: ``best`` or ``last`` to keep that checkpoint of each run.
        ask: before anything is removed.

    Returns:
        What was done.

    Raises:
        ConfigError: nobody can be asked; nothing is removed.
        NoRunsError: no such directory exists, or no run of that experiment.
        OutputError: a file cannot be removed.
    """
    del directories, width
    place = expanded(where)
    if not place.is_dir():
        raise NoRunsError(
            f"there is no directory of runs {place}", remedy="name it as paths.outputs"
        )
    runs = _runs(place, experiment)
    found, others = removable(runs, keep=keep), unfinished(runs)
    if not found:
        return f"no finished run in {place} has a checkpoint to remove{others}"
    sys.stdout.write(f"{_listing(found)}{others}\n\n")
    sys.stdout.flush()
    total = size_text(sum(each.freed_bytes for each in found))
    if ask and not _agrees(f"remove these checkpoints ({total})? [y/N] "):
        return "nothing is removed"
    counts = Counter(_remove(each) for each in found)
    done = f"removed checkpoints of {counts[True]} run{'' if counts[True] == 1 else 's'}"
    if not counts[False]:
        return done
    left = "1 is left, which another process works on"
    if counts[False] > 1:
        left = f"{counts[False]} are left, which other processes work on"
    return f"{done}; {left}"


clean.prints_only = True  # type: ignore[attr-defined]


def _listing(found: Sequence[Removable]) -> str:
    rows = [
        [
            os.path.relpath(each.run.path),
            ", ".join(path.name for path in each.files),
            f"{each.freed_bytes / 1e6:,.1f}",
        ]
        for each in found
    ]
    total = sum(each.freed_bytes for each in found)
    return markdown_table(
        ["finished run", "checkpoints", "MB"], [*rows, ["together", "", f"{total / 1e6:,.1f}"]]
    )


def _agrees(question: str) -> bool:
    if not sys.stdin.isatty():
        raise ConfigError(
            "nothing is removed: there is no terminal to ask in",
            remedy="task.ask=false removes what is listed without a question",
        )
    try:
        return input(question).strip().lower() in ("y", "yes")
    except EOFError:
        return False


def _remove(each: Removable) -> bool:
    with ExitStack() as held:
        try:
            held.enter_context(locked(each.run))
        except ConfigError:
            return False
        if not each.run.done.exists():
            return False
        with writing(each.run.checkpoints):
            for path in each.files:
                path.unlink(missing_ok=True)
        return True
