"""Losses of counts are those of the points; Lovász-Softmax beside its definition by sets."""

from __future__ import annotations

from functools import partial

import pytest
import pytorch_lightning as pl
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sparsepipe.errors import ConfigError
from sparsepipe.models import Classifier
from sparsepipe.models.losses import lovasz_softmax, mean_loss, soft_dice
from sparsepipe.models.metrics import IGNORED
from sparsepipe.sparse import Conv3d, ReLU, SparseTensor, sparse_collate
from sparsepipe.strategies import SynchronousPipelineStrategy
from tests.support import processes
from tests.support.labelled_points import CLASSES, points_in_voxels

WEIGHTS = torch.tensor([0.5, 2.0, 0.0, 1.5], dtype=torch.float64)


def gradient(loss: Tensor, of: Tensor) -> Tensor:
    (found,) = torch.autograd.grad(loss, of, retain_graph=True)
    return found


@pytest.mark.parametrize("weights", [None, WEIGHTS])
@pytest.mark.parametrize("smoothing", [0.0, 0.2])
@pytest.mark.parametrize("form", ["counts", "points"])
def test_the_cross_entropy_is_torch_s_of_the_points(weights, smoothing, form) -> None:
    for seed in range(3):
        scene = points_in_voxels(seed)
        logits_NK = scene.logits_NK.requires_grad_()
        logits_PK = logits_NK[scene.rows_P]
        given = (logits_NK, scene.counts_NK) if form == "counts" else (logits_PK, scene.labels_P)
        if form == "points":  # as voxels, of which some are ignored
            given = logits_PK.T[None], scene.labels_P[None]
        mine, total = mean_loss(*given, class_weights_K=weights, label_smoothing=smoothing)
        theirs = F.cross_entropy(logits_PK, scene.labels_P, weights, label_smoothing=smoothing)
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=0)
        torch.testing.assert_close(
            gradient(mine, logits_NK), gradient(theirs, logits_NK), rtol=1e-10, atol=1e-14
        )
        seen_P = scene.labels_P[scene.labels_P != IGNORED]
        assert total == pytest.approx(
            float(torch.ones(CLASSES)[seen_P].sum() if weights is None else weights[seen_P].sum())
        )


def jaccard_loss(mispredicted: set[int], of_class: set[int]) -> float:
    """1 - IoU of a class whose prediction errs in these points."""
    return 1 - len(of_class - mispredicted) / len(of_class | mispredicted)


def lovasz_by_sets(shares_PK: Tensor, labels_P: Tensor) -> Tensor:
    """The Lovász extension by its definition: point by point, from the largest error on."""
    losses = []
    seen = [p for p, label in enumerate(labels_P.tolist()) if label != IGNORED]
    for k in {int(labels_P[p]) for p in seen}:
        of_class = {p for p in seen if labels_P[p] == k}
        error = {p: 1 - shares_PK[p, k] if p in of_class else shares_PK[p, k] for p in seen}
        total, wrong = torch.zeros((), dtype=shares_PK.dtype), set[int]()
        for p in sorted(seen, key=lambda p: -error[p].item()):
            before = jaccard_loss(wrong, of_class) if wrong else 0.0
            wrong.add(p)
            total = total + error[p] * (jaccard_loss(wrong, of_class) - before)
        losses.append(total)
    return torch.stack(losses).mean()


@pytest.mark.parametrize("seed", range(4))
def test_lovasz_of_counts_is_that_of_the_points_by_its_definition(seed) -> None:
    scene = points_in_voxels(seed)
    logits_NK = scene.logits_NK.requires_grad_()
    expected = lovasz_by_sets(logits_NK.softmax(1)[scene.rows_P], scene.labels_P)
    as_voxels = logits_NK[scene.rows_P].T[None], scene.labels_P[None]
    for found in (lovasz_softmax(logits_NK, scene.counts_NK), lovasz_softmax(*as_voxels)):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-14)
        torch.testing.assert_close(
            gradient(found, logits_NK), gradient(expected, logits_NK), rtol=1e-10, atol=1e-13
        )


def dice_by_points(shares_PK: Tensor, labels_P: Tensor) -> Tensor:
    """The mean over the classes that occur, one after the other."""
    shares_PK, labels_P = shares_PK[labels_P != IGNORED], labels_P[labels_P != IGNORED]
    losses = []
    for k in labels_P.unique():
        truth_P = (labels_P == k).double()
        both = (truth_P * shares_PK[:, k]).sum()
        losses.append(1 - 2 * both / (truth_P.sum() + shares_PK[:, k].sum()))
    return torch.stack(losses).mean()


@pytest.mark.parametrize("seed", range(3))
def test_dice_of_counts_and_of_voxels_is_that_of_the_points(seed) -> None:
    scene = points_in_voxels(seed)
    logits_NK = scene.logits_NK.requires_grad_()
    logits_PK = logits_NK[scene.rows_P]
    expected = dice_by_points(logits_PK.softmax(1), scene.labels_P)
    as_voxels = logits_PK.T[None], scene.labels_P[None]
    given = ((logits_NK, scene.counts_NK), as_voxels, (logits_PK, scene.labels_P))
    for found in (soft_dice(*each) for each in given):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-14)
        torch.testing.assert_close(
            gradient(found, logits_NK), gradient(expected, logits_NK), rtol=1e-10, atol=1e-13
        )


