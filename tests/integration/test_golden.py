"""The same commands give the same results as when ``golden/`` was recorded.

Each test runs the command line in an empty directory and compares what it leaves with a JSON file.
No module of the package is imported, and no module's name, run id, time, version, commit or path is
compared.

Where a change of results is meant, record them anew and commit what differs::

    GOLDEN_RECORD=1 python -m pytest tests/integration/test_golden.py

Trainings are the same bit for bit where the processor's vendor, the instructions that PyTorch chose
and its version are those that were recorded; elsewhere sums of floats may differ, and their figures
are compared to 1e-4. All else is the same to the last digit everywhere.
"""

from __future__ import annotations

import csv
import hashlib
import json
import math
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parents[2]
GOLDEN = Path(__file__).parent / "golden"
RECORD = "GOLDEN_RECORD"
TOLERANCE = 1e-4  # relative, of trainings on another processor
SHOWN = 20  # differences that a message names

# Keys of result.json that say when, where and by what something ran.
OF_THE_RUN = {
    *("run_id", "started_at", "finished_at", "wall_s", "starts", "peak_memory_bytes"),
    *("machine_cores", "threads_per_rank", "matmul_precision", "platform", "git_commit"),
    *("python", "sparsepipe", "cuda", "torch", "pytorch-lightning", "hydra-core", "numpy"),
}
# And those that a training measures: times, rates, memory and the machine itself.
MEASURED = re.compile(r"_s$|memory|^hardware_|^bubble_share")
# Columns of reports that are hashes, or say what recorded runs were made with.
OF_RECORDED_RUNS = {"versions", "commit", "runs"}
WITHOUT_UNIT = {
    *(("fig9", "time_scale"), ("multi_dsn_memory", "over_two")),
    *((name, key) for name in ("bigconv", "convnext_tp") for key in ("over_one", "share")),
}
TARGET = re.compile(r"(; | )?\S*_target_=[^;\s]*")  # in words of reports

TRAINING = (
    "name=golden",
    "seed=3",
    "model=sparse_vgg11_bn",
    "model.width=0.125",
    "optim=sgd_onecycle",
    "data.source.classes=[chair,table,lamp,mug,gear,guitar]",
    "data.source.train_per_class=4",
    "data.source.test_per_class=2",
    "data.val_share=0.25",
    "data.resolution=16",
    "data.num_points=512",
    "data.batch_size=6",
    "data.num_workers=0",
    "trainer.max_epochs=3",
    "task.gallery=0",
    "task.test_weights=last",
    "hardware.accelerator=cpu",
    "hardware.cpu_devices=2",
)

Leaf = str | int | float | bool | None


@pytest.fixture(autouse=True)
def _no_recording_in_ci() -> None:
    if os.environ.get(RECORD) and os.environ.get("CI"):
        pytest.fail(f"{RECORD} is set: CI compares with what was recorded, and records nothing")


def test_plans_of_table3(tmp_path: Path) -> None:
    sparsepipe(tmp_path, "experiment=table3")
    run = only_run(tmp_path, "table3")
    now = {
        "result": figures(run),
        "plans": {path.name: plan(path) for path in sorted(run.glob("mp_*gpu.json"))},
        **{f"{name}.csv": columns(run / f"{name}.csv") for name in ("table", "settings", "exact")},
        "files": files(run),
    }
    compare("table3", now)


@pytest.mark.full
def test_simulations_and_their_ledger(tmp_path: Path) -> None:
    sparsepipe(
        tmp_path,
        "-m",
        *("name=golden", "task=simulate", "hardware=paper_5gpu"),
        *("parallel=hete_mp,sync_1f1b", "parallel.search.search=hete_mp"),
    )
    now: dict[str, Any] = {}
    for run in runs(tmp_path, "golden"):
        result = figures(run)
        now[result["strategy"]] = {
            "result": result,
            "plan": plan(run / "plan.json"),
            "devices.csv": columns(run / "devices.csv"),
            "simulation.txt": (run / "simulation.txt").read_text().splitlines(),
            "trace.json": busy(run / "trace.json"),
            "files": files(run),
        }
    experiment = tmp_path / "outputs" / "golden"
    now["ledger.csv"] = {
        row["strategy"]: {k: v for k, v in row.items() if v and is_figure(k)}
        for row in csv_rows(experiment / "ledger.csv")
    }
    (table,) = experiment.glob("sweeps/*/table.csv")
    now["table.csv"] = {
        row["parallel"]: {k: v for k, v in row.items() if k not in {"run", "run_id"}}
        for row in csv_rows(table)
    }
    compare("simulations", now)


def test_training_on_one_device(tmp_path: Path) -> None:
    sparsepipe(tmp_path, *TRAINING, "parallel=single")
    compare_training("training_single", only_run(tmp_path, "golden"))


