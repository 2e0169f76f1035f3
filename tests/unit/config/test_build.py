"""Networks and data that do not fit together are refused before a training begins."""

from __future__ import annotations

from pathlib import Path

import pytest

from sparsepipe.config.build import build_data, build_module, refuse_further_outputs
from sparsepipe.errors import ConfigError
from tests.support.command_line import composed

FEW = ("data.source.train_samples=2", "data.source.test_samples=1", "data.source.sizes=[8,8,8]")
DATA: dict[str, tuple[tuple[str, ...], int]] = {
    "shapes": (("model.width=0.1",), 1),
    "digits": (
        ("model=cnn_5x5", "data.source.train_images=20", "data.source.test_images=10"),
        1,
    ),
    "volumes": (("model=cnn3d", "model.width=0.1", *FEW, "data.source.channels=2"), 2),
}


@pytest.mark.parametrize("group", DATA)
def test_channels_are_those_of_the_samples(tmp_path: Path, group: str) -> None:
    overrides, channels = DATA[group]
    place = (f"paths.data={tmp_path}", f"paths.cache={tmp_path}", "scale=smoke")
    if group == "shapes":
        place = (*place, "data.source.classes=[mug,chair]", "data.source.train_per_class=1")
    given = (f"data={group}", *overrides, *place)
    spec = composed(*given, f"model.in_channels={channels}")
    data = build_data(spec)
    assert build_module(spec, data) is not None
    with pytest.raises(ConfigError, match=r"model\.in_channels=6, but ") as caught:
        build_module(composed(*given, "model.in_channels=6"), data)
    assert caught.value.remedy == f"set model.in_channels={channels}"
    said = {"shapes": "no normals or colours", "volumes": "have 2 channels"}
    assert said.get(group, "have 1 channel") in caught.value.message


@pytest.mark.parametrize(
    ("data", "model"),
    [
        (("data=volumes", *FEW), "cnn2d"),
        (("data=volumes", *FEW), "sparse_vgg11_bn"),
        (("data=volumes", *FEW[:2], "data.source.sizes=[8,8]", "data.labels=voxel"), "unet3d"),
        (("data=digits", "data.source.train_images=20", "data.source.test_images=10"), "cnn3d"),
        (("data=shapes", "data.representation=sparse"), "cnn3d"),
    ],
)
def test_dimensions_are_those_of_the_samples(
    tmp_path: Path, data: tuple[str, ...], model: str
) -> None:
    spec = composed(*data, f"model={model}", "scale=smoke", f"paths.cache={tmp_path}")
    kind = {"volumes": "dense [23]D", "digits": "dense 2D", "shapes": "sparse"}[data[0][5:]]
    with pytest.raises(ConfigError, match=f"the network is .*, but its input is {kind}"):
        build_module(spec, build_data(spec))


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