def test_a_perfect_prediction_has_no_dice_loss_and_a_wrong_one_all_of_it() -> None:
    label = torch.tensor([[0, 1, 1, IGNORED]])
    logits = 100.0 * F.one_hot(label.clamp(min=0), 3).movedim(-1, 1)
    assert soft_dice(logits, label).item() == pytest.approx(0)
    assert soft_dice(logits.roll(1, 1), label).item() == pytest.approx(1)


def test_without_labels_losses_are_zero_and_have_gradients() -> None:
    logits_NK = torch.randn(3, CLASSES, requires_grad=True)
    for label in (torch.zeros(3, CLASSES), torch.full((3, 1), IGNORED)):
        logits = logits_NK if label.is_floating_point() else logits_NK[:, :, None]
        loss, total = mean_loss(logits, label)
        assert (loss.item(), total) == (0, 0)
        loss = loss + lovasz_softmax(logits, label) + soft_dice(logits, label)
        assert not gradient(loss, logits_NK).any()
        assert loss.item() == 0


def scene(seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Sites [n, 3], features [n, 2] and counts [n, K]; the first scene has no labels."""
    generator = torch.Generator().manual_seed(seed)
    sites_n3 = torch.unique(torch.randint(6, (30 + seed, 3), generator=generator), dim=0)
    feats_n2 = torch.randn(len(sites_n3), 2, generator=generator)
    counts_nK = torch.randint(3, (len(sites_n3), CLASSES), generator=generator).float()
    return sites_n3, feats_n2, counts_nK * bool(seed)


def batch_of(*seeds: int, dtype: torch.dtype = torch.float64) -> dict[str, object]:
    scenes = [scene(seed) for seed in seeds]
    x = sparse_collate(
        [(sites, feats.to(dtype)) for sites, feats, _ in scenes], spatial_shape=(6, 6, 6)
    )
    counts_NK = torch.cat([counts for *_, counts in scenes])
    label = SparseTensor(counts_NK, x.coords, spatial_shape=(6, 6, 6), batch_size=len(seeds))
    return {"input": x, "label": label, "index": torch.tensor(seeds)}


def labelling(**settings) -> Classifier:
    torch.manual_seed(0)
    layers = nn.Sequential(Conv3d(2, 5), ReLU(), Conv3d(5, CLASSES)).double()
    return Classifier(
        layers, num_classes=CLASSES, optimizer=partial(torch.optim.SGD, lr=0.2), **settings
    )


def trained(
    rank: int, tmp_path, dtype, module_settings, **settings
) -> tuple[Tensor, dict[str, float]]:
    module = labelling(**module_settings)
    run = pl.Trainer(
        default_root_dir=tmp_path,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        max_epochs=2,
        **settings,
    )
    batches = [batch_of(*seeds, dtype=dtype) for seeds in ((0, 1, 2, 3), (4, 5, 6))]
    loader = torch.utils.data.DataLoader(batches, batch_size=None, collate_fn=lambda each: each)
    run.fit(module, loader, loader)
    logged = {name: float(value) for name, value in run.callback_metrics.items()}
    run.test(module, loader, verbose=False)
    tested = {name: float(value) for name, value in run.callback_metrics.items()}
    return module.layers.state_dict()["0.kernel"], logged | tested


@pytest.mark.parametrize(
    ("dtype", "settings"),
    [(torch.float64, {"class_weights": WEIGHTS.tolist()}), (torch.float32, {})],
)
def test_a_pipeline_labels_scenes_as_one_device_does(tmp_path, dtype, settings) -> None:
    """In microbatches of unlike numbers of points, one of which has no labels; with labels on the
    sites of an input that the first stage keeps, or casts.
    """
    expected, logged = trained(0, tmp_path, dtype, settings)
    assert {"val/mean_iou", "val/class_accuracy", "test/iou/3", "test/class_accuracy"} <= set(
        logged
    )
    strategy = SynchronousPipelineStrategy(microbatches=3, config="1-1", cuts=[2], timeout_s=60)
    given = {"dtype": dtype, "module_settings": settings}
    work = partial(trained, **given, strategy=strategy, devices=2)
    for weight, told in processes.run(work, 2, tmp_path):
        if weight is not None:
            torch.testing.assert_close(weight, expected, rtol=1e-9, atol=1e-12)
        told.pop("train/loss_step", None), told.pop("train/accuracy_step", None)
        assert told == pytest.approx({name: logged[name] for name in told})


def test_a_scene_without_logits_of_its_voxels_is_refused() -> None:
    batch = batch_of(1, 2)
    strided = nn.Sequential(Conv3d(2, CLASSES, 2, stride=2))
    module = Classifier(strided, num_classes=CLASSES, optimizer=torch.optim.SGD)
    with pytest.raises(ConfigError, match="labels of points in"):
        module.training_step(batch, 0)
    with pytest.raises(ConfigError, match="3 class weights"):
        labelling(class_weights=[1.0, 2.0, 3.0])
