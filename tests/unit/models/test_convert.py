"""Weights of other libraries: what they compute in spconv itself, and where they belong."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sparsepipe import models, sparse
from sparsepipe.errors import CheckpointError, ConfigError
from sparsepipe.models.convert import converted, library_of
from sparsepipe.runs.checkpoints import load_weights
from sparsepipe.runs.rundir import RunDir
from tests.support.masked_networks import batch, random_norms
from tests.support.spconv_unet import SpconvUNet

CHANNELS = (8, 12, 16, 20, 20, 16, 12, 10)
SHAPED = {"channels": CHANNELS, "stem_channels": 8, "in_channels": 3}
BLOCKS = (2, 1, 1, 1, 1, 1, 1, 2)


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("widening", ["downsampling", "block"])
def test_a_network_of_spconv_computes_here_what_it_does_there(widening: str) -> None:
    """Logits and gradients, on a grid whose sizes are even at each level."""
    torch.manual_seed(0)
    is_wide = widening == "downsampling"
    peer = SpconvUNet(
        3, 5, channels=CHANNELS, blocks=BLOCKS, base=8, wide_down=is_wide, eps=1e-3
    ).double()
    random_norms(peer)
    net = models.sparse_unet(5, blocks=BLOCKS, widening=widening, norm_eps=1e-3, **SHAPED).double()
    net.load_state_dict(converted(peer.state_dict(), net))
    x = batch(grid=32, share=0.05)
    ours, theirs = net(x).feats, peer(x)
    weight = torch.randn_like(ours)
    for logits in (ours, theirs):
        (logits * weight).sum().backward()
    gradients = {name: each.grad for name, each in peer.named_parameters()}
    expected = converted({**peer.state_dict(), **gradients}, net)
    pairs = {name: (each.grad, expected[name]) for name, each in net.named_parameters()}
    for name, (one, other) in {"logits": (ours, theirs), **pairs}.items():
        assert (one - other).abs().max() <= 1e-10 * other.abs().max(), name


def block_names(first: str, layers: list[str], shortcut: str, *, widens: bool) -> list[str]:
    return [f"{first}{each}" for each in layers] + widens * [
        f"{first}{shortcut}.0",
        f"{first}{shortcut}.1",
    ]


def minkowski_names() -> list[str]:
    """Layers of MinkUNet14 in the order of MinkowskiEngine's examples/minkunet.py."""
    found = ["conv0p1s1", "bn0.bn"]
    layers = ["conv1", "norm1.bn", "conv2", "norm2.bn"]
    for level in range(8):
        stride = 2**level if level < 4 else 2 ** (8 - level)
        kind = "" if level < 4 else "tr"
        number = level + 1 if level < 4 else level
        found += [f"conv{kind}{number}p{stride}s2", f"bn{kind}{number}.bn"]
        # the first level has as many channels as the stem, all others change or join them
        names = block_names(f"block{level + 1}.0.", layers, "downsample", widens=level > 0)
        found += [f"{n}.bn" if n.endswith("downsample.1") else n for n in names]
    return [*found, "final"]


def torchsparse_names() -> list[str]:
    """Layers of the MinkUNet of SPVNAS, on torchsparse, with one block a level."""
    found = ["stem.0", "stem.1", "stem.3", "stem.4"]
    layers = ["net.0", "net.1", "net.3", "net.4"]
    for level in range(8):
        stage = f"stage{level + 1}" if level < 4 else f"up{level - 3}"
        found += [f"{stage}.0.net.0", f"{stage}.0.net.1"]
        first = f"{stage}.1." if level < 4 else f"{stage}.1.0."
        found += block_names(first, layers, "downsample", widens=level > 0)
    return [*found, "classifier.0"]


def our_names(stem: int) -> list[str]:
    """Layers of the same network here: 17 entries with weights, and a last layer."""
    found = [f"0.0.{3 * n + k}" for n in range(stem) for k in (0, 1)]
    for level in range(8):
        entry = 2 * level + 1
        found += [f"{entry}.0.0", f"{entry}.0.1"] if level < 4 else [f"{entry}.up", f"{entry}.norm"]
        layers = ["main.0", "main.1", "main.3", "main.4"]
        found += block_names(f"{entry + 1}.0.", layers, "shortcut", widens=level > 0)
    return [*found, "18"]


