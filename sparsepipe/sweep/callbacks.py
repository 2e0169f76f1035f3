"""Hydra callbacks of a sweep: its directory at the start; failures, table and ledger at the end."""

from __future__ import annotations

import logging
import os
import re
import shutil
import sys
import traceback
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from itertools import islice
from pathlib import Path
from typing import Any

import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.experimental.callback import Callback
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from sparsepipe.config.sweep_environment import announce, given_overrides, sweep_directory
from sparsepipe.errors import ConfigError, DataError, NoRunsError, SparsePipeError
from sparsepipe.runs.best import VALIDATION, Mode, in_order, mode_of
from sparsepipe.runs.ledger import CSV, gather
from sparsepipe.sweep.record import JobRecord, own_texts, records_of, tail
from sparsepipe.sweep.table import Objective, SweepJob, best_line, sweep_markdown, sweep_rows
from sparsepipe.utils import reading
from sparsepipe.utils.files import (
    LockHeldError,
    expanded,
    file_lock,
    read_mapping,
    write_csv,
    write_text_atomic,
    writing,
)

log = logging.getLogger(__name__)
_TAIL_LINES = 12
_BEST = "optimization_results.yaml"
"""Optuna's sweeper writes it into the sweep's directory."""
_SEARCH_AGAIN = "give the sweep's command again: finished runs are skipped"
_LOCK = ".sparsepipe-sweep.lock"
_JOBS, _REPORT = "jobs", "report"
_FILES = ("table.csv", "table.md", _BEST)
_ESCAPED = re.compile(r"\\([\\()\[\]{}:=, \t])")
"""A sign before which Hydra's grammar has a backslash."""
_exit_codes: list[int] = []
_running: list[DictConfig] = []
"""Sweeps of this process that have not ended."""
_lock = ExitStack()
"""Holds the lock of this process's sweep, which ends with the process at the latest."""


class SweepEnd(Callback):
    """Logs at a sweep's end which jobs failed, with the last lines of their logs."""

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Claims the sweep's directory, and passes its name to the jobs."""
        try:
            claim(sweep_directory(config))
        except SparsePipeError as error:
            log.error("error: %s", error)
            sys.exit(error.exit_code)  # Hydra passes nothing else on from a callback
        announce(config)
        _running.append(config)
        objective, mode = _objective(config)
        if None not in (objective, mode) and mode != mode_of(str(objective)):
            # As Optuna, which minimizes by default, does of accuracies.
            found, other = ("smallest", "maximize") if mode == "min" else ("largest", "minimize")
            log.warning(
                "this searches for the %s %s: hydra.sweeper.direction=%s searches for the other "
                "end",
                *(found, objective, other),
            )

    def on_multirun_end(self, config: DictConfig, **kwargs: Any) -> None:
        _running.clear()
        records = records_of(sweep_directory(config))
        note_exit_code(records)  # of jobs that another launcher than ours has run
        if any(record.status != "finished" for record in records):
            texts = own_texts([each.overrides for each in records], given=given_overrides(config))
            total = expected_jobs(config, begun=len(records))
            log.warning("%s", "\n".join(failures(records, texts, total=total)))
        _lock.close()


class SweepTable(Callback):
    """Logs a table of all jobs and the best of them, and writes ``table.md`` and ``table.csv``.

    The files have all columns; what is logged fits the terminal.
    """

    def on_multirun_end(self, config: DictConfig, **kwargs: Any) -> None:
        directory = sweep_directory(config)
        records = records_of(directory)
        if not any(record.run for record in records):
            return
        jobs = [
            SweepJob(
                overrides={
                    name.lstrip("+"): _ESCAPED.sub(r"\1", value)
                    for name, _, value in (word.partition("=") for word in record.overrides)
                },
                run=None if record.run is None else near(Path(record.run)),
                result={} if record.run is None else _result_of(Path(record.run)),
                status=record.status,
            )
            for record in records
        ]
        key, mode = _objective(config)
        if key is None and any(job.result.get(VALIDATION) is not None for job in jobs):
            key = VALIDATION
        objective = None if key is None else Objective(key=key, mode=mode)
        rows = sweep_rows(jobs, objective)
        texts = own_texts([each.overrides for each in records], given=given_overrides(config))
        whole = sweep_markdown(rows, objective)
        shown = sweep_markdown(
            rows, objective, width=shutil.get_terminal_size((0, 0)).columns or None
        )
        best = best_line(jobs, texts, objective)
        count = max(len(rows), expected_jobs(config, begun=len(rows)))
        unfinished = _counts([row["status"] for row in rows], total=count)
        log.info(
            "%s%s (%s%s)\n\n%s\n%s",
            "1 job" if count == 1 else f"{count} jobs",
            f", {unfinished}" if unfinished else "",
            near(directory / "table.md"),
            "" if shown == whole else ", which has more columns",
            shown,
            f"\n{best}\n" if best else "",
        )
        write_text_atomic(directory / "table.md", f"{whole}\n" + (f"\n{best}\n" if best else ""))
        write_csv(directory / "table.csv", rows)


