"""The classifier: its metrics against counts by hand, and training on one device."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.utilities.exceptions import MisconfigurationException
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from sparsepipe import models
from sparsepipe.errors import ConfigError
from sparsepipe.models import Classifier, LRSchedule
from sparsepipe.models.losses import soft_dice
from sparsepipe.models.windows import Windows
from sparsepipe.sparse import (
    BatchNorm,
    Conv3d,
    GlobalMaxPool,
    Linear,
    MaxPool3d,
    ReLU,
    sparse_collate,
)
from sparsepipe.strategies import SynchronousPipelineStrategy
from tests.support import processes


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


def shape_batches() -> DataLoader:
    """Two batches of two shapes: a full and a hollow cube."""
    cube = torch.cartesian_prod(*[torch.arange(4)] * 3)
    shell = cube[((cube == 0) | (cube == 3)).any(dim=1)]
    samples = [(coords, torch.ones(len(coords), 1)) for coords in (cube, shell)]
    batch = {
        "input": sparse_collate(samples, spatial_shape=(4, 4, 4)),
        "label": torch.tensor([0, 1]),
        "index": torch.tensor([0, 1]),
    }
    return DataLoader([batch, batch], batch_size=None, collate_fn=lambda entry: entry)


def sparse_classifier() -> Classifier:
    torch.manual_seed(0)
    layers = nn.Sequential(
        Conv3d(1, 6),
        BatchNorm(6),
        ReLU(),
        MaxPool3d(2),
        Conv3d(6, 4),
        GlobalMaxPool(),
        Linear(4, 2),
    )
    return Classifier(layers, num_classes=2, optimizer=partial(torch.optim.SGD, lr=0.1))


@pytest.mark.parametrize(
    ("precision", "dtype"),
    [
        ("32-true", torch.float32),
        ("64-true", torch.float64),
        ("bf16-true", torch.bfloat16),
        ("bf16-mixed", torch.float32),
    ],
)
def test_a_sparse_network_trains_and_predicts_in_every_precision(
    tmp_path, precision, dtype
) -> None:
    module, batches = sparse_classifier(), shape_batches()
    before = module.layers[0].kernel.detach().clone()
    run = trainer(tmp_path, max_epochs=1, precision=precision)
    run.fit(module, batches, batches)
    run.test(module, batches, verbose=False)
    (entry, _) = run.predict(module, batches)
    assert module.layers[0].kernel.dtype == dtype
    assert not torch.equal(module.layers[0].kernel.float(), before)
    assert entry["probability"].isfinite().all()
    # Outside the trainer nothing casts but the module itself.
    again = module.predict_step(next(iter(batches)))
    assert again["probability"].isfinite().all()


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_losses_of_all_splits_are_the_same_quantity(tmp_path, smoothing) -> None:
    layers = nn.Sequential(nn.Linear(2, 4))
    module = Classifier(
        layers, num_classes=4, optimizer=partial(torch.optim.SGD, lr=0.0), label_smoothing=smoothing
    )
    batches = DataLoader(Samples(40), batch_size=10)
    run = trainer(tmp_path, max_epochs=1)
    run.fit(module, batches, batches)
    logged = {name: value.item() for name, value in run.callback_metrics.items()}
    data = Samples(40)
    logits = layers(data.x)
    plain = nn.functional.cross_entropy(logits, data.y).item()
    assert logged["train/loss"] == pytest.approx(plain, rel=1e-5)
    assert logged["val/loss"] == pytest.approx(plain, rel=1e-5)
    if smoothing:
        smoothed = nn.functional.cross_entropy(logits, data.y, label_smoothing=smoothing).item()
        assert logged["train/objective"] == pytest.approx(smoothed, rel=1e-5)
        weight_B4 = nn.functional.one_hot(data.y, 4) * (1 - smoothing) + smoothing / 4
        assert smoothed == pytest.approx(-(weight_B4 * logits.log_softmax(1)).sum(1).mean().item())
    else:
        assert "train/objective" not in logged


def test_the_progress_bar_has_loss_and_accuracy_from_the_first_step(tmp_path) -> None:
    shown: list[dict[str, float]] = []

    class Watch(pl.Callback):
        def on_train_batch_end(self, trainer, *_) -> None:
            shown.append(dict(trainer.progress_bar_metrics))

    module = classifier()
    layers = copy.deepcopy(module.layers)
    run = trainer(tmp_path, max_epochs=1, callbacks=[Watch()])
    run.fit(module, DataLoader(Samples(40), batch_size=10))
    first = Samples(40)[slice(10)]
    right = layers(first["input"]).argmax(dim=1) == first["label"]
    assert shown[0]["train/accuracy_step"] == pytest.approx(right.float().mean().item())
    assert len(shown) == 4
    assert all({"train/loss_step", "train/accuracy_step"} <= set(entry) for entry in shown)
    # The epoch's value stays under the plain name as well, for callbacks that monitor it.
    assert run.callback_metrics["train/accuracy"] == run.callback_metrics["train/accuracy_epoch"]


@pytest.mark.parametrize("form", ["sparse", "dense"])
def test_an_input_of_the_other_form_is_refused(form) -> None:
    dense = nn.Sequential(nn.Sequential(nn.Conv3d(1, 2, 3, padding=1)), nn.Flatten())
    module = sparse_classifier() if form == "sparse" else classifier()
    if form == "dense":
        module = Classifier(dense, num_classes=2, optimizer=partial(torch.optim.SGD, lr=0.1))
    batch = next(iter(shape_batches()))
    inputs = {"sparse": batch["input"], "dense": batch["input"].dense()}
    module(inputs.pop(form))
    ((other, x),) = inputs.items()
    said = f"network is {form}.*, but its input is {other}"
    with pytest.raises(ConfigError, match=said) as error:
        module(x)
    assert "data.representation" in error.value.remedy


class Flat(nn.Sequential):
    """Layers of the user's, which take signals of flattened images."""

    def forward(self, x):
        return super().forward(x.flatten(2))


