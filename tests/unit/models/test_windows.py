"""Overlapping windows beside MONAI's, and mirror images beside a brute force."""

from __future__ import annotations

import itertools
import warnings
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from sparsepipe.errors import ConfigError
from sparsepipe.models.windows import Windows

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from monai.inferers.utils import sliding_window_inference


def network(dimensions: int, dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    kind = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[dimensions - 1]
    return nn.Sequential(kind(2, 5, 3, padding=1), nn.Tanh(), kind(5, 3, 1)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("overlap", [0.0, 0.25, 0.5, 0.61, 0.9])
@pytest.mark.parametrize(
    ("sizes", "window"),
    [
        ((37,), (8,)),
        ((30, 12), (7, 16)),
        ((20, 17, 23), (8, 6, 10)),
        ((5, 17, 11), (8, 6, 10)),
        ((3, 4, 5), (8, 7, 6)),
        ((8, 6, 10), (8, 6, 10)),
        ((9, 7, 40), (5, 3, 32)),
    ],
)
@torch.no_grad()
def test_windows_equal_those_of_monai(
    sizes: tuple[int, ...], window: tuple[int, ...], overlap: float, dtype: torch.dtype
) -> None:
    net = network(len(sizes), dtype)
    x = torch.randn(2, 2, *sizes, dtype=dtype)
    expected = sliding_window_inference(x, window, 1, net, overlap=overlap, mode="gaussian")
    found = Windows(window, overlap)(net, x)
    bound = 1e-6 if dtype == torch.float32 else 1e-12
    torch.testing.assert_close(found, expected, rtol=bound, atol=bound)


@pytest.mark.parametrize("sizes", [(7,), (5, 6), (5, 3, 6)])
@torch.no_grad()
def test_flips_are_the_mean_over_all_mirror_images(sizes: tuple[int, ...]) -> None:
    net, count = network(len(sizes), torch.float64), 0
    x = torch.randn(1, 2, *sizes, dtype=torch.float64)
    total = torch.zeros(1, 3, *sizes, dtype=torch.float64)
    for turned in itertools.product([False, True], repeat=len(sizes)):
        axes = [d + 2 for d, each in enumerate(turned) if each]
        total, count = total + net(x.flip(axes)).flip(axes), count + 1
    assert count == 2 ** len(sizes)
    window = tuple(n + 1 for n in sizes)  # one window, with a padded voxel at the end
    padded = nn.functional.pad(x, [0, 1] * len(sizes))
    inside = (..., *[slice(n) for n in sizes])
    expected = Windows(window, flips=True)(net, padded)[inside]
    torch.testing.assert_close(Windows(window, flips=True)(net, x), expected)
    torch.testing.assert_close(Windows(sizes, flips=True)(net, x), total / count)


@torch.no_grad()
def test_parts_are_read_when_they_are_computed() -> None:
    """The input is read window by window, and never held as a whole."""
    net, sizes, windows = network(3, torch.float64), (12, 5, 30), Windows((6, 8, 10))
    x = torch.randn(1, 2, *sizes, dtype=torch.float64)
    events: list[str] = []

    def part(slices: tuple[slice, ...]) -> Tensor:
        events.append("read")
        return x[(slice(None), slice(None), *slices)]

    def computed(part: Tensor) -> Tensor:
        events.append("computed")
        return net(part)

    found = windows.mean_logits(computed, part, sizes)
    assert events == ["read", "computed"] * len(windows.places(sizes))
    assert len(windows.places(sizes)) == 3 * 1 * 5
    torch.testing.assert_close(found, windows(net, x)[0])


def test_an_overlap_of_a_whole_window_is_refused() -> None:
    with pytest.raises(ConfigError, match="overlap"):
        partial(Windows, (3, 3))(overlap=1.0)
