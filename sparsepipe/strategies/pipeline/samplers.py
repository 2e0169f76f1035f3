"""What Lightning's samplers do otherwise where several ranks read."""

from __future__ import annotations

from typing import Any

import pytorch_lightning as pl
from pytorch_lightning.trainer.connectors.data_connector import _get_distributed_sampler
from pytorch_lightning.trainer.states import RunningStage
from torch.utils.data import DataLoader, DistributedSampler

_EVALUATING = (RunningStage.SANITY_CHECKING, RunningStage.VALIDATING, RunningStage.TESTING)


class UnrepeatedEvaluation:
    """Made at setup, undone at teardown: in validation and test every sample counts once.

    Lightning's sampler repeats samples until all readers have as many, and here they need
    not: see :class:`~sparsepipe.strategies.pipeline.loaders.Lengths`. For prediction
    Lightning repeats none itself, and samplers of the user's own stay as they are.

    Args:
        trainer: its loaders get samplers.
    """

    def __init__(self, trainer: pl.Trainer) -> None:
        self._trainer = trainer
        self._connector = trainer._data_connector
        self._connector._resolve_sampler = self._resolve  # type: ignore[method-assign]

    def undo(self) -> None:
        """Leaves everything as it was."""
        self._connector.__dict__.pop("_resolve_sampler", None)

    def _resolve(
        self, dataloader: DataLoader[Any], shuffle: bool, mode: RunningStage | None = None
    ) -> Any:
        connector, trainer = self._connector, self._trainer
        if mode not in _EVALUATING or not connector._requires_distributed_sampler(dataloader):
            return type(connector)._resolve_sampler(connector, dataloader, shuffle, mode)
        kwargs = trainer.distributed_sampler_kwargs
        assert kwargs is not None
        overfits: float = trainer.overfit_batches  # type: ignore[attr-defined]
        sampler = _get_distributed_sampler(dataloader, shuffle, overfits, mode=mode, **kwargs)
        _repeat_nothing(sampler)
        return sampler


def _repeat_nothing(sampler: DistributedSampler[Any]) -> None:
    """Lets a sampler end where its data do: it fills up to a total that it is told."""
    size = len(sampler.dataset)  # type: ignore[arg-type]
    sampler.total_size = size
    sampler.num_samples = len(range(sampler.rank, size, sampler.num_replicas))
