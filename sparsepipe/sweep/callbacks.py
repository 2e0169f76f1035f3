"""Hydra callbacks that lock a sweep's directory, log failed jobs, and write table and ledger."""

from __future__ import annotations

import logging
import os
import re
import shutil
import sys
import traceback
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
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
"""File that Optuna's sweeper writes into the sweep's directory."""
_SEARCH_AGAIN = "give the sweep's command again: finished runs are skipped"
_LOCK = ".sparsepipe-sweep.lock"
_JOBS, _REPORT = "jobs", "report"
_FILES = ("table.csv", "table.md", _BEST)
_ESCAPED = re.compile(r"\\([\\()\[\]{}:=, \t])")
"""A character that Hydra's grammar escapes with a backslash."""
_exit_codes: list[int] = []
_running: list[DictConfig] = []
"""Sweeps of this process that have not ended."""
_lock = ExitStack()
"""Holds the lock of this process's sweep, at the latest until the process ends."""


class SweepEnd(Callback):
    """Logs at a sweep's end which jobs failed, with the last lines of their logs."""

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Locks the sweep's directory or exits, passes it on, warns of an odd search direction."""
        try:
            claim(sweep_directory(config))
        except SparsePipeError as error:
            log.error("error: %s", error)
            sys.exit(error.exit_code)  # Hydra only warns of other exceptions
        announce(config)
        _running.append(config)
        if _is_grid(config):
            _let_grids_end()
        objective, mode = _objective(config)
        if None not in (objective, mode) and mode != mode_of(str(objective)):
            # Optuna minimizes by default, even accuracies.
            found, other = ("smallest", "maximize") if mode == "min" else ("largest", "minimize")
            log.warning(
                "this sweep searches for the %s %s; set hydra.sweeper.direction=%s to search for "
                "the opposite",
                *(found, objective, other),
            )

    def on_multirun_end(self, config: DictConfig, **kwargs: Any) -> None:
        _running.clear()
        records = records_of(sweep_directory(config))
        note_exit_code(records)  # jobs may have been run by another launcher
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
    """Writes ``ledger.parquet`` and ``ledger.csv`` into the directory of the experiment's runs.

    They contain all finished runs of the experiment, also those of earlier sweeps and of single
    commands. Where jobs belong to several experiments (``name=a,b``), each gets a ledger.
    """

    def on_multirun_end(self, config: DictConfig, **kwargs: Any) -> None:
        own = (expanded(str(config.paths.outputs)) / str(config.name)).absolute()
        runs = (Path(job.run) for job in records_of(sweep_directory(config)) if job.run)
        for experiment in sorted({own, *(run.parent for run in runs)}):
            try:
                frame = gather(experiment) if any(experiment.glob("[!.]*/DONE.json")) else None
            except NoRunsError:
                continue  # no finished run except reports
            except DataError as error:
                log.warning("no ledger of %s: %s", near(experiment), error)
                continue
            if frame is not None:
                count = "1 finished run" if len(frame) == 1 else f"{len(frame)} finished runs"
                log.info("ledger of %s: %s", count, near(experiment / CSV))


class SweepSearch(Callback):
    """Rewrites the best parameters of a search (``hydra/sweeper=optuna``) as the command line takes
    them, and adds the directory of the best run.

    The sweeper writes their keys with the ``++`` of :func:`sparsepipe.config.compose.admit`.
    """

    def on_multirun_end(self, config: DictConfig, **kwargs: Any) -> None:
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
        log.info("best parameters of the search: %s%s", near(file), note)


def claim(sweep: Path) -> None:
    """Locks the directory ``sweep`` for this process, and removes an earlier sweep's files in it.

    Must be called once, when the sweep begins, not whenever a search starts jobs.
    """
    _lock.close()
    is_of_a_sweep = (sweep / _LOCK).exists()
    for path in (sweep / name for name in (_JOBS, _REPORT, *_FILES)):
        if path.exists() and not is_of_a_sweep:
            raise ConfigError(
                f"{path} is in the way: a sweep would overwrite it, but no sweep has written it",
                remedy="give this sweep a directory of its own, such as hydra.sweep.dir="
                f"{sweep / 'sweep'}, or move {path.name} elsewhere",
            )
    with writing(sweep):
        try:
            _lock.enter_context(file_lock(sweep / _LOCK))
        except LockHeldError:
            raise ConfigError(
                f"another sweep runs in {sweep}",
                remedy="wait until it ends, or end it, or set another hydra.sweep.dir for this one",
            ) from None
        for path in (sweep / _JOBS).glob("*"):
            if path.name.isdecimal():
                shutil.rmtree(path)
        for name in _FILES:
            (sweep / name).unlink(missing_ok=True)


