"""Runs of ``sparsepipe`` in this process, as its command line makes them, on generated shapes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hydra import compose as hydra_compose
from hydra import initialize_config_dir

from sparsepipe.config import compose
from sparsepipe.config.run_spec import RunSpec
from sparsepipe.launch.job import run_job
from sparsepipe.runs import logs
from sparsepipe.utils.files import read_json

_LEFT_OUT = (
    "peak_memory",
    "train_peak_memory",
    "train/accuracy",
    "train/loss",
    "test/",
    "platform",
)


class Jobs:
    """Runs and their data, below one directory.

    Args:
        work: the directory.
    """

    def __init__(self, work: Path) -> None:
        self._common = (
            "data=shapes",
            f"paths.data={work / 'data'}",
            f"paths.outputs={work / 'outputs'}",
            "trainer.enable_progress_bar=false",
        )
        logs.configure()

    def run(self, *overrides: str) -> tuple[dict[str, Any], Path]:
        """What ``result.json`` of the run of these overrides holds, and its directory.

        Left out is what says nothing of it: the largest memory of this process, in which other
        jobs have run, and how accurate a few minibatches have made the network.

        Raises:
            SparsePipeError: the run cannot be made.
        """
        path = run_job(self._config(overrides)).path
        result: dict[str, Any] = read_json(path / "result.json")
        told = {key: value for key, value in result.items() if not key.startswith(_LEFT_OUT)}
        return {"name": path.parent.name, "run_id": path.name, **told}, path

    def _config(self, overrides: tuple[str, ...]) -> RunSpec:
        # An experiment comes first, then what it is made of, which counts.
        words = compose.admit([*overrides, *self._common])
        with initialize_config_dir(str(compose.config_dir()), version_base="1.3"):
            spec = compose.resolve(hydra_compose(compose.CONFIG_NAME, words))
        return spec.replace(hydra={"overrides": [*overrides, "data=shapes"]})  # for reports
