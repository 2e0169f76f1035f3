"""The VGG family: layer lists, sizes, and the same layout in both forms."""

from __future__ import annotations

import pytest
import torch

from sparsepipe import models
from sparsepipe.sparse import SparseTensor

# The authors' measured network (52 entries), as kinds in order.
VGG16_KINDS = (
    ["conv", "norm", "relu"] * 2
    + ["pool"]
    + ["conv", "norm", "relu"] * 2
    + ["pool"]
    + (["conv", "norm", "relu"] * 3 + ["pool"]) * 3
    + ["global", "linear", "relu", "dropout", "linear", "relu", "dropout", "linear"]
)


def kind(layer: torch.nn.Module) -> str:
    name = type(layer).__name__.lower()
    for word, result in (("global", "global"), ("conv", "conv"), ("norm", "norm")):
        if word in name:
            return result
    return next(w for w in ("relu", "pool", "linear", "dropout") if w in name)


@pytest.mark.parametrize("form", ["sparse", "dense"])
def test_vgg16_is_the_papers_list_of_52_layers(form: str) -> None:
    network = getattr(models, f"{form}_vgg16_bn")(40, width=0.05)
    assert [kind(layer) for layer in network] == VGG16_KINDS


@pytest.mark.parametrize(("depth", "entries"), [(11, 37), (13, 43), (16, 52), (19, 61)])
def test_depths(depth: int, entries: int) -> None:
    for form in ("sparse", "dense"):
        assert len(getattr(models, f"{form}_vgg{depth}_bn")(10, width=0.05)) == entries


def test_parameter_bytes_are_those_of_the_authors_profile() -> None:
    # parameter_size column of the authors' measurements: first two convolutions, first
    # norm, the three linear layers (fp32 bytes).
    with torch.device("meta"):
        network = models.sparse_vgg16_bn(40)
    sizes = [sum(4 * p.numel() for p in layer.parameters()) for layer in network]
    assert sizes[0] == 6912
    assert sizes[1] == 512
    assert sizes[3] == 442368
    assert [sizes[45], sizes[48], sizes[51]] == [8404992, 67125248, 655520]


def test_on_a_full_grid_the_sparse_network_is_the_dense_one() -> None:
    torch.manual_seed(0)
    dense, sparse = (
        getattr(models, f"{form}_vgg16_bn")(5, in_channels=3, width=0.1).double().eval()
        for form in ("dense", "sparse")
    )
    for theirs, ours in zip(dense, sparse, strict=True):
        state = theirs.state_dict()
        if kind(theirs) == "conv":
            # [D, C, X, Y, Z] to [K, C, D], x fastest
            state = {"kernel": state["weight"].permute(4, 3, 2, 1, 0).flatten(0, 2)}
        elif kind(theirs) == "norm":
            theirs.running_mean.normal_(std=0.1)
            theirs.running_var.uniform_(0.5, 2)
            state = theirs.state_dict()
        ours.load_state_dict(state)
    x = torch.randn(2, 3, 11, 11, 11, dtype=torch.float64)  # odd on the way down: 11, 6, 3, 2, 1
    sparse_x = SparseTensor.from_dense(x)
    assert len(sparse_x) == 2 * 11**3
    with torch.no_grad():
        expected = dense(x)
        torch.testing.assert_close(sparse(sparse_x), expected, rtol=1e-10, atol=1e-12)
    assert expected.std() > 1e-3  # no dead network: the comparison says something