class SweepLedger(Callback):
    """Writes ``ledger.parquet`` and ``ledger.csv`` beside the runs of the experiment.

    They hold all its finished runs, those of earlier sweeps and of single commands too. Where
    jobs are of several experiments (``name=a,b``) each has its own.
    """

    def on_multirun_end(self, config: DictConfig, **kwargs: Any) -> None:
        own = (expanded(str(config.paths.outputs)) / str(config.name)).absolute()
        runs = (Path(job.run) for job in records_of(sweep_directory(config)) if job.run)
        for experiment in sorted({own, *(run.parent for run in runs)}):
            try:
                frame = gather(experiment) if any(experiment.glob("[!.]*/DONE.json")) else None
            except NoRunsError:
                continue  # what is finished are reports
            except DataError as error:
                log.warning("no ledger of %s: %s", near(experiment), error)
                continue
            if frame is not None:
                count = "1 finished run" if len(frame) == 1 else f"{len(frame)} finished runs"
                log.info("ledger of %s: %s", count, near(experiment / CSV))


class SweepSearch(Callback):
    """Writes a search's best parameters (``hydra/sweeper=optuna``) as the command line takes them,
    and which run has them.

    The sweeper names them as Hydra got them, with the ``++`` that lets Hydra take keys which the
    composed files leave out (:func:`sparsepipe.config.compose.admit`).
    """

    def on_multirun_end(self, config: DictConfig, **kwargs: Any) -> None:
        """Rewrites the sweeper's file, if there is one."""
        directory = sweep_directory(config)
        file = directory / _BEST
        if not file.is_file():
            return
        with reading.explained(file, "result of a search", error=DataError, remedy=_SEARCH_AGAIN):
            found = _without_plus(reading.parse_yaml(reading.read_text(file)))
        value = found.get("best_value") if isinstance(found, dict) else None  # of one objective
        same = [job for job in records_of(directory) if job.run and value in (job.value,)]
        results = {place: _result_of(Path(job.run or "")) for place, job in enumerate(same)}
        note = ""
        for place in in_order(results)[:1] if value is not None else ():
            job = same[place]
            found["best_run"] = near(Path(job.run or ""))
            note = f", run {found['best_run']}"
            given = dict(word.lstrip("+").split("=", 1) for word in job.overrides if "=" in word)
            params = found.get("best_params") or {}
            changed = {n for n, value in params.items() if given.get(n, str(value)) != str(value)}
            parse = OverridesParser.create().parse_override
            params.update({name: parse(f"{name}={given[name]}").value() for name in changed})
        write_text_atomic(file, yaml.safe_dump(found, sort_keys=False))
        log.info("the best of the search: %s%s", near(file), note)


def claim(sweep: Path) -> None:
    """Makes a directory that of this process's sweep, and removes an earlier sweep's records.

    Sweepers that search start jobs several times in one sweep: this is for its beginning alone.
    """
    _lock.close()
    is_of_a_sweep = (sweep / _LOCK).exists()
    for path in (sweep / name for name in (_JOBS, _REPORT, *_FILES)):
        if path.exists() and not is_of_a_sweep:
            raise ConfigError(
                f"{path} is in the way: a sweep would write over it, and no sweep has written it",
                remedy="give this sweep a directory of its own, as hydra.sweep.dir="
                f"{sweep / 'sweep'}, or move that",
            )
    with writing(sweep):
        try:
            _lock.enter_context(file_lock(sweep / _LOCK))
        except LockHeldError:
            raise ConfigError(
                f"another sweep runs in {sweep}",
                remedy="wait for it or end it, or give this one a hydra.sweep.dir of its own",
            ) from None
        for path in (sweep / _JOBS).glob("*"):
            if path.name.isdecimal():
                shutil.rmtree(path)
        for name in _FILES:
            (sweep / name).unlink(missing_ok=True)


