"""Hydra callbacks of a sweep: its directory at the start; failures, table and ledger at the end."""

from __future__ import annotations

import importlib
import logging
import os
import re
import shutil
import sys
import traceback
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
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
    write_text_atomic,
    writing,
)
from sparsepipe.utils.tables import write_csv

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
        if "optuna" in str(OmegaConf.select(config, "hydra.sweeper._target_")):
            with suppress(ImportError):  # Hydra says that it is not installed
                importlib.import_module("optuna")
                # Its own handler colours messages in files as well.
                ours = logging.getLogger("sparsepipe").handlers
                logging.getLogger("optuna").handlers[:] = ours
        if (doubt := doubtful_direction(config)) is not None:
            log.warning("%s", doubt)

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
        unfinished = _counts(Counter(row["status"] for row in rows), total=count)
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
        run = None
        if (job := _job_of_best(found, records_of(directory))) is not None and job.run:
            run = found["best_run"] = near(Path(job.run))
            given = dict(word.lstrip("+").split("=", 1) for word in job.overrides if "=" in word)
            params = found.get("best_params") or {}
            changed = {n for n, value in params.items() if given.get(n, str(value)) != str(value)}
            parse = OverridesParser.create().parse_override
            params.update({name: parse(f"{name}={given[name]}").value() for name in changed})
        write_text_atomic(file, yaml.safe_dump(found, sort_keys=False))
        log.info(
            "the best of the search: %s%s",
            near(file),
            "" if run is None else f", run {run}",
        )


def claim(sweep: Path) -> None:
    """Makes a directory that of this process's sweep, and removes an earlier sweep's records.

    Sweepers that search start jobs several times in one sweep: this is for its beginning alone.

    Raises:
        ConfigError: another sweep runs in it, or it has files that no sweep has written but that
            this one would write over.
        OutputError: it cannot be written.
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
    sweeps = list(_running)
    for config in sweeps:
        for node in reversed(list(config.hydra.callbacks.values())):
            try:
                instantiate(node).on_multirun_end(config=config)
            except Exception as other:  # the next callback runs all the same
                log.warning("%s: %s", node._target_, other)
        if exit_code_of_sweep() and _searches(config):
            log.warning("%s", "".join(traceback.format_exception(error)).strip())
            log.error(
                "the sweep ends here: its sweeper does not end without their values (%s: %s)"
                "\n  remedy: mend the jobs and give the command again, which skips finished runs",
                type(error).__name__,
                error,
            )
    return any(map(_searches, sweeps)) and exit_code_of_sweep() != 0


def note_exit_code(records: Sequence[JobRecord]) -> None:
    """Records the exit code of these jobs for the command."""
    _exit_codes.append(exit_code(records))


def exit_code_of_sweep() -> int:
    """Exit code of the sweep that has ended in this process; 0 where none has."""
    return next((code for code in _exit_codes if code), 0)


def exit_code(records: Sequence[JobRecord]) -> int:
    """Exit code of the first job that failed; 0 where none has."""
    return next((record.exit_code or 1 for record in records if record.status != "finished"), 0)


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
        texts: what each of these is called.
        total: jobs of the sweep; those without a record have not been started.
    """
    counts = Counter[str](record.status for record in records)
    yield f"{_counts(counts, total=total, failed=f'of {total} jobs failed')}:"
    for record, text in zip(records, texts, strict=True):
        if record.status not in ("finished", "not started"):
            yield f"\njob {record.number + 1} ({text}): {record.error or record.status}"
        if record.status == "failed" and record.log is not None:
            yield f"  the end of {near(Path(record.log))}:"
            yield from (f"  | {line}" for line in tail(Path(record.log), lines=_TAIL_LINES))


def _counts(counts: Mapping[str, int], *, total: int, failed: str | None = None) -> str:
    """How many jobs failed, were stopped and were not started; those that failed always with
    ``failed``.
    """
    without_record = total - sum(counts.values())
    not_started = counts.get("not started", 0) + without_record
    parts = [f"{counts.get('failed', 0)} {failed or 'of them failed'}"]
    if failed is None and not counts.get("failed"):
        parts = []
    if counts.get("stopped"):
        parts.append(f"{counts['stopped']} stopped")
    if not_started:
        parts.append(f"{not_started} not started")
    return ", ".join(parts)


def near(path: Path) -> str:
    """The path relative to the working directory where it is below that."""
    absolute = Path(os.path.abspath(path))
    here = Path.cwd()
    return str(absolute.relative_to(here) if absolute.is_relative_to(here) else absolute)


def _searches(config: DictConfig) -> bool:
    return not str(config.hydra.sweeper._target_).endswith(".BasicSweeper")


def doubtful_direction(config: DictConfig) -> str | None:
    """A warning where a search looks for the worst values, as Optuna, which minimizes by default,
    does of accuracies; None elsewhere.
    """
    objective, mode = _objective(config)
    if objective is None or mode is None or mode == mode_of(objective):
        return None
    found, other = ("largest", "minimize") if mode == "max" else ("smallest", "maximize")
    return (
        f"this searches for the {found} {objective}: hydra.sweeper.direction={other} searches for "
        "the other end"
    )


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


def _job_of_best(found: Any, records: Sequence[JobRecord]) -> JobRecord | None:
    """The job whose run is the best of a search, by the rule of
    :func:`sparsepipe.runs.best.best_of`; None where none is, as where an earlier sweep has
    found the best value.
    """
    if not isinstance(found, dict) or "best_value" not in found:
        return None  # of several objectives
    same = [record for record in records if record.run and record.value == found["best_value"]]
    results = {place: _result_of(Path(job.run)) for place, job in enumerate(same) if job.run}
    return next((same[place] for place in in_order(results)), None)


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
