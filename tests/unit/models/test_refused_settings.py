"""Settings of networks, losses and schedules that are refused, each with its name and a remedy."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from sparsepipe import models
from sparsepipe.errors import ConfigError
from sparsepipe.models import Classifier, DomainLosses, LRSchedule
from sparsepipe.models.resnet import sparse_resnet

DSN = partial(models.dsn_2d, 3, decoded=(8, 8))


@pytest.mark.parametrize(
    "make",
    [
        *("sparse_vgg16_bn", "sparse_resnet18", "cnn_5x5", "cnn2d", "fcn2d"),
        *("unet3d", "densenet3d", "convnext_tiny"),
    ],
)
@pytest.mark.parametrize("wrong", [{"width": 0}, {"in_channels": 0}, {"num_classes": 0}], ids=str)
def test_sizes_that_networks_share(make: str, wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"model.{next(iter(wrong))}=") as error:
        getattr(models, make)(**{"num_classes": 10, **wrong})
    assert error.value.remedy


@pytest.mark.parametrize(
    ("make", "wrong"),
    [
        *((make, {"head": "boxes"}) for make in ("cnn1d", "fcn2d", "unet3d", "densenet3d")),
        *((make, {"dropout": 1.0}) for make in ("cnn3d", "fcn2d", "unet3d", "sparse_vgg11_bn")),
        ("cnn_5x5", {"convolutions": 0}),
        ("cnn2d", {"levels": 0}),
        ("cnn2d", {"convolutions": 0}),
        ("cnn2d", {"kernel_size": 4}),
        ("unet3d", {"levels": 1}),
        ("densenet3d", {"blocks": ()}),
        ("densenet3d", {"blocks": (3, 0)}),
        ("convnext_tiny", {"stochastic_depth": 1.0}),
        ("convnext_tiny", {"blocks": (1, 2)}),
        ("convnext_tiny", {"blocks": (1, 2, 0, 1)}),
    ],
)
def test_settings_of_a_network(make: str, wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"model.{next(iter(wrong))}=") as error:
        getattr(models, make)(10, **wrong)
    assert error.value.remedy


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: sparse_resnet(20, 10), "model.depth=20"),
        (lambda: DSN(domains=["a"]), "model.domains='a'"),
        (lambda: DSN(domains=["a", "b/c"]), "model.domains='a, b/c'"),
        (lambda: DSN(domains=["a", "b"], norm="batch"), "model.norm='batch'"),
        (lambda: models.dsn_2d(3, domains=["a", "b"], decoded=(8,)), "model.decoded="),
        (lambda: DomainLosses(alpha=-1.0), "model.losses.alpha=-1.0"),
        (lambda: DomainLosses(similarity="coral"), "model.losses.similarity='coral'"),  # type: ignore[arg-type]
        (
            lambda: Classifier(nn.Sequential(), num_classes=1, optimizer=torch.optim.SGD),
            "num_classes=1",
        ),
        (lambda: LRSchedule(factory=partial, interval="minute"), "minute"),  # type: ignore[arg-type]
        (
            lambda: Classifier(
                nn.Sequential(nn.Linear(1, 2)),
                num_classes=2,
                optimizer=partial(torch.optim.SGD, lr=-0.1),
            ).configure_optimizers(),
            "-0.1",
        ),
    ],
)
def test_other_settings(make: Any, named: str) -> None:
    with pytest.raises(ConfigError) as error:
        make()
    assert named in error.value.message
    assert error.value.remedy