@pytest.mark.full
def test_training_as_a_pipeline_of_two_ranks(tmp_path: Path) -> None:
    sparsepipe(tmp_path, *TRAINING, "parallel=pipeline")
    run = only_run(tmp_path, "golden")
    split = without(plan(run / "plan.json"), "devices")  # which are this machine's
    compare_training("training_pipeline", run, plan=split)


@pytest.mark.full
def test_cells_of_the_report_on_recorded_experiments(tmp_path: Path) -> None:
    """What new recorded runs add in groups of their own is no difference."""
    sparsepipe(tmp_path, "task=report", "experiment=all", f"task.where={ROOT / 'experiments'}")
    run = only_run(tmp_path, "all")
    now = {path.stem: chapter(csv_rows(path)) for path in sorted(run.glob("*.csv"))}
    compare("report", now, may_grow=lambda path: len(path) == 2)


def sparsepipe(cwd: Path, *arguments: str) -> None:
    """The command, with this checkout's package, on one thread."""
    done = python(cwd, "-m", "sparsepipe", *arguments)
    assert done.returncode == 0, f"sparsepipe {' '.join(arguments)}\n{done.stdout}\n{done.stderr}"


def python(cwd: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("SPARSEPIPE")}
    environment["PYTHONPATH"] = os.pathsep.join(
        filter(None, (str(ROOT), environment.get("PYTHONPATH")))
    )
    environment |= {"OMP_NUM_THREADS": "1", "MKL_CBWR": "AUTO,STRICT"}
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        timeout=270,
        check=False,
    )


def runs(cwd: Path, name: str) -> list[Path]:
    return sorted(path.parent for path in (cwd / "outputs" / name).glob("*/DONE.json"))


def only_run(cwd: Path, name: str) -> Path:
    (run,) = runs(cwd, name)
    return run


def files(run: Path) -> list[str]:
    return sorted(
        str(path.relative_to(run))
        for path in run.rglob("*")
        if path.is_file() and not path.name.startswith(".")
    )


def is_figure(key: str) -> bool:
    """Whether a key of result.json is neither a setting (``model.width``) nor of the run itself."""
    return "." not in key and key not in OF_THE_RUN


def figures(run: Path) -> dict[str, Any]:
    result = json.loads((run / "result.json").read_text())
    return {key: value for key, value in result.items() if is_figure(key)}


def not_measured(values: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in values.items() if not MEASURED.search(key)}


def plan(path: Path) -> Any:
    """A plan file without fingerprints, and without what plans did not have when recorded."""
    return without(without(json.loads(path.read_text()), "fingerprint"), "rank_times_s")


def without(tree: Any, key: str) -> Any:
    if isinstance(tree, dict):
        return {k: without(v, key) for k, v in tree.items() if k != key}
    return [without(v, key) for v in tree] if isinstance(tree, list) else tree


def csv_rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="", encoding="utf-8") as stream:
        return list(csv.DictReader(stream))


def columns(path: Path) -> dict[str, list[str]]:
    """A CSV file's text, column by column."""
    found = csv_rows(path)
    return {name: [row[name] for row in found] for name in found[0]}


def busy(path: Path) -> dict[str, dict[str, float]]:
    """Of a trace's rows, how many spans, when the last one ends and how long all of them take."""
    spans: dict[str, list[tuple[float, float]]] = {}
    for event in json.loads(path.read_text())["traceEvents"]:
        if event["ph"] == "X":
            row = f"process {event['pid']}, thread {event['tid']}"
            spans.setdefault(row, []).append((event["ts"], event["dur"]))
    return {
        row: {
            "spans": len(found),
            "last_end": max(start + took for start, took in found),
            "sum": math.fsum(took for _, took in found),
        }
        for row, found in sorted(spans.items())
    }


def chapter(rows: list[dict[str, str]]) -> dict[str, Any]:
    """Of a report's CSV, by setting: each column as a hash, and cells of the chapters that vary."""
    settings: dict[str, list[dict[str, str]]] = {}
    for row in rows:
        words = as_recorded(row)
        words = {k: TARGET.sub("", v) for k, v in words.items() if k not in OF_RECORDED_RUNS}
        settings.setdefault(words.pop("setting"), []).append(words)
    now: dict[str, Any] = {}
    for setting, found in settings.items():
        said = {name: digest([row[name] for row in found]) for name in found[0]}
        now[setting] = {"rows": len(found), "sha256 of columns": said}
        if found[0]["exhibit"] in {"table2", "fig8"}:
            cells = now[setting]["ours"] = {}
            for row in found:
                names = list(row)
                place = " ".join(row[n] for n in names[1 : names.index("quantity")])
                quantities = cells.setdefault(place, {})
                assert row["quantity"] not in quantities, f"{setting}: {place} is there twice"
                quantities[row["quantity"]] = row["ours"]
            for place, quantities in cells.items():  # the hash has those without a figure, too
                cells[place] = {name: ours for name, ours in quantities.items() if ours}
    return now


