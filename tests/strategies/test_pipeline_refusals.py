"""What a pipeline cannot do is refused with a remedy, on every rank, before it trains."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from pipeline_cases import QUIET, Net, dense_layers, make_loader, make_net
from processes import outcomes
from pytorch_lightning import callbacks as lightning
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from sparsepipe.errors import ConfigError
from sparsepipe.strategies import PipelineStrategy


class ByHand(Net):
    def __init__(self) -> None:
        super().__init__(dense_layers())
        self.automatic_optimization = False


class TwoOptimizers(Net):
    def configure_optimizers(self) -> Any:
        groups = list(self.layers.parameters())
        return [torch.optim.SGD(groups[:2], lr=0.1), torch.optim.SGD(groups[2:], lr=0.1)]


class Tied(Net):
    def __init__(self) -> None:
        first, second = nn.Linear(6, 6), nn.Linear(6, 6)
        second.weight = first.weight
        super().__init__(nn.Sequential(first, nn.ReLU(), second))


class Nothing(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.layers(batch[0])


class Autoencoder(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return (self.layers(batch[0])[:, :4] - batch[0][:, :4]).square().mean()


class Ambiguous(Net):
    def __init__(self) -> None:
        super().__init__(dense_layers())
        self.head, self.tail, self.layers = nn.Sequential(), nn.Sequential(), None


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(make_loader("dense", batches=2).dataset)


@dataclass(frozen=True)
class Refusal:
    message: str
    strategy: Callable[[], dict[str, Any]] = dict
    trainer: Callable[[], dict[str, Any]] = dict
    module: Callable[[], pl.LightningModule] = lambda: make_net("dense")
    loader: Callable[[], Any] = lambda: make_loader("dense", batches=3)


REFUSALS = {
    "accumulation": Refusal(
        "accumulate_grad_batches=2", trainer=lambda: {"accumulate_grad_batches": 2}
    ),
    "by hand": Refusal("optimizes by hand", module=ByHand),
    "two optimizers": Refusal(
        "gives several optimizers", module=lambda: TwoOptimizers(dense_layers())
    ),
    "tied": Refusal("are one parameter", module=Tied, strategy=lambda: {"cuts": [1]}),
    "on exception": Refusal(
        "save_on_exception",
        trainer=lambda: {
            "callbacks": [lightning.ModelCheckpoint(save_on_exception=True)],
            "enable_checkpointing": True,
        },
    ),
    "averaging": Refusal(
        "StochasticWeightAveraging averages",
        trainer=lambda: {"callbacks": [lightning.StochasticWeightAveraging(0.1)]},
    ),
    "stream": Refusal("number of batches", loader=lambda: DataLoader(Stream(), batch_size=4)),
    "no loss": Refusal("training_step returned NoneType", module=lambda: Nothing(dense_layers())),
    "input": Refusal("apart from calling them", module=lambda: Autoencoder(dense_layers())),
    "cuts": Refusal("do not split 7 layers", strategy=lambda: {"cuts": [9]}),
    "config": Refusal("is for 3 devices", strategy=lambda: {"config": "2-1"}),
    "words": Refusal("does not say", strategy=lambda: {"config": "two"}),
    "mode": Refusal("mode='fast' is unknown", strategy=lambda: {"mode": "fast"}),
    "balance": Refusal("balance='luck' is unknown", strategy=lambda: {"balance": "luck"}),
    "spectrain": Refusal(
        "not of Adam",
        strategy=lambda: {"mode": "spectrain"},
        module=lambda: make_net("dense", optimizer="adam"),
    ),
    "layers": Refusal("names no nn.Sequential", strategy=lambda: {"layers": "network"}),
    "ambiguous": Refusal("several nn.Sequential", module=Ambiguous),
    "half": Refusal("scales the loss", trainer=lambda: {"precision": "16-mixed"}),
    "clock": Refusal("is a time", trainer=lambda: {"val_check_interval": "00:00:01:00"}),
    "sync norm": Refusal("sync_batchnorm=true", trainer=lambda: {"sync_batchnorm": True}),
}


def refused(rank: int, name: str) -> None:
    case = REFUSALS[name]
    if name == "half":  # Lightning has a scaler for CUDA only
        plugin = pl.plugins.MixedPrecision("16-mixed", "cpu", scaler=torch.amp.GradScaler("cpu"))
        trainer_options: dict[str, Any] = {"plugins": [plugin]}
    else:
        trainer_options = case.trainer()
    strategy = PipelineStrategy(**{"timeout_s": 10, "balance": "parameters", **case.strategy()})
    options = {**QUIET, "devices": 2, "max_epochs": 1, "strategy": strategy, **trainer_options}
    trainer = pl.Trainer(**options)
    trainer.fit(case.module(), case.loader(), make_loader("dense", batches=1))


@pytest.mark.parametrize("name", REFUSALS)
def test_refused(name: str) -> None:
    ends = outcomes(refused, 2, name, limit_s=60)
    errors = [end.error for end in ends if isinstance(end.error, ConfigError)]
    if name in ("no loss", "input"):
        assert len(errors) >= 1  # only the last stage sees it; the other loses its peer
    else:
        assert len(errors) == 2, ends
    for error in errors:
        assert REFUSALS[name].message in error.message
        assert error.remedy


def test_more_stages_than_layers() -> None:
    from sparsepipe.strategies.pipeline.plan_by_hand import make_plan

    with pytest.raises(ConfigError, match="3 stages for 2 layers"):
        make_plan((1, 1, 1), cuts=None, costs=lambda: [1.0, 1.0], num_layers=2)