def end_early(error: Exception) -> bool:
    """Ends a sweep whose sweeper has raised because of its jobs, as Hydra ends others.

    Sweepers that search raise where no job has a value, some also where the last one has none, and
    Hydra does not call its callbacks then.

    Returns:
        Whether the sweeper is one that searches and jobs have failed, so that the error has been
        reported. Otherwise it is the caller's: Hydra's own sweeper does not use values.
    """
    searches = False
    for config in list(_running):
        for node in reversed(list(config.hydra.callbacks.values())):
            try:
                instantiate(node).on_multirun_end(config=config)
            except Exception as other:  # the next callback runs all the same
                log.warning("%s: %s", node._target_, other)
        searches = not str(config.hydra.sweeper._target_).endswith(".BasicSweeper")
        if exit_code_of_sweep() and searches:
            log.warning("%s", "".join(traceback.format_exception(error)).strip())
            log.error(
                "the sweep ends here: its sweeper does not end without their values (%s: %s)"
                "\n  remedy: mend the jobs and give the command again, which skips finished runs",
                type(error).__name__,
                error,
            )
    return searches and exit_code_of_sweep() != 0


def note_exit_code(records: Sequence[JobRecord]) -> None:
    """Records for the command the exit code of the first of these jobs that failed, if any."""
    failed = (each.exit_code or 1 for each in records if each.status != "finished")
    _exit_codes.extend(islice(failed, 1))


def exit_code_of_sweep() -> int:
    """Exit code of the sweep that has ended in this process; 0 where none has."""
    return next(iter(_exit_codes), 0)


def expected_jobs(config: DictConfig, *, begun: int) -> int:
    """How many jobs a sweep is to have: as many as a search has trials, else those that have begun.

    Other sweepers than Optuna's give all jobs to the launcher at once.
    """
    trials = OmegaConf.select(config, "hydra.sweeper.n_trials")
    grid = str(OmegaConf.select(config, "hydra.sweeper.sampler._target_")).endswith("GridSampler")
    return max(begun, trials) if isinstance(trials, int) and not grid else begun


def failures(records: Sequence[JobRecord], texts: Sequence[str], *, total: int) -> Iterator[str]:
    """A message about jobs that have not finished, line by line.

    Args:
        records: of the jobs that have one.
        texts: labels of these.
        total: jobs of the sweep; those without a record have not been started.
    """
    yield f"{_counts([each.status for each in records], total=total, failed='of {} jobs failed')}:"
    for record, text in zip(records, texts, strict=True):
        if record.status not in ("finished", "not started"):
            yield f"\njob {record.number + 1} ({text}): {record.error or record.status}"
        if record.status == "failed" and record.log is not None:
            yield f"  the end of {near(Path(record.log))}:"
            yield from (f"  | {line}" for line in tail(Path(record.log), lines=_TAIL_LINES))


def _counts(statuses: Sequence[str], *, total: int, failed: str = "") -> str:
    """How many jobs failed, which is always said with ``failed``, were stopped or not started."""
    counts = Counter(statuses)
    counts["not started"] += total - len(statuses)
    parts = [f"{counts[each]} {each}" for each in ("stopped", "not started") if counts[each]]
    if failed or counts["failed"]:
        parts.insert(0, f"{counts['failed']} {(failed or 'of them failed').format(total)}")
    return ", ".join(parts)


def near(path: Path) -> str:
    """The path relative to the working directory where it is below that."""
    absolute = Path(os.path.abspath(path))
    here = Path.cwd()
    return str(absolute.relative_to(here) if absolute.is_relative_to(here) else absolute)


def _objective(config: DictConfig) -> tuple[str | None, Mode | None]:
    """The figure that a sweep is to have the best value of, and of which values a search does."""
    direction = OmegaConf.select(config, "hydra.sweeper.direction")
    modes: dict[str, Mode] = {"maximize": "max", "minimize": "min"}
    # The command line may have made it a member of Optuna's.
    mode = modes.get(str(getattr(direction, "name", direction)))
    try:
        named = OmegaConf.select(config, "objective")
    except OmegaConfBaseException:
        named = None  # jobs are refused for it
    return (None if named is None else str(named)), mode


def _result_of(run: Path) -> dict[str, Any]:
    try:
        return read_mapping(run / "result.json")
    except DataError as error:  # the other jobs have theirs
        log.warning("%s", error.message)
        return {}


def _without_plus(found: Any) -> Any:
    """The same with plain names of keys: ``++data.batch_size`` becomes ``data.batch_size``."""
    if isinstance(found, dict):
        return {str(name).lstrip("+"): _without_plus(value) for name, value in found.items()}
    return [_without_plus(each) for each in found] if isinstance(found, list) else found
