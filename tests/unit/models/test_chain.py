"""Blocks of a chain: what they keep, pass by, and compute again."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from sparsepipe import models
from sparsepipe.errors import ConfigError
from sparsepipe.models import chain


def layers() -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Conv1d(2, 2, 3, padding=1), nn.BatchNorm1d(2), nn.Dropout(0.5), nn.Tanh()]


def test_what_is_kept_passes_later_blocks_by() -> None:
    x = torch.randn(3, 2, 7)
    first, pool, last = chain.ChainBlock(nn.Tanh(), keep="input"), nn.MaxPool1d(2), nn.Sigmoid()
    pooled = chain.ChainBlock(pool, keep="output")
    value, given, kept = nn.Sequential(first, pooled, chain.ChainBlock(last))(x)
    assert given is x
    assert torch.equal(kept, pool(x.tanh()))
    assert torch.equal(value, kept.sigmoid())
    resized, rest = chain.Resized(1)((value[..., :1], given, kept))
    assert resized.shape == kept.shape
    assert rest is given
    assert chain.Resized(1)((resized, rest)).shape == x.shape
    assert isinstance(chain.ChainBlock(last)(x), Tensor)


def test_names_are_those_of_a_plain_sequential() -> None:
    plain = nn.Sequential(*layers())
    block = chain.ChainBlock(*layers(), keep="input", checkpointing=True)
    assert list(block.state_dict()) == list(plain.state_dict())
    assert isinstance(block[:2], nn.Sequential)


def test_a_second_run_leaves_no_trace() -> None:
    """Draws are those of the first run, and statistics count a batch once."""
    x = torch.randn(4, 2, 9, dtype=torch.float64, requires_grad=True)
    again = chain.ChainBlock(*layers(), checkpointing=True).double()
    once = chain.ChainBlock(*copy.deepcopy(list(again))).double()
    found = []
    for block in (once, again):
        x.grad = None
        torch.manual_seed(1)
        for _ in range(2):
            block(x).square().sum().backward()
        found.append([x.grad, *(p.grad for p in block.parameters()), *block.buffers()])
        found[-1].append(torch.rand(3))  # the generator goes on from the same state
    for mine, theirs in zip(*found, strict=True):
        assert torch.equal(mine, theirs)
    assert once[1].num_batches_tracked == 2


def test_checkpointing_saves_the_input_only() -> None:
    def saved_bytes(block: nn.Module) -> int:
        kept: dict[int, int] = {}
        x = torch.randn(1, 2, 1000, requires_grad=True)

        def pack(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            kept[storage.data_ptr()] = storage.nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            result = block(x)
        assert result.requires_grad
        return sum(kept.values())

    assert saved_bytes(chain.ChainBlock(*layers())) > 3 * 8000
    assert saved_bytes(chain.ChainBlock(*layers(), checkpointing=True)) <= 8100


def test_nothing_runs_twice_without_gradients() -> None:
    block = chain.ChainBlock(*layers(), checkpointing=True).eval()
    x = torch.randn(1, 2, 5)
    with torch.no_grad():
        assert torch.equal(block(x), nn.Sequential(*block)(x))


@pytest.mark.parametrize(
    ("make", "settings", "sizes"),
    [
        ("cnn1d", {"width": 0.2}, [(29,)]),
        ("cnn2d", {"width": 0.2}, [(13, 22)]),
        ("cnn3d", {"width": 0.2}, [(7, 8, 5)]),
        ("fcn2d", {"width": 0.05}, [(32, 64), (37, 50), (63, 71)]),
        ("unet3d", {"width": 0.1}, [(8, 8, 8), (9, 11, 13), (15, 8, 10)]),
        ("densenet3d", {"width": 0.1, "blocks": (1, 2, 1)}, [(32, 32, 32), (33, 41, 37)]),
        ("convnext_tiny", {"width": 0.1, "blocks": (1, 1, 2, 1)}, [(32, 64), (37, 50)]),
    ],
)
def test_logits_of_samples_and_of_positions_of_any_size(make, settings, sizes) -> None:
    for size in sizes:
        x = torch.randn(2, 3, *size)
        for head, spatial in (("classification", ()), ("segmentation", size)):
            net = getattr(models, make)(5, in_channels=3, head=head, **settings)
            logits = net(x)
            assert logits.shape == (2, 5, *spatial)
        logits.square().sum().backward()
        assert all(p.grad is not None and p.grad.isfinite().all() for p in net.parameters())


@pytest.mark.parametrize(
    ("net", "least"),
    [
        (models.cnn2d(3, width=0.1), (4, 4)),
        (models.cnn3d(3, width=0.1, levels=2, head="segmentation"), (2, 2, 2)),
        (models.fcn2d(3, width=0.03, in_channels=1), (32, 32)),
        (models.unet3d(3, width=0.1, levels=3), (4, 4, 4)),
        (models.densenet3d(3, width=0.1, blocks=(1, 1)), (8, 8, 8)),
        (models.convnext_tiny(3, width=0.05, in_channels=1, blocks=(1, 1, 1, 1)), (32, 32)),
    ],
)
def test_smaller_samples_than_a_network_takes_are_refused(net, least) -> None:
    assert net.eval()(torch.zeros(1, 1, *least)).shape[:2] == (1, 3)
    with pytest.raises(ConfigError, match=f"at least {least[0]} along"):
        net(torch.zeros(1, 1, *least[1:], least[0] - 1))
