"""What a Weights & Biases directory holds, read by Weights & Biases itself."""

from __future__ import annotations

import json
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Recorded:
    """One .wandb file, by the reader of ``wandb leet inspect``."""

    directory: Path
    records: list[tuple[str, dict[str, Any]]]

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [record for name, record in self.records if name == kind]

    @property
    def run(self) -> dict[str, Any]:
        (found,) = self.of("run")
        return found

    @property
    def history(self) -> list[dict[str, Any]]:
        return [row["item"] for row in self.of("history")]

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """The history without figures and tables, and without times that Weights & Biases adds."""
        rows = [row for row in self.history if not any("._type" in name for name in row)]
        return [{k: v for k, v in row.items() if k[0] != "_" or k == "_step"} for row in rows]

    @property
    def config(self) -> dict[str, Any]:
        return self._merged("config")

    @property
    def summary(self) -> dict[str, Any]:
        return self._merged("summary")

    @property
    def media(self) -> dict[str, Path]:
        """Files of figures and tables by their names, which are there."""
        found = {
            name.removesuffix(".path"): self.directory / "files" / path
            for row in self.history
            for name, path in row.items()
            if name.endswith(".path") and not name.endswith("artifact_path")
        }
        assert all(path.is_file() for path in found.values())
        return found

    def _merged(self, kind: str) -> dict[str, Any]:
        values: dict[str, Any] = {}
        for record in self.of(kind):
            values.update(record.get("update", {}))
        return values


def recorded(run: Path) -> Recorded:
    """The one directory of a run, which is what ``wandb sync <run>/wandb`` would upload."""
    (file,) = {path.resolve() for path in (run / "wandb").glob("*/*.wandb")}
    directories = [p for p in (run / "wandb").glob("*run-*") if p.is_dir() and not p.is_symlink()]
    assert directories == [file.parent]
    return wandb_file(file)


def wandb_file(file: Path) -> Recorded:
    """What one file holds."""
    import wandb.util  # takes seconds, which few tests need

    read = subprocess.run(
        [wandb.util.get_core_path(), "leet", "inspect", "--no-observability", "--json",
         "--run-file", file, file.parent.parent],
        capture_output=True, text=True, check=True, timeout=60,
    )  # fmt: skip
    lines = [json.loads(line) for line in read.stdout.splitlines()]
    return Recorded(file.parent, [(line["type"], line.get(line["type"], {})) for line in lines])