def test_inputs_of_another_dimension_are_refused_unless_the_user_reshapes_them() -> None:
    layers = nn.Conv1d(1, 2, 3, padding=1), nn.AdaptiveAvgPool1d(1), nn.Flatten()
    make = partial(Classifier, num_classes=2, optimizer=torch.optim.SGD)
    with pytest.raises(ConfigError, match="network is dense 1D, but its input is dense 2D"):
        make(nn.Sequential(*layers))(torch.zeros(4, 1, 3, 5))
    assert make(nn.Sequential(Flat(*layers)))(torch.zeros(4, 1, 3, 5)).shape == (4, 2)


class Bands(Samples):
    """Signals whose positions are labelled by their sign; every fifth one is not."""

    def __init__(self, count: int) -> None:
        generator = torch.Generator().manual_seed(count)
        self.x = torch.randn(count, 1, 12, generator=generator)
        self.y = (self.x[:, 0] > 0).long()
        self.y[:, ::5] = -100
        self.y[10:24] = -100  # a whole batch, and parts of the next


def test_voxels_are_classified_and_reported_as_a_count_by_hand_gives(tmp_path) -> None:
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Conv1d(1, 4, 3, padding=1), nn.ReLU(), nn.Conv1d(4, 3, 1))
    names = ("low", "high", "never")
    sgd = partial(torch.optim.SGD, lr=0.5)
    module = Classifier(layers, num_classes=3, optimizer=sgd, class_names=names)
    run = trainer(tmp_path, max_epochs=4)
    run.fit(module, DataLoader(Bands(60), batch_size=10), DataLoader(Bands(25), batch_size=10))
    validated = {name: float(value) for name, value in run.callback_metrics.items()}
    test_set = Bands(25)
    logged = run.test(module, DataLoader(test_set, batch_size=10), verbose=False)[0]

    with torch.no_grad():
        logits = layers(test_set.x)
    seen, guess = test_set.y >= 0, logits.argmax(1)
    right = (guess == test_set.y)[seen].float().mean().item()
    overlaps = [((guess == k) & (test_set.y == k)).sum().item() for k in range(2)]
    unions = [(((guess == k) & seen) | (test_set.y == k)).sum().item() for k in range(2)]
    ious = [a / b for a, b in zip(overlaps, unions, strict=True)]
    assert right > 0.9
    assert logged["test/accuracy"] == validated["val/accuracy"] == pytest.approx(right)
    assert [logged["test/iou/low"], logged["test/iou/high"]] == pytest.approx(ious)
    assert "test/iou/never" not in logged
    assert logged["test/mean_iou"] == validated["val/mean_iou"] == pytest.approx(sum(ious) / 2)
    assert module.test_confusion.sum() == seen.sum()
    loss = nn.functional.cross_entropy(logits, test_set.y)
    assert logged["test/loss"] == pytest.approx(loss.item())
    (predicted, *_) = run.predict(module, DataLoader(test_set, batch_size=25))
    assert torch.equal(predicted["prediction"], guess)
    assert predicted["probability"].shape == test_set.y.shape