def theirs_of(library: str, net: nn.Module, names: list[str], ours: list[str]) -> dict[str, Tensor]:
    """The state of ``net`` as the library has it."""
    state, found = net.state_dict(), {}
    for name, own in zip(names, ours, strict=True):
        for key in (key for key in state if key.rpartition(".")[0] == own):
            value, leaf = state[key], key.rpartition(".")[2]
            if leaf == "kernel":
                if library == "torchsparse" and len(value) == 8:
                    value = value[[0, 4, 2, 6, 1, 5, 3, 7]]  # z fastest, where ours has x
                value = value[0] if len(value) == 1 else value
            elif own == "18" and library == "minkowski":
                value = value[None] if leaf == "bias" else value.t()
                leaf = "kernel" if leaf == "weight" else leaf
            found[f"{name}.{leaf}"] = value.clone()
    return found


@pytest.mark.parametrize("library", ["minkowski", "torchsparse"])
def test_layers_of_other_libraries_arrive_at_their_places(library: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    stem, names = (
        ((5,), minkowski_names()) if library == "minkowski" else ((3, 3), torchsparse_names())
    )
    make: Any = lambda: models.minkunet14(4, width=0.2, in_channels=3, stem=stem)  # noqa: E731
    source, module = make(), nn.ModuleDict({"layers": make()})
    weights = theirs_of(library, source, names, our_names(len(stem)))
    assert len(weights) == len(source.state_dict())
    if library == "torchsparse":  # or ours under other names, whose offsets have x fastest
        with pytest.raises(CheckpointError, match=r"stage1\.0\.net\.0\.kernel") as caught:
            load_weights(module, weights, tmp_path / "net.pt", strict=False)
        assert "converted(weights, network, library=" in caught.value.remedy
        module.load_state_dict(converted(weights, module, library=library))
    else:
        loaded = load_weights(module, weights, tmp_path / "net.pt")
        assert loaded.complete
        assert library in str(loaded)
    for name, value in source.state_dict().items():
        assert torch.equal(module["layers"].state_dict()[name], value), name


class Unit(nn.Module):
    """A convolution and its norm, with the names that torchsparse's users give them."""

    def __init__(self, before: int, after: int) -> None:
        super().__init__()
        self.conv, self.bn = sparse.Conv3d(before, after), sparse.BatchNorm(after)


def test_norms_beside_convolutions_are_not_those_of_minkowski_engine(tmp_path: Path) -> None:
    units = nn.Sequential(Unit(2, 4), Unit(4, 4))
    assert library_of(units.state_dict()) == "torchsparse"
    module = nn.Sequential(sparse.Conv3d(2, 4), sparse.BatchNorm(4))
    module.extend([sparse.Conv3d(4, 4), sparse.BatchNorm(4)])
    assert load_weights(module, units.state_dict(), tmp_path / "units.pt").complete
    own = tmp_path / "run" / "checkpoints"
    own.mkdir(parents=True)
    RunDir(own.parent).config.touch()
    with pytest.raises(CheckpointError, match="is of another model"):
        load_weights(module, units.state_dict(), own / "best.ckpt")


@pytest.mark.parametrize("names", [("encoder", "decoder", "final"), ("enc1", "down1", "up1")])
def test_only_spunet_has_coordinates_in_another_order(names: tuple[str, ...]) -> None:
    """Other networks of spconv have theirs as (z, y, x), whatever their layers are called."""
    layers = [sparse.Conv3d(2, 4), sparse.Conv3d(4, 4), sparse.Conv3d(4, 3)]
    net = nn.Sequential(*layers)
    weights = {
        f"{name}.weight": layer.kernel.detach().unflatten(0, (3, 3, 3)).permute(4, 0, 1, 2, 3)
        for name, layer in zip(names, layers, strict=True)
    }  # x is fastest, and last
    for name, value in converted(weights, net).items():
        assert torch.equal(value, net.state_dict()[name])


def test_networks_of_other_layers_are_refused(tmp_path: Path) -> None:
    small = models.minkunet14(4, width=0.2, in_channels=3)
    weights = theirs_of("minkowski", small, minkowski_names(), our_names(1))
    large = models.minkunet18(4, width=0.2, in_channels=3)
    with pytest.raises(ConfigError, match="the weights are those of 65 layers"):
        converted(weights, large)
    with pytest.raises(CheckpointError, match="is of another model"):
        load_weights(large, weights, tmp_path / "net.pt")
    other = models.minkunet14(4, width=0.2, in_channels=3, stem=(3,))
    with pytest.raises(ConfigError, match=r"conv0p1s1 has 125 offsets, but 0\.0\.0 in its place"):
        converted(weights, other)
    fewer = nn.ModuleDict({"layers": models.minkunet14(7, width=0.2, in_channels=3)})
    loaded = load_weights(fewer, weights, tmp_path / "net.pt", strict=False)
    assert [row[0] for row in loaded.rows if row[2] != "loaded"] == [
        "layers.18.weight",
        "layers.18.bias",
    ]
