"""A task of one's own: a file ``task/count.yaml`` names it as ``_target_``."""

from __future__ import annotations

from dataclasses import dataclass

from sparsepipe.config.build import build_data, build_module
from sparsepipe.tasks.result import write_result
from sparsepipe.tasks.task import Run, Task


@dataclass(frozen=True, slots=True, kw_only=True)
class CountParameters(Task):
    """Counts the parameters of the model; the fields are the keys of ``task``."""

    alone = True  # it runs as one process
    trainable: bool = False

    def run(self, run: Run) -> None:
        """Writes ``result.json`` with the count."""
        data = build_data(run.spec)
        data.setup("fit")
        parameters = build_module(run.spec, data).parameters()
        count = sum(p.numel() for p in parameters if p.requires_grad or not self.trainable)
        write_result(run, {"kind": "counted", "parameters": count})
