"""SmartProfile against what is known of layers, on real networks."""

from __future__ import annotations

from typing import ClassVar

import pytest
import torch
from torch import Tensor, nn

from sparsepipe import sparse
from sparsepipe.errors import ProfileError
from sparsepipe.models.vgg import sparse_vgg
from sparsepipe.profiling.measure import measure
from sparsepipe.sparse import SparseTensor, sparse_collate

CPU = torch.device("cpu")


def sparse_batch(seed: int) -> SparseTensor:
    generator = torch.Generator().manual_seed(seed)
    sites = [
        torch.unique(torch.randint(0, 16, (200, 3), generator=generator), dim=0) for _ in range(2)
    ]
    return sparse_collate([(s, torch.ones(len(s), 1)) for s in sites], spatial_shape=(16,) * 3)


def test_sizes_of_a_dense_net_by_hand() -> None:
    net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))
    found = measure(net, [torch.randn(5, 8)], device=CPU, num_warmup=0, num_measured=1)
    assert [layer.kind for layer in found.layers] == ["Linear", "ReLU", "Linear"]
    assert [layer.parameter_bytes for layer in found.layers] == [4 * (8 * 16 + 16), 0, 4 * 34]
    assert [layer.activation_bytes for layer in found.layers] == [4 * 5 * n for n in (16, 16, 2)]
    assert found.input_bytes == 4 * 5 * 8
    # A linear layer keeps its input, ReLU its output, which the next layer's input is.
    assert [layer.saved_bytes for layer in found.layers] == [4 * 5 * 8, 4 * 5 * 16, 0]


def test_a_sparse_net_stays_as_it_was_and_its_profile_is_complete() -> None:
    net = sparse_vgg(11, 10, width=1 / 16, dropout=0.5)
    net.eval()
    before = {name: value.clone() for name, value in net.state_dict().items()}
    batches = [sparse_batch(seed) for seed in range(2)]
    found = measure(net, batches, device=CPU, num_warmup=1, num_measured=4, meta={"model": "vgg"})
    assert found.num_layers == len(net)
    assert not net.training
    assert all(torch.equal(before[name], value) for name, value in net.state_dict().items())
    assert all(parameter.grad is None for parameter in net.parameters())
    first = found.layers[0]
    assert first.kind == "Conv3d"
    coords = sum(batch.coords.nbytes for batch in batches) / 2
    feats = sum(batch.feats.shape[0] * 4 for batch in batches) / 2 * net[0].kernel.shape[2]
    assert first.activation_bytes == coords + feats
    by_kind = {kind: [] for kind in ("Conv3d", "ReLU", "BatchNorm", "MaxPool3d")}
    for layer in found.layers:
        by_kind.setdefault(layer.kind, []).append(layer.kernel_map_s)
    assert first.kernel_map_s is not None
    assert 0 < first.kernel_map_s < first.forward_s
    assert not any(by_kind["ReLU"] + by_kind["BatchNorm"])
    # VGG11's third and fourth convolutions share a level: the second finds the map there.
    convolutions = by_kind["Conv3d"]
    assert convolutions[2] > 0
    assert convolutions[3] == 0


@pytest.mark.parametrize(("batches", "measured"), [([], 1), ([torch.ones(1, 1)], 0)])
def test_nothing_to_measure_is_refused(batches: list[Tensor], measured: int) -> None:
    with pytest.raises(ProfileError, match="measured passes"):
        measure(nn.Sequential(nn.Linear(1, 1)), batches, device=CPU, num_measured=measured)


class MaskAndValue(nn.Module):
    """A float output without a way back, before one that has it."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return (x.detach() > 0).float(), 3 * x


class Masked(nn.Module):
    """Takes both."""

    def forward(self, both: tuple[Tensor, Tensor]) -> Tensor:
        mask, x = both
        assert not mask.requires_grad
        assert x.requires_grad
        return mask[:, :2].sum() + x


class Gradients(torch.autograd.Function):
    """Hands its input on, and notes the gradient."""

    seen: ClassVar[list[Tensor]] = []

    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> Tensor:
        Gradients.seen.append(gradient.clone())
        return gradient


class Noting(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return Gradients.apply(x)  # type: ignore[no-untyped-call]


def test_gradients_reach_the_output_that_they_belong_to() -> None:
    Gradients.seen.clear()
    net = nn.Sequential(nn.Linear(4, 4), Noting(), MaskAndValue(), Masked(), Noting())
    measure(net, [torch.randn(3, 4)], device=CPU, num_warmup=0, num_measured=1)
    behind, before = Gradients.seen[:2]  # of the measured pass, the first one
    assert torch.equal(before, 3 * behind)  # that of the mask would have been zero


def test_a_layer_that_comes_twice_has_two_rows() -> None:
    linear, act = nn.Linear(4, 4), nn.Tanh()
    net = nn.Sequential(linear, act, linear, act, linear)
    found = measure(net, [torch.randn(3, 4)], device=CPU, num_warmup=0, num_measured=1)
    assert [layer.name for layer in found.layers] == ["0", "1", "2", "3", "4"]
    assert [layer.kind for layer in found.layers] == ["Linear", "Tanh"] * 2 + ["Linear"]
    assert [layer.parameter_bytes for layer in found.layers] == [4 * (16 + 4), 0, 0, 0, 0]
    assert all(layer.forward_s > 0 and layer.backward_s > 0 for layer in found.layers)


def test_layers_may_work_in_place() -> None:
    batch = torch.randn(3, 4)
    given = batch.clone()
    net = nn.Sequential(
        nn.ReLU(inplace=True), nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Linear(4, 4)
    )
    found = measure(net, [batch], device=CPU, num_warmup=1, num_measured=2)
    assert torch.equal(batch, given)
    assert found.layers[2].backward_s > 0
    # What the first linear layer gives, the second overwrites and keeps, once.
    assert [layer.saved_bytes for layer in found.layers] == [0, 4 * 3 * 4, 4 * 3 * 4, 0]
    assert found.meta["step_s"] > 0


def test_sparse_layers_may_work_in_place() -> None:
    net = nn.Sequential(sparse.Conv3d(1, 4, 3), sparse.ReLU(inplace=True), sparse.Conv3d(4, 4, 3))
    found = measure(net, [sparse_batch(0)], device=CPU, num_warmup=0, num_measured=1)
    first, _, last = (layer.kernel_map_s for layer in found.layers)
    assert first
    assert not last  # the copies share what was derived from the coordinates
