"""What the Strategy saves and loads: the whole module and its optimizer, wherever they are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning_fabric.utilities.optimizer import _optimizer_to_device
from torch.optim import Optimizer
from typing_extensions import override

from sparsepipe.errors import ConfigError
from sparsepipe.strategies.pipeline.evaluation import PipelinedEvaluation
from sparsepipe.strategies.pipeline.spreading import SpreadModule


class WholeCheckpoints(PipelinedEvaluation):
    """Puts together what is spread over the ranks, and takes this rank's part of the whole."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._spread: SpreadModule | None = None
        self._torn = False

    def drain(self) -> None:
        """Empties the pipeline; every rank must call it."""
        if self._pipeline is not None:
            self._pipeline.drain()

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        self._check_not_torn()
        self.drain()
        if self._spread is None:
            return super().lightning_module_state_dict()
        return self._spread.state_dict()

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        self._check_not_torn()
        self.drain()
        if self._spread is None or not self._spread.has_optimizer:
            return super().optimizer_state(optimizer)  # of the run before, and whole
        return self._spread.optimizer_state()

    @override
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        if self._spread is None:
            super().load_model_state_dict(checkpoint, strict=strict)
        else:
            self._spread.load_state_dict(checkpoint["state_dict"], strict=strict)

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        if self._spread is None:
            super().load_optimizer_state_dict(checkpoint)
            return
        self._spread.load_optimizer_state(checkpoint["optimizer_states"][0])
        _optimizer_to_device(self.optimizers[0], self.root_device)

    def _check_not_torn(self) -> None:
        if self._torn:
            raise ConfigError(
                "the run has failed, and this rank has the values of its own stage only",
                remedy="go on from the last checkpoint; ModelCheckpoint(every_n_train_steps=...) "
                "limits what a failure costs",
            )
