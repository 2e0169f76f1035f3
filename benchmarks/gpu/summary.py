"""One Markdown page of all records of the GPU kit, and a ledger of the runs that it made."""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from records import Record, Row

from sparsepipe.runs.ledger import CSV, gather
from sparsepipe.utils.files import markdown_table, write_json, write_text_atomic


def write_summary(out: Path, parts: Sequence[tuple[str, str]]) -> None:
    """Writes ``summary.md``, and ``ledger.csv`` where there are runs.

    Args:
        out: the directory of the records.
        parts: name and title of each, in their order.
    """
    records = {
        name: Record.read(out / f"{name}.json")
        for name, _ in parts
        if (out / f"{name}.json").exists()
    }
    chapters = [_chapter(records[name], title) for name, title in parts if name in records]
    machine = next((r.machine for r in records.values() if r.machine), {})
    head = ["# Figures of a GPU, measured", _machine_text(machine)]
    write_text_atomic(out / "summary.md", "\n\n".join([*head, *chapters]) + "\n")
    results = [row["result"] for r in records.values() for row in r.measured if "result" in row]
    if results:
        _write_ledger(out, results)


def _machine_text(machine: Mapping[str, Any]) -> str:
    names = {"device": "", "driver": "driver ", "torch": "torch ", "cuda": "CUDA "}
    names |= {"triton": "Triton ", "python": "Python ", "cores": "cores: ", "commit": "commit "}
    told = [f"{word}{machine[key]}" for key, word in names.items() if machine.get(key)]
    return ", ".join(told) if told else "No part has run."


def _chapter(record: Record, title: str) -> str:
    how = f"{record.state}, {record.seconds:.0f} s"
    lines = [
        f"## {title}",
        f"`{record.part}`: {how}{': ' + record.reason if record.reason else ''}",
    ]
    used = {
        key: text for key, text in record.columns.items() if any(key in r for r in record.measured)
    }
    shown = [row for row in record.measured if any(row.get(key) is not None for key in used)]
    if shown:
        cells = [(_text(row["row"]), *(_text(row.get(key)) for key in used)) for row in shown]
        lines.append(markdown_table(("", *used.values()), cells))
    lines += [f"- {outcome}: {count}" for outcome, count in _outcomes(record).items()]
    lines += [f"- {row['row']} failed: {_one_line(row)}" for row in record.failed]
    return "\n\n".join(lines)


def _outcomes(record: Record) -> Counter[str]:
    """How many rows have come to what, of those that tell no figures but that."""
    told = [(row["outcome"], row.get("why")) for row in record.measured if "outcome" in row]
    return Counter(" ".join(filter(None, words)) for words in told)


def _one_line(row: Row) -> str:
    return " ".join(str(row["error"]).split())[:300]


def _text(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) < 1e5 else f"{value:.4e}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def _write_ledger(out: Path, results: Sequence[Mapping[str, Any]]) -> None:
    """The ledger of runs whose directories are gone: laid out once more, as far as it is read."""
    with tempfile.TemporaryDirectory() as name:
        for result in results:
            run = Path(name) / "runs" / str(result["name"]) / str(result["run_id"])
            run.mkdir(parents=True, exist_ok=True)  # two rows may be of one run
            write_text_atomic(run / "config.yaml", "")
            write_json(run / "result.json", result)
            write_json(run / "DONE.json", {})
        gather(Path(name) / "runs", to=Path(name))
        write_text_atomic(out / CSV, (Path(name) / CSV).read_text(encoding="utf-8"))
