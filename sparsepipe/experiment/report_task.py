"""The task ``report``: ours beside what the paper prints, from the finished runs of experiments."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sparsepipe.cluster import Inventory
from sparsepipe.errors import ConfigError, DataError
from sparsepipe.experiment.check import suggest
from sparsepipe.experiment.outputs import expanded
from sparsepipe.experiment.result import write_result
from sparsepipe.experiment.run import Run
from sparsepipe.experiment.simulate import one_process
from sparsepipe.results import load_results
from sparsepipe.results.cells import rows_of
from sparsepipe.results.report.chapters import Chapter
from sparsepipe.results.report.exhibit import Row
from sparsepipe.results.report.exhibits import EXHIBITS
from sparsepipe.results.report.rows import plain_rows
from sparsepipe.results.report.writing import write_report

log = logging.getLogger(__name__)

ALL = "all"
"""The experiment of all."""
NONE = "default"
"""The name without an experiment."""
_DONE = "DONE.json"


def report(
    run: Run,
    *,
    exhibits: list[str] | None = None,
    where: str | None = None,
    scale: str | None = None,
    **of_the_experiment: Any,
) -> None:
    """Writes ``report.html``, ``report.md``, and a CSV and pictures for each exhibit.

    Args:
        run: configuration and directory.
        exhibits: tables and figures of the paper, by name; None: that of the experiment, or all
            of them for the experiment ``all``.
        where: a directory of runs or a ledger; None: ``paths.outputs``.
        scale: rows of this scale count alone; None: all, each scale apart.
        **of_the_experiment: what the experiment sets for its own task; of no use here.

    Raises:
        ConfigError: nothing of the paper has such a name.
        DataError: finished runs cannot be read, or a file cannot be written.
    """
    del of_the_experiment
    run.assert_one_rank()
    chosen = chosen_rows(run.config, exhibits=exhibits, where=where, scale=scale)
    chapters = write_chapters(run.directory.path, chosen)
    figures = [block.filled for chapter in chapters for block in chapter.blocks]
    counts = {
        "figures": sum(filled for filled, _ in figures),
        "figures_missing": sum(wanted - filled for filled, wanted in figures),
    }
    write_result(run, {"exhibits": list(chosen), **counts})


def write_chapters(directory: Path, chosen: Mapping[str, Sequence[Row]]) -> list[Chapter]:
    """Writes a report, and logs where it is and what it lacks.

    Args:
        directory: of its files.
        chosen: finished runs of each exhibit.

    Raises:
        DataError: a file cannot be written.
    """
    (title, *others) = [EXHIBITS[name].title for name in chosen]
    title = "SparsePipe: the paper's tables and figures" if others else title
    chapters = write_report(directory, title, [(EXHIBITS[name], chosen[name]) for name in chosen])
    for chapter in chapters:
        for block in chapter.blocks:
            filled, wanted = block.filled
            setting = f" ({block.title})" if block.title else ""
            log.info(
                "%s%s: %d of %d figures%s",
                chapter.exhibit.title,
                setting,
                filled,
                wanted,
                f"; to fill all: {block.sweep}" if filled < wanted and block.sweep else "",
            )
    log.info("page: %s", directory / "report.html")
    return chapters


def chosen_rows(
    config: Mapping[str, Any],
    *,
    exhibits: Sequence[str] | None = None,
    where: str | None = None,
    scale: str | None = None,
) -> dict[str, list[Row]]:
    """The finished runs of each exhibit of a report.

    Args:
        config: resolved and checked.
        exhibits: see :func:`report`.
        where: see :func:`report`.
        scale: see :func:`report`.

    Raises:
        ConfigError: nothing of the paper has such a name.
        DataError: finished runs that are there cannot be read.
    """
    names = _names(config, exhibits)
    source = expanded(where or config["paths"]["outputs"])
    found = {}
    for name in names:
        # An experiment may have been given another name.
        given = len(names) == 1 and config["name"] not in (ALL, NONE)
        own = config["name"] if given else name
        rows = _finished(source, own)
        found[name] = [row for row in rows if scale is None or row.get("scale", scale) == scale]
    return found


def _names(config: Mapping[str, Any], exhibits: Sequence[str] | None) -> list[str]:
    asked = list(exhibits or [config["name"]])
    if asked == [ALL]:
        return list(EXHIBITS)
    for name in asked:
        if name not in EXHIBITS:
            raise ConfigError(
                f"the paper has no table or figure '{name}' to report on{suggest(name, EXHIBITS)}",
                remedy=f"choose experiment={ALL}, or experiment= or task.exhibits= of: "
                f"{', '.join(EXHIBITS)}",
            )
    return list(dict.fromkeys(asked))


def _finished(source: Path, experiment: str) -> list[Row]:
    """Of an experiment; none where it has none, which is no reason not to tell what is missing.

    Raises:
        DataError: there are some, and they cannot be read.
    """
    try:
        frame = load_results(source, experiment=experiment)
    except DataError as error:
        if any((source / experiment).glob(f"*/{_DONE}")):
            raise  # it has some, and they cannot be read
        if source.is_file():
            load_results(source)  # else it is no ledger, which this says
        log.warning("%s", error.message)
        return []
    return [row for row in plain_rows(rows_of(frame)) if row.get("task_name") != report.__name__]


def fingerprint(config: Mapping[str, Any], inventory: Inventory) -> str:
    """Of the rows that count: with others, it is another report."""
    del inventory
    keys = ("exhibits", "where", "scale")
    asked = {key: config["task"][key] for key in keys if key in config["task"]}
    rows = json.dumps(chosen_rows(config, **asked), sort_keys=True, default=str)
    return hashlib.sha256(rows.encode()).hexdigest()[:16]


report.cores = 1  # type: ignore[attr-defined]
report.prepare = fingerprint  # type: ignore[attr-defined]
report.parallel = one_process  # type: ignore[attr-defined]
# No data are read, no network is made; the fingerprint stands for all that counts.
report.not_identity = (  # type: ignore[attr-defined]
    *("backend", "callbacks", "checkpoint", "data", "model", "optim", "parallel"),
    *("representation", "seed", "task", "trainer"),
)
