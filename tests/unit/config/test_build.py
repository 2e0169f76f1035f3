"""Networks and data that do not fit together are refused before a training begins."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from sparsepipe.config.build import build_data, build_module, refuse_further_outputs
from sparsepipe.errors import ConfigError
from sparsepipe.models.windows import Windows
from tests.support.command_line import composed

FEW = ("data.source.train_samples=2", "data.source.test_samples=1", "data.source.sizes=[8,8,8]")
IMAGES = ("data.source.train_images=20", "data.source.test_images=10")
DATA: dict[str, tuple[tuple[str, ...], int, str, tuple[str, ...]]] = {
    "shapes": (("data.representation=sparse",), 1, "sparse_vgg11_bn", ("cnn3d", "cnn2d")),
    "digits": (IMAGES, 1, "cnn_5x5", ("cnn3d",)),
    "volumes": ((*FEW, "data.source.channels=2"), 2, "cnn3d", ("cnn2d", "sparse_vgg11_bn")),
}


@pytest.mark.parametrize("group", DATA)
def test_channels_and_dimensions_are_those_of_the_samples(tmp_path: Path, group: str) -> None:
    overrides, channels, model, wrong = DATA[group]
    place = (f"paths.data={tmp_path}", f"paths.cache={tmp_path}", "scale=smoke")
    if group == "shapes":
        place = (*place, "data.source.classes=[mug,chair]", "data.source.train_per_class=1")
    fitting = (f"data={group}", *overrides, *place, f"model.in_channels={channels}")
    given = (*fitting[:-1], f"model={model}")
    spec = composed(*fitting, f"model={model}")
    data = build_data(spec)
    assert build_module(spec, data) is not None
    kinds = {"shapes": "sparse", "digits": "dense 2D", "volumes": "dense 3D"}
    for other in wrong:
        with pytest.raises(
            ConfigError, match=f"the network is .*, but its input is {kinds[group]}"
        ):
            build_module(composed(*fitting, f"model={other}"), data)
    with pytest.raises(ConfigError, match=r"model\.in_channels=6, but ") as caught:
        build_module(composed(*given, "model.in_channels=6"), data)
    assert caught.value.remedy == f"set model.in_channels={channels}"
    said = {"shapes": "no normals or colours", "volumes": "have 2 channels"}
    assert said.get(group, "have 1 channel") in caught.value.message


def test_a_network_has_all_classes_of_the_data() -> None:
    given = ("data=digits", "model=cnn_5x5", "data.source.train_images=20")
    data = build_data(composed(*given, "data.source.test_images=10"))
    with pytest.raises(ConfigError, match=r"model\.num_classes=6, but the data have 10 classes"):
        build_module(composed(*given, "model.num_classes=6"), data)
    equal, more = (composed(*given, f"model.num_classes={n}") for n in (10, 12))
    refuse_further_outputs(equal, data, build_module(equal, data))
    module = build_module(more, data)  # as where it is profiled
    with pytest.raises(ConfigError, match=r"model\.num_classes=12, but the data have 10 classes"):
        refuse_further_outputs(more, data, module)


@pytest.mark.parametrize("labels", ["sample", "voxel"])
def test_balanced_weights_give_all_classes_equal_shares_of_the_loss(
    tmp_path: Path, labels: str
) -> None:
    place = (f"paths.data={tmp_path}", f"paths.cache={tmp_path}", f"data.labels={labels}")
    few = (*FEW[1:], "data.source.train_samples=6")
    given = ("data=volumes", "model=unet3d", "model.levels=2", "model.width=0.1", *few, *place)
    data = build_data(spec := composed(*given, "loss.class_weights=balanced"))
    seen = np.concatenate(
        [np.ravel(data._dataset("train", np.arange(6))[n]["label"]) for n in range(6)]
    )
    counts_K = np.bincount(seen, minlength=data.num_classes)
    module = build_module(spec, data)
    expected = [seen.size / (counts_K > 0).sum() / count if count else 0 for count in counts_K]
    assert module.class_weights_K.tolist() == pytest.approx(expected)
    assert module.hparams["class_weights"] == pytest.approx(expected)
    assert "class_weights" not in build_module(composed(*given), data).hparams
    with pytest.raises(ConfigError, match="1 class weights are given"):
        build_module(composed(*given, "loss.class_weights=[2]"), data)


def test_a_module_with_a_loss_of_its_own_takes_no_settings_of_another() -> None:
    data: Any = SimpleNamespace(classes=("a", "b"), domains=("one", "two"))
    with pytest.raises(ConfigError, match="has a loss of its own"):
        build_module(composed("model=dsn_2d", "data=digit_domains", "loss.lovasz=1"), data)


def test_patches_are_windows_in_evaluation_except_where_ranks_share_a_network_or_samples() -> None:
    data: Any = SimpleNamespace(classes=("a", "b"), patch=(8, 6, 4))
    given = ("data=volumes", "model=unet3d", "model.width=0.1", "data.labels=voxel")
    for parallel in ("single", "dp"):
        module: Any = build_module(composed(*given, f"parallel={parallel}"), data)
        assert module.windows == Windows((8, 6, 4))
        assert module.hparams["window"] == [8, 6, 4]
    for parallel in ("spatial", "pipeline", "sync_1f1b", "hete_mp"):
        with pytest.raises(ConfigError, match=r"data\.patch cannot be combined"):
            build_module(composed(*given, f"parallel={parallel}"), data)