def banded(rank: int, tmp_path, **settings) -> tuple[torch.Tensor, dict[str, float]]:
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Conv1d(1, 4, 3, padding=1), nn.ReLU(), nn.Conv1d(4, 2, 1)).double()
    module = Classifier(layers, num_classes=2, optimizer=partial(torch.optim.SGD, lr=0.5))
    run = trainer(tmp_path, max_epochs=2, **settings)
    run.fit(module, DataLoader(Bands(40), batch_size=10), DataLoader(Bands(25), batch_size=5))
    logged = {name: float(run.callback_metrics[name]) for name in ("train/loss", "val/loss")}
    return layers.state_dict()["0.weight"], logged


def test_microbatches_without_labels_have_no_part_in_a_minibatch(tmp_path) -> None:
    expected, logged = banded(0, tmp_path)
    pipeline = SynchronousPipelineStrategy(microbatches=5, config="1-1", cuts=[2], timeout_s=60)
    for weight, told in processes.run(partial(banded, strategy=pipeline, devices=2), 2, tmp_path):
        torch.testing.assert_close(weight, expected, rtol=1e-9, atol=1e-12)
        assert told == pytest.approx(logged)


@pytest.mark.parametrize(
    ("layers", "label", "head"),
    [
        (nn.Sequential(nn.Conv1d(1, 3, 1)), torch.zeros(2, dtype=torch.int64), "classification"),
        (
            nn.Sequential(nn.Flatten(), nn.Linear(4, 3)),
            torch.zeros(2, 4, dtype=torch.int64),
            "segmentation",
        ),
    ],
)
def test_labels_that_do_not_go_with_the_head_are_refused(layers, label, head) -> None:
    module = Classifier(layers, num_classes=3, optimizer=torch.optim.SGD)
    batch = {"input": torch.zeros(2, 1, 4), "label": label, "index": torch.arange(2)}
    with pytest.raises(ConfigError, match="logits") as error:
        module.training_step(batch, 0)
    assert f"model.head={head}" in error.value.remedy


@pytest.mark.parametrize("interval", ["step", "epoch"])
def test_a_training_without_end_has_no_schedule_over_its_length(tmp_path, interval) -> None:
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR
    schedule = LRSchedule(factory=cosine, interval=interval, horizon="T_max")
    batches = DataLoader(Samples(20), batch_size=10)
    with pytest.raises(ConfigError, match=f"length in {interval}s") as error:
        trainer(tmp_path, max_epochs=-1).fit(classifier(schedule=schedule), batches)
    assert "trainer.max_epochs" in error.value.remedy
    constant = LRSchedule(factory=torch.optim.lr_scheduler.ConstantLR, interval=interval)
    endless = trainer(tmp_path, max_epochs=-1, max_time={"seconds": 0})
    endless.fit(classifier(schedule=constant), batches)


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


class Rates(pl.Callback):
    """Notes the learning rate of each epoch."""

    def __init__(self) -> None:
        self.seen: list[float] = []

    def on_train_epoch_start(self, trainer, pl_module) -> None:
        self.seen.append(trainer.optimizers[0].param_groups[0]["lr"])


def rates(
    tmp_path, schedule, *, epochs: int = 4, validated: bool = True, **settings
) -> list[float]:
    seen = Rates()
    run = trainer(tmp_path, max_epochs=epochs, callbacks=[seen], num_sanity_val_steps=0, **settings)
    loader = DataLoader(Samples(40), batch_size=20)
    run.fit(classifier(schedule=schedule), loader, loader if validated else None)
    return seen.seen


def test_a_scheduler_of_torch_counts_epochs(tmp_path) -> None:
    step = partial(torch.optim.lr_scheduler.StepLR, step_size=2, gamma=0.1)
    assert rates(tmp_path, step) == pytest.approx([0.3, 0.3, 0.03, 0.03])
    node = {"_target_": "torch.optim.lr_scheduler.StepLR", "_partial_": True, "step_size": 2}
    assert rates(tmp_path, node) == pytest.approx([0.3, 0.3, 0.03, 0.03])


def plateau(**settings):
    """Never satisfied: halves the rate after each epoch that it looks at."""
    return partial(
        torch.optim.lr_scheduler.ReduceLROnPlateau,
        patience=0,
        factor=0.5,
        threshold=1e6,
        **settings,
    )