def as_recorded(row: dict[str, str]) -> dict[str, str]:
    """A report's cell as reports had it when they were recorded.

    Then accuracies on generated shapes were set against the paper's, and ratios had no unit.
    """
    is_accuracy = row["exhibit"] in {"table2", "fig8"} and row["quantity"].endswith("_accuracy")
    if is_accuracy and row["comparison"] == "not":
        ours = row["ours"] if re.fullmatch(r"[\d.]+", row["ours"]) else ""  # else words
        difference = str(float(ours) - float(row["paper"])) if ours and row["paper"] else ""
        return {**row, "comparison": "difference", "compared": difference}
    if (row["exhibit"], row["quantity"]) in WITHOUT_UNIT:
        return {**row, "unit": ""}
    return row


def digest(texts: list[str]) -> str:
    return hashlib.sha256("\n".join(texts).encode()).hexdigest()[:8]


def this_machine() -> dict[str, str | None]:
    """What makes sums of floats differ."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    vendors = [line.split(":")[1].strip() for line in lines if line.startswith("vendor_id")]
    return {
        "vendor": next(iter(vendors), None),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "torch": torch.__version__.split("+")[0],
    }


def compare_training(name: str, run: Path, **more: Any) -> None:
    now = {
        "metrics.csv": not_measured(columns(run / "metrics.csv")),
        "result": not_measured(figures(run)),
        "confusion.csv": columns(run / "confusion.csv"),
        "files": files(run),
        **more,
    }
    numerics = this_machine()
    if os.environ.get(RECORD):
        compare(name, {"recorded with": numerics, **now})
    recorded = json.loads((GOLDEN / f"{name}.json").read_text())["recorded with"]
    same = numerics == recorded
    if not same:
        print(f"recorded with {recorded}, this is {numerics}: compared to {TOLERANCE:g}")
    compare(name, {"recorded with": recorded, **now}, tolerance=0.0 if same else TOLERANCE)


def compare(
    name: str,
    now: dict[str, Any],
    *,
    tolerance: float = 0.0,
    may_grow: Callable[[tuple[str, ...]], bool] = lambda path: False,
) -> None:
    """Fails with the leaves that differ; with ``GOLDEN_RECORD`` set, writes the file instead.

    Args:
        name: of the file in ``golden``, without its ending.
        now: what it would hold, were it recorded now.
        tolerance: of numbers, relative.
        may_grow: whether all below a path (keys of dictionaries) may be there without a record.
    """
    path = GOLDEN / f"{name}.json"
    if os.environ.get(RECORD):
        GOLDEN.mkdir(exist_ok=True)
        path.write_text(json.dumps(now, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        pytest.skip(f"recorded {path}")
    recorded = json.loads(path.read_text(encoding="utf-8"))
    then, today = dict(leaves(recorded)), dict(leaves(now))
    known = {place[:depth] for place in then for depth in range(len(place) + 1)}
    found = [
        f"{' > '.join(place)}: recorded {shown(then, place)}, now {shown(today, place)}"
        for place in {**then, **today}
        if not (place in then and place in today and alike(then[place], today[place], tolerance))
        and not (place not in then and grown(place, known, may_grow))
    ]
    if found:
        left = len(found) - SHOWN
        rest = [f"and {left} more"] if left > 0 else []
        pytest.fail(
            "\n".join([f"{path.name}: {len(found)} differ", *found[:SHOWN], *rest]), pytrace=False
        )


def grown(
    place: tuple[str, ...],
    known: set[tuple[str, ...]],
    may_grow: Callable[[tuple[str, ...]], bool],
) -> bool:
    above = [place[:depth] for depth in range(1, len(place) + 1)]
    return any(path not in known and may_grow(path) for path in above)


def leaves(tree: Any, place: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Leaf]]:
    """All values with the keys that lead to them; empty lists and dictionaries as their text."""
    if isinstance(tree, dict | list) and tree:
        items = tree.items() if isinstance(tree, dict) else enumerate(tree)
        for key, value in items:
            yield from leaves(value, (*place, str(key)))
    else:
        yield place, str(tree) if isinstance(tree, dict | list) else tree


def shown(tree: dict[tuple[str, ...], Leaf], place: tuple[str, ...]) -> str:
    return repr(tree[place]) if place in tree else "nothing"


def alike(then: Leaf, now: Leaf, tolerance: float) -> bool:
    if then == now and type(then) is type(now):
        return True
    if not tolerance or then is None or now is None:
        return False
    try:
        return math.isclose(float(then), float(now), rel_tol=tolerance)
    except ValueError:
        return False