def end_early(error: Exception) -> bool:
    """Calls the final callbacks of a sweep, which Hydra omits if the sweeper raises an error.

    Sweepers that search raise an error if no job has a value. Returns whether ``error`` has been
    logged here, as it is if jobs of a search have failed; if not, the calling code must report it.
    """
    searches = False
    for config in list(_running):
        for node in reversed(list(config.hydra.callbacks.values())):
            try:
                instantiate(node).on_multirun_end(config=config)
            except Exception as other:  # the next callback still runs
                log.warning("%s: %s", node._target_, other)
        searches = not str(config.hydra.sweeper._target_).endswith(".BasicSweeper")
        if exit_code_of_sweep() and searches:
            log.warning("%s", "".join(traceback.format_exception(error)).strip())
            log.error(
                "the sweep ends here: its sweeper needs the values of the failed jobs (%s: %s)"
                "\n  remedy: correct the jobs and give the command again: it skips finished runs",
                type(error).__name__,
                error,
            )
    return searches and exit_code_of_sweep() != 0


def note_exit_code(records: Sequence[JobRecord]) -> None:
    """Keeps the exit code of the first job not finished, if any, for :func:`exit_code_of_sweep`."""
    failed = (each.exit_code or 1 for each in records if each.status != "finished")
    _exit_codes.extend(islice(failed, 1))


def exit_code_of_sweep() -> int:
    """Exit code of this process's sweep: 0, or that of the first job that has not finished."""
    return next(iter(_exit_codes), 0)


def expected_jobs(config: DictConfig, *, begun: int) -> int:
    """Number of jobs that a sweep will have: a search's trials, else the number of jobs ``begun``.

    Sweepers other than Optuna's give all jobs to the launcher at once.
    """
    trials = OmegaConf.select(config, "hydra.sweeper.n_trials")
    return max(begun, trials) if isinstance(trials, int) and not _is_grid(config) else begun


def _is_grid(config: DictConfig) -> bool:
    sampler = OmegaConf.select(config, "hydra.sweeper.sampler._target_")
    return str(sampler).endswith("GridSampler")


def _let_grids_end() -> None:
    """Lets a grid end whose last trial failed: outside of its loop, Optuna's stop is an error."""
    from optuna.samplers import GridSampler  # of an extra

    after_trial = GridSampler.after_trial

    def after(*args: Any) -> None:
        with suppress(RuntimeError):
            after_trial(*args)

    GridSampler.after_trial = after  # type: ignore[method-assign, assignment]


def failures(records: Sequence[JobRecord], texts: Sequence[str], *, total: int) -> Iterator[str]:
    """Yields the lines of a message about unfinished jobs. ``texts`` are the labels of the
    ``records``; of the ``total`` number of jobs, those without a record have not been started.
    """
    yield f"{_counts([each.status for each in records], total=total, failed='of {} jobs failed')}:"
    for record, text in zip(records, texts, strict=True):
        if record.status not in ("finished", "not started"):
            yield f"\njob {record.number + 1} ({text}): {record.error or record.status}"
        if record.status == "failed" and record.log is not None:
            yield f"  the end of {near(Path(record.log))}:"
            yield from (f"  | {line}" for line in tail(Path(record.log), lines=_TAIL_LINES))


def _counts(statuses: Sequence[str], *, total: int, failed: str = "") -> str:
    """Numbers of jobs by status; ``failed``: words after that of failed ones, even if it is 0."""
    counts = Counter(statuses)
    counts["not started"] += total - len(statuses)
    parts = [f"{counts[each]} {each}" for each in ("stopped", "not started") if counts[each]]
    if failed or counts["failed"]:
        parts.insert(0, f"{counts['failed']} {(failed or 'of them failed').format(total)}")
    return ", ".join(parts)


def near(path: Path) -> str:
    """The path relative to the working directory if it lies below that, else absolute."""
    absolute = Path(os.path.abspath(path))
    here = Path.cwd()
    return str(absolute.relative_to(here) if absolute.is_relative_to(here) else absolute)


def _objective(config: DictConfig) -> tuple[str | None, Mode | None]:
    """Key of the objective, and whether a search minimizes or maximizes it; None if not set."""
    direction = OmegaConf.select(config, "hydra.sweeper.direction")
    modes: dict[str, Mode] = {"maximize": "max", "minimize": "min"}
    # The command line may have made it a member of Optuna's enum.
    mode = modes.get(str(getattr(direction, "name", direction)))
    try:
        named = OmegaConf.select(config, "objective")
    except OmegaConfBaseException:
        named = None  # the jobs are refused for it
    return (None if named is None else str(named)), mode


def _result_of(run: Path) -> dict[str, Any]:
    try:
        return read_mapping(run / "result.json")
    except DataError as error:  # the other jobs have their results
        log.warning("%s", error.message)
        return {}


def _without_plus(found: Any) -> Any:
    """Removes ``++`` from keys: ``++data.batch_size`` becomes ``data.batch_size``."""
    if isinstance(found, dict):
        return {str(name).lstrip("+"): _without_plus(value) for name, value in found.items()}
    return [_without_plus(each) for each in found] if isinstance(found, list) else found
