"""Writes predictions of samples that are cut over a grid, shard by shard, into one file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytorch_lightning as pl
import torch
from numpy.lib.format import open_memmap
from pytorch_lightning.callbacks import BasePredictionWriter
from torch import Tensor
from torch.utils import _pytree as pytree
from typing_extensions import override

from sparsepipe.errors import ConfigError
from sparsepipe.runtime.collectives import process_group
from sparsepipe.spatial import Shard
from sparsepipe.spatial.shard import local_of, whole_shape
from sparsepipe.strategies import SpatialStrategy
from sparsepipe.utils.files import writing


class WriteShards(BasePredictionWriter):
    """Writes the predictions of ``Trainer.predict`` into one ``.npy`` file.

    Each rank writes its own shards, so that none holds a whole sample; the strategy must be a
    :class:`SpatialStrategy` with ``gather_predictions=False``. ``predict_step`` must return a shard
    [B, ...] of the predictions for a batch of B samples, or a collection that contains it. The file
    has the samples in the order of the data set; read it with ``numpy.load``.

    Args:
        path: the file, on a disk that all ranks share; an existing one is replaced.
        samples: number of samples of the data set.
        key: name of the shard to write if ``predict_step`` returns a mapping of several.
    """

    def __init__(self, path: Path | str, *, samples: int, key: str = "prediction") -> None:
        super().__init__("batch")
        self._path, self._samples, self._key = Path(path), samples, key
        self._written = 0
        self._array: np.ndarray[Any, Any] | None = None

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        strategy = trainer.strategy
        if stage == "predict" and not (
            isinstance(strategy, SpatialStrategy) and not strategy.gather_predictions
        ):
            raise ConfigError(
                "WriteShards writes shards, but this strategy does not leave predictions in shards",
                remedy="use SpatialStrategy(gather_predictions=False)",
            )

    @override
    def write_on_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        prediction: Any,
        batch_indices: Sequence[int] | None,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int,
    ) -> None:
        if dataloader_idx:
            raise ConfigError(
                "predictions come from several loaders, but a file holds those of one",
                remedy="predict with one loader at a time, each into a different file",
            )
        if isinstance(prediction, Mapping) and self._key in prediction:
            prediction = prediction[self._key]
        shards = [leaf for leaf in pytree.tree_leaves(prediction) if isinstance(leaf, Shard)]
        if len(shards) != 1:
            raise ConfigError(
                f"predict_step returned {len(shards)} shards, but exactly one can be written",
                remedy=f"return one shard, or a mapping with the shard to write as {self._key!r}",
            )
        if isinstance(batch, dict) and isinstance(batch.get("index"), Tensor):
            indices = batch["index"].tolist()  # positions of the samples in the data set
        elif batch_indices is not None:
            indices = list(batch_indices)
        else:
            raise ConfigError(
                "a batch lacks the positions of its samples in the data set",
                remedy="add the positions to the batch as 'index'",
            )
        self._written += len(indices)
        shard, local = shards[0], local_of(shards[0])
        # NumPy has no bfloat16.
        values = (local.float() if local.dtype == torch.bfloat16 else local).cpu().numpy()
        if self._array is None:
            if process_group.rank() == 0:
                shape = (self._samples, *whole_shape(shard)[1:])
                with writing(self._path):
                    self._path.parent.mkdir(parents=True, exist_ok=True)
                    open_memmap(self._path, mode="w+", dtype=values.dtype, shape=shape)
            process_group.gather_objects(True, what="making the file of predictions")
            self._array = open_memmap(self._path, mode="r+")
        parts = [slice(None) for _ in whole_shape(shard)[1:]]  # the part of the whole in this shard
        for axis, (dim, full) in enumerate(zip(shard.dims, shard.full, strict=True)):
            held = shard.grid.held(axis, full)
            parts[dim] = slice(held.start, held.stop)
        with writing(self._path):
            self._array[(indices, *parts)] = values

    @override
    def on_predict_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._array is not None:
            with writing(self._path):
                self._array.flush()  # type: ignore[attr-defined]
            self._array = None
        written = process_group.gather_objects(self._written, what="writing the predictions")
        assert isinstance(trainer.strategy, SpatialStrategy)
        found, self._written = sum(written) // trainer.strategy.grid.size, 0
        if found < self._samples:
            raise ConfigError(
                f"{self._path} is for samples={self._samples}, but the number predicted is {found}",
                remedy="set samples to the number of samples that the loader has",
            )
