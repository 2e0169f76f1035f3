"""Microbatches without samples, or with one: what is warned of and what is refused."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from sparsepipe.errors import ConfigError
from sparsepipe.strategies import SynchronousPipelineStrategy
from tests.support.drop_nets import drop_layers
from tests.support.pipeline_cases import CLASSES, QUIET, Dense, Net, dense_layers
from tests.support.processes import outcomes


def fitted(
    layers: Any,
    *,
    samples: int,
    batch_size: int,
    epochs: int = 2,
    net: type[Net] = Net,
    **options: Any,
) -> Net:
    torch.manual_seed(11)
    module = net(layers())
    strategy = SynchronousPipelineStrategy(timeout_s=60, **options)
    devices = sum(map(int, options.get("config", "1").split("-")))
    trainer = pl.Trainer(**QUIET, devices=devices, max_epochs=epochs, strategy=strategy)
    trainer.fit(module, DataLoader(Dense(samples), batch_size=batch_size))
    return module


def told(*, samples: int, batch_size: int, microbatches: int) -> list[str]:
    """What is warned of empty microbatches."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fitted(drop_layers, samples=samples, batch_size=batch_size, microbatches=microbatches)
    return [text for each in caught if "are empty" in (text := str(each.message))]


def test_empty_microbatches_are_warned_of_once() -> None:
    (text,) = told(samples=12, batch_size=4, microbatches=6)
    assert "a batch of 4 samples is cut into 6 microbatches, of which 2 are empty" in text
    assert "microbatches=4 or fewer" in text


def test_those_of_the_last_batch_are_as_they_should_be() -> None:
    assert not told(samples=14, batch_size=6, microbatches=6)


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


def grouped_layers() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 4), nn.GroupNorm(4, 4), nn.Linear(4, CLASSES))


def test_norms_of_other_kinds_say_what_torch_says() -> None:
    """Of a group norm that torch refuses in the same words, and that no option changes."""
    with pytest.raises(ValueError, match="more than 1 value per channel") as refused:
        fitted(grouped_layers, samples=8, batch_size=4, microbatches=4)
    assert not isinstance(refused.value, ConfigError)
    assert any("forward of microbatch 0 of minibatch 0" in n for n in refused.value.__notes__)


def in_stages(rank: int, net: type[Net]) -> None:
    fitted(dense_layers, samples=8, batch_size=4, microbatches=3, config="1-1", cuts=[1], net=net)


def test_the_rank_whose_norm_it_is_says_so_and_others_name_that_rank() -> None:
    first, last = outcomes(in_stages, 2, Net, limit_s=60)  # norms are in the last stage
    assert isinstance(last.error, ConfigError)
    assert "a microbatch that has 1 sample" in last.error.message
    assert "rank 1 (stage 1) is gone" in str(first.error)


class Whitened(Net):
    """Normalises what it gives to the layers."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.before = nn.BatchNorm1d(6, affine=False)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        return super().training_step((self.before(x), y), batch_idx)


def test_so_does_a_first_stage_with_a_norm_before_the_layers() -> None:
    first, last = outcomes(in_stages, 2, Whitened, limit_s=60)
    assert isinstance(first.error, ConfigError)
    assert "a microbatch that has 1 sample" in first.error.message
    assert "make it the first entry of the Sequential and set batch_norm=" in first.error.remedy
    assert "rank 0 (stage 0) is gone" in str(last.error)