def test_a_plateau_watches_the_validation(tmp_path) -> None:
    assert rates(tmp_path, plateau()) == pytest.approx([0.3, 0.15, 0.075, 0.0375])
    every = {"check_val_every_n_epoch": 2}
    assert rates(tmp_path, plateau(), **every) == pytest.approx([0.3, 0.3, 0.15, 0.15])
    built = LRSchedule(factory=plateau(mode="max")).build(
        classifier().make_optimizer([nn.Parameter(torch.ones(1))]), steps=8, epochs=4
    )
    assert (built["monitor"], built["interval"]) == ("val/accuracy", "epoch")
    watched = LRSchedule(factory=plateau(), monitor="train/loss")
    assert rates(tmp_path, watched, validated=False)[-1] == pytest.approx(0.0375)


def test_a_plateau_without_a_validation_is_refused(tmp_path) -> None:
    with pytest.raises(MisconfigurationException, match="val/loss"):
        rates(tmp_path, plateau(), validated=False)
    with pytest.raises(ConfigError, match="of the type int"):
        classifier(schedule=3)


def volumes(*sizes: int, count: int = 3) -> DataLoader:
    """Volumes one at a time, with labels of voxels and their spacing in mm."""
    generator = torch.Generator().manual_seed(sum(sizes))
    batches = [
        {
            "input": torch.randn(1, 1, *sizes, generator=generator),
            "label": torch.randint(3, (1, *sizes), generator=generator),
            "index": torch.tensor([number]),
            "spacing": torch.tensor([[1.0, 2.0, 3.0]]),
        }
        for number in range(count)
    ]
    return DataLoader(batches, batch_size=None)


def labelling(**settings) -> Classifier:
    torch.manual_seed(0)
    layers = models.unet3d(3, width=0.1, levels=2, deep_supervision=True)
    optimizer = partial(torch.optim.SGD, lr=0.1)
    return Classifier(layers, num_classes=3, optimizer=optimizer, **settings)


def test_volumes_are_evaluated_by_windows_of_the_patches_size(tmp_path) -> None:
    module = labelling(window=(6, 8, 4), dice=1.0)
    run = trainer(tmp_path, max_epochs=1)
    large = volumes(9, 10, 11)
    run.fit(module, volumes(6, 8, 4), large)
    assert 0 <= run.callback_metrics["val/mean_iou"] <= 1
    logged = run.test(module, large, verbose=False)[0]
    module.eval()
    batches, windows = [*large], Windows((6, 8, 4))
    with torch.no_grad():
        logits = [windows(module.layers, each["input"]) for each in batches]
        torch.testing.assert_close(module(batches[0]["input"]), logits[0], rtol=0, atol=0)
        patch = batches[0]["input"][..., :6, :8, :4]
        torch.testing.assert_close(module(patch), module.layers(patch), rtol=0, atol=0)
    right = torch.cat([(a.argmax(1) == b["label"]) for a, b in zip(logits, batches, strict=True)])
    assert logged["test/accuracy"] == pytest.approx(right.float().mean().item())
    cases = module.test_cases
    assert [*cases] == ["index", "dice", "iou", "surface_mm"]
    assert cases["index"].tolist() == [0, 1, 2]
    assert logged["test/mean_dice"] == pytest.approx(cases["dice"][:, 1:].mean().item())
    assert (module.test_predictions, module.counted) == (None, "voxels")


def test_the_objective_is_the_weighted_mean_over_all_resolutions() -> None:
    """The weighted losses are cross-entropy and soft Dice; metrics are those of the main logits."""
    module = labelling(dice=0.5, class_weights=[1.0, 2.0, 3.0])
    logged = {}
    module.log = lambda name, value, **_: logged.update({name: value})
    (batch,) = volumes(5, 6, 7, count=1)
    given = [torch.randn(1, 3, 5, 6, 7, requires_grad=True) for _ in range(3)]
    module.forward = lambda _: tuple(given)
    found = module.training_step(batch, 0)["loss"]
    label, weights = batch["label"], torch.tensor([1.0, 2.0, 3.0])
    losses = [F.cross_entropy(a, label, weights) + 0.5 * soft_dice(a, label) for a in given]
    expected = (losses[0] + losses[1] / 2 + losses[2] / 4) / 1.75
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(logged["train/objective"], expected.detach())
    torch.testing.assert_close(logged["train/loss"], F.cross_entropy(given[0], label).detach())
    share = (given[0].argmax(1) == label).float().mean()
    torch.testing.assert_close(module.train_accuracy.compute(), share)
