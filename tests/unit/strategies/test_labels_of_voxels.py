"""Labels of single voxels in a synchronous pipeline: as the feats of a sparse tensor."""

from __future__ import annotations

from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from sparsepipe.errors import ConfigError
from sparsepipe.sparse import Conv3d, ReLU, SparseTensor, sparse_collate
from sparsepipe.strategies import SynchronousPipelineStrategy
from tests.support.pipeline_cases import CLASSES, QUIET, plain_trainer, weights
from tests.support.processes import run

SITES, SAMPLES, BATCH = 20, 14, 6  # as many sites in each sample: their mean is that of samples


class Segments(pl.LightningModule):
    """Tells the class of each voxel."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.Sequential(
            Conv3d(1, 8), ReLU(), Conv3d(8, 8), ReLU(), Conv3d(8, CLASSES, 1, bias=True)
        )

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, labels = batch
        labels = labels.feats[:, 0] if isinstance(labels, SparseTensor) else labels
        return F.cross_entropy(self.layers(x).feats, labels.long())

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def loader(*, sparse: bool) -> DataLoader[Any]:
    draw = torch.Generator().manual_seed(5)
    samples = []
    for _ in range(SAMPLES):
        places = torch.randperm(6**3, generator=draw)[:SITES]
        coords = torch.stack([places // 36, places // 6 % 6, places % 6], dim=1)
        feats = torch.randn(SITES, 1, generator=draw)
        samples.append((coords, feats, torch.randint(CLASSES, (SITES,), generator=draw)))

    def collate(items: list[Any]) -> Any:
        x = sparse_collate([(c, f) for c, f, _ in items], spatial_shape=(6, 6, 6))
        if not sparse:
            return x, torch.cat([labels for _, _, labels in items])
        of_voxels = [(c, labels[:, None].float()) for c, _, labels in items]
        return x, sparse_collate(of_voxels, spatial_shape=(6, 6, 6))

    return DataLoader(samples, batch_size=BATCH, collate_fn=collate)  # type: ignore[arg-type]


def in_stages(rank: int) -> dict[str, Tensor]:
    net = Segments()
    strategy = SynchronousPipelineStrategy(microbatches=4, config="1-1", cuts=[2], timeout_s=60)
    trainer = pl.Trainer(**QUIET, devices=2, max_epochs=2, strategy=strategy)
    trainer.fit(net, loader(sparse=True))
    return weights(net)


def test_they_travel_as_feats_of_a_sparse_tensor() -> None:
    """Training is that of plain labels on one device, which cuts nothing."""
    net = Segments()
    plain_trainer(max_epochs=2).fit(net, loader(sparse=False))
    for state in run(in_stages, 2):
        assert state.keys() == weights(net).keys()
        for name, value in weights(net).items():
            torch.testing.assert_close(state[name], value, rtol=1e-5, atol=1e-6)


def test_who_has_them_as_a_tensor_is_told_so() -> None:
    strategy = SynchronousPipelineStrategy(microbatches=4)
    trainer = pl.Trainer(**QUIET, devices=1, max_epochs=1, strategy=strategy)
    with pytest.raises(
        ConfigError, match=r"SparseTensor \[0\] of 6 samples and the tensor \[1\]"
    ) as e:
        trainer.fit(Segments(), loader(sparse=False))
    assert "feats of a SparseTensor" in e.value.remedy
