"""The classifier: its metrics against counts by hand, and training on one device."""

from __future__ import annotations

from functools import partial

import pytest
import pytorch_lightning as pl
import torch
from torch import nn
from torch.utils.data import DataLoader

from sparsepipe.errors import ConfigError
from sparsepipe.models import Classifier, LRSchedule


class Samples(torch.utils.data.Dataset):
    """Points in the plane, labelled by quadrant of the first coordinate pair."""

    def __init__(self, count: int) -> None:
        generator = torch.Generator().manual_seed(count)
        self.x = torch.randn(count, 2, generator=generator)
        self.y = (self.x[:, 0] > 0).long() + 2 * (self.x[:, 1] > 0).long()

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> dict[str, object]:
        return {"input": self.x[index], "label": self.y[index], "index": index}


def trainer(tmp_path, **settings) -> pl.Trainer:
    return pl.Trainer(
        default_root_dir=tmp_path,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **settings,
    )


def classifier(**settings) -> Classifier:
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(2, 16), nn.ReLU(), nn.Linear(16, 4))
    return Classifier(layers, num_classes=4, optimizer=partial(torch.optim.SGD, lr=0.3), **settings)


def test_learns_and_reports_what_a_count_by_hand_gives(tmp_path) -> None:
    module = classifier(label_smoothing=0.05)
    run = trainer(tmp_path, max_epochs=8)
    run.fit(module, DataLoader(Samples(400), batch_size=20, shuffle=True))
    test_set = Samples(101)
    logged = run.test(module, DataLoader(test_set, batch_size=10), verbose=False)[0]

    with torch.no_grad():
        predicted = module.layers(test_set.x).argmax(dim=1)
    right = predicted == test_set.y
    assert logged["test/accuracy"] == pytest.approx(right.float().mean().item())
    assert logged["test/accuracy"] > 0.9
    per_class = torch.stack([right[test_set.y == k].float().mean() for k in range(4)])
    assert logged["test/class_accuracy"] == pytest.approx(per_class.mean().item())
    counts = torch.zeros(4, 4, dtype=torch.int64)
    for true, guess in zip(test_set.y, predicted, strict=True):
        counts[true, guess] += 1
    assert torch.equal(module.test_confusion, counts)
    assert torch.equal(module.test_predictions["prediction"], predicted)
    assert torch.equal(module.test_predictions["index"], torch.arange(101))
    assert (module.test_predictions["probability"] >= 0.25).all()


def test_one_cycle_lasts_exactly_the_training(tmp_path) -> None:
    schedule = LRSchedule(
        factory=partial(torch.optim.lr_scheduler.OneCycleLR, max_lr=0.5, pct_start=0.5),
        interval="step",
        horizon="total_steps",
    )
    module = classifier(schedule=schedule)
    rates: list[float] = []

    class Watch(pl.Callback):
        def on_train_batch_start(self, trainer, *_) -> None:
            rates.append(trainer.optimizers[0].param_groups[0]["lr"])

    trainer(tmp_path, max_epochs=2, callbacks=[Watch()]).fit(
        module, DataLoader(Samples(50), batch_size=10)
    )
    expected_optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.3)
    expected = torch.optim.lr_scheduler.OneCycleLR(
        expected_optimizer, max_lr=0.5, pct_start=0.5, total_steps=10
    )
    for rate in rates:
        assert rate == pytest.approx(expected_optimizer.param_groups[0]["lr"])
        expected_optimizer.step()
        expected.step() if expected.last_epoch < 9 else None
    assert len(rates) == 10
    assert max(rates) == pytest.approx(0.5, rel=0.05)


def test_schedule_interval_is_checked() -> None:
    with pytest.raises(ConfigError, match="'step' or 'epoch'"):
        LRSchedule(factory=torch.optim.lr_scheduler.ConstantLR, interval="minute")


def test_predict_returns_one_entry_a_shape(tmp_path) -> None:
    module = classifier()
    batches = trainer(tmp_path).predict(module, DataLoader(Samples(7), batch_size=3))
    assert torch.cat([b["index"] for b in batches]).tolist() == list(range(7))
    with torch.no_grad():
        expected = module.layers(Samples(7).x).softmax(dim=1).max(dim=1)
    assert torch.allclose(torch.cat([b["probability"] for b in batches]), expected.values)
