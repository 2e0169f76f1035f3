"""Microbatches: empty ones, when their steps begin, and labels of single voxels."""

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
from tests.support.pipeline_cases import (
    CLASSES,
    QUIET,
    Dense,
    Net,
    dense_layers,
    plain_trainer,
    weights,
)
from tests.support.processes import outcomes, run
from tests.support.synchronous_cases import drop_layers


def fitted(
    layers: Any,
    *,
    samples: int,
    batch_size: int,
    epochs: int = 2,
    **options: Any,
) -> Net:
    torch.manual_seed(11)
    module = Net(layers())
    strategy = SynchronousPipelineStrategy(timeout_s=60, **options)
    devices = sum(map(int, options.get("config", "1").split("-")))
    trainer = pl.Trainer(**QUIET, devices=devices, max_epochs=epochs, strategy=strategy)
    trainer.fit(module, DataLoader(Dense(samples), batch_size=batch_size))
    return module


@pytest.mark.parametrize("mode", ["microbatch", "deferred"])
@pytest.mark.parametrize(
    ("samples", "parts", "where"),
    [
        (8, 3, "forward of microbatch 1 of minibatch 0"),  # of 2, 1 and 1
        (17, 2, "forward of microbatch 0 of minibatch 4"),  # the epoch's last batch is one sample
    ],
)
def test_a_batch_norm_with_a_single_value_is_refused(
    mode: Any, samples: int, parts: int, where: str
) -> None:
    with pytest.raises(ConfigError, match="a microbatch that has 1 sample") as refused:
        fitted(dense_layers, samples=samples, batch_size=4, microbatches=parts, batch_norm=mode)
    assert "more than 1 value per channel" in refused.value.message, "as torch says"
    for way in (f"fewer microbatches than {parts}", "drop_last=True", "batch_norm=running"):
        assert way in refused.value.remedy
    assert any(where in note for note in refused.value.__notes__)


def test_running_batch_norms_take_single_samples() -> None:
    net = fitted(dense_layers, samples=17, batch_size=4, microbatches=3, batch_norm="running")
    assert all(value.isfinite().all() for value in net.state_dict().values())


def in_stages(rank: int) -> None:
    fitted(dense_layers, samples=8, batch_size=4, microbatches=3, config="1-1", cuts=[1])


def test_the_rank_of_the_norm_explains_and_others_name_that_rank() -> None:
    first, last = outcomes(in_stages, 2, limit_s=60)  # norms are in the last stage
    assert isinstance(last.error, ConfigError)
    assert "a microbatch that has 1 sample" in last.error.message
    assert "rank 1 (stage 1) is gone" in str(first.error)


CUTS = {"1": [], "1-1": [3], "2-1": [3], "1-1-1": [2, 4]}


class Noting(Net):
    """Notes microbatches as its step begins, and as the gradient comes to its first layer."""

    def __init__(self, *, failing: int | None = None) -> None:
        super().__init__(dense_layers())
        self.notes: list[str] = []
        self.failing = failing
        self.layers[0].register_full_backward_hook(lambda *_: self.notes.append("back"))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        opened = self.notes.count("open")
        self.notes.append("open")
        if opened == self.failing:
            raise ArithmeticError("before the layers")
        return super().training_step(batch, batch_idx)


def readers_and_ranks(config: str) -> tuple[int, int]:
    replicas = [int(part) for part in config.split("-")]
    return replicas[0], sum(replicas)


def train(net: Net, config: str, schedule: str, microbatches: int, **options: Any) -> None:
    """One minibatch of 16 samples for each reader."""
    readers, devices = readers_and_ranks(config)
    strategy = SynchronousPipelineStrategy(
        schedule=schedule,
        microbatches=microbatches,
        config=config,
        cuts=CUTS[config],
        timeout_s=60,
        **options,
    )
    trainer = pl.Trainer(**QUIET, devices=devices, max_epochs=1, strategy=strategy)
    trainer.fit(net, DataLoader(Dense(16 * readers), batch_size=16))


def noted(rank: int, config: str, schedule: str, microbatches: int) -> str:
    net = Noting()
    train(net, config, schedule, microbatches)
    return " ".join(net.notes)


@pytest.mark.parametrize(
    ("config", "schedule", "microbatches", "expected"),
    [
        ("1-1", "1f1b", 4, "open open open back open back back back"),
        ("1-1", "eager_1f1b", 5, "open open open open back open back back back back"),
        ("1-1", "gpipe", 4, "open open open open back back back back"),
        ("1-1-1", "1f1b", 6, "open open open open back open back open back back back back"),
        ("2-1", "1f1b", 8, "open open open back open back back back"),
        ("1", "1f1b", 3, "open back open back open back"),
    ],
)
def test_the_next_microbatch_opens_before_the_wait_for_a_gradient(
    config: str, schedule: str, microbatches: int, expected: str
) -> None:
    """No more than one is ahead; on one device there is no wait, hence none."""
    readers, ranks = readers_and_ranks(config)
    found = run(noted, ranks, config, schedule, microbatches)
    assert found[:readers] == [expected] * readers


def failing(rank: int) -> None:
    train(Noting(failing=2), "1-1", "1f1b", 4)


def test_the_error_names_the_forward_of_that_microbatch() -> None:
    first, _ = outcomes(failing, 2, limit_s=60)
    assert isinstance(first.error, ArithmeticError)
    assert first.error.__notes__ == ["rank 0, stage 0: forward of microbatch 2 of minibatch 0"]


class Drawing(Net):
    """Draws before the layers, as its dropout does within them, from the same generator."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        return F.cross_entropy(self.layers(x + torch.rand(len(x), 1)), y)


def drawn(rank: int, recompute: str) -> Any:
    torch.manual_seed(3)
    net = Drawing(drop_layers())
    train(net, "1-1", "1f1b", 4, recompute=recompute)
    return weights(net)


def test_a_second_run_of_layers_draws_nothing_of_the_microbatch_that_is_ahead() -> None:
    """It comes after that microbatch's own draws, which go on where they were."""
    kept, again = run(drawn, 2, "none")[0], run(drawn, 2, "all")[0]
    assert all(torch.equal(value, kept[name]) for name, value in again.items())


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


def labels_in_stages(rank: int) -> dict[str, Tensor]:
    net = Segments()
    strategy = SynchronousPipelineStrategy(microbatches=4, config="1-1", cuts=[2], timeout_s=60)
    trainer = pl.Trainer(**QUIET, devices=2, max_epochs=2, strategy=strategy)
    trainer.fit(net, loader(sparse=True))
    return weights(net)


def test_they_travel_as_feats_of_a_sparse_tensor() -> None:
    """Training is that of plain labels on one device, which cuts nothing."""
    net = Segments()
    plain_trainer(max_epochs=2).fit(net, loader(sparse=False))
    for state in run(labels_in_stages, 2):
        assert state.keys() == weights(net).keys()
        for name, value in weights(net).items():
            torch.testing.assert_close(state[name], value, rtol=1e-5, atol=1e-6)
