"""Points into voxels and back, by brute force, dense interpolation and derivatives."""

from __future__ import annotations

from collections import defaultdict

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from sparsepipe.errors import ConfigError, CoordinateError
from sparsepipe.sparse import SparseTensor, devoxelize, voxelize

EDGE = 0.25


def cloud(points: int = 200, samples: int = 3, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Positions on a grid of 1.5 x 1 x 2 metres, features and samples; the second has no point."""
    draw = torch.Generator().manual_seed(seed)
    coords = torch.rand(points, 3, generator=draw) * torch.tensor([1.5, 1.0, 2.0])
    batch = torch.randint(samples, (points,), generator=draw)
    batch[batch == 1] = 2
    return coords, torch.randn(points, 2, generator=draw, dtype=torch.float64), batch


def cells(coords: Tensor, batch: Tensor, edge: float = EDGE) -> list[tuple[int, ...]]:
    return [
        (int(b), *(int(v // edge) for v in row))
        for b, row in zip(batch, coords.tolist(), strict=True)
    ]


@pytest.mark.parametrize("reduce", ["mean", "first"])
def test_voxels_are_those_of_a_plain_loop(reduce: str) -> None:
    coords, feats, batch = cloud()
    x, rows = voxelize(coords, feats, voxel_size=EDGE, batch_P=batch, reduce=reduce)  # type: ignore[arg-type]
    members = defaultdict(list)
    for point, cell in enumerate(cells(coords, batch)):
        members[cell].append(point)
    assert list(map(tuple, x.coords.tolist())) == sorted(members)
    for row, cell in enumerate(sorted(members)):
        points = members[cell][: 1 if reduce == "first" else None]
        torch.testing.assert_close(x.feats[row], feats[points].mean(0))
        assert (rows[members[cell]] == row).all()
    assert (x.batch_size, x.spatial_shape, x.stride) == (3, None, (1, 1, 1))
    assert x.check() is x


@pytest.mark.parametrize("stride", [1, 2, 3])
def test_nearest_is_the_voxel_in_which_a_point_lies(stride: int) -> None:
    coords, feats, batch = cloud(300)
    x, _ = voxelize(coords, feats, voxel_size=EDGE * stride, batch_P=batch)
    x.stride = (stride,) * 3
    points, _, others = cloud(150, samples=5, seed=1)  # samples 3 and 4 do not exist
    points = points * 1.5 - 0.3  # some outside the grid
    found = devoxelize(x, points, voxel_size=EDGE, batch_P=others)
    by_cell = dict(zip(map(tuple, x.coords.tolist()), x.feats, strict=True))
    for cell, values in zip(cells(points, others, EDGE * stride), found, strict=True):
        assert torch.equal(values, by_cell.get(cell, torch.zeros(2, dtype=torch.float64)))
    assert 5 < found.any(1).sum() < 100


@pytest.mark.parametrize("share", [1.0, 0.3])
def test_trilinear_is_that_of_a_dense_grid(share: float) -> None:
    torch.manual_seed(0)
    extent = (4, 3, 5)
    whole = torch.randn(2, 3, *extent, dtype=torch.float64)
    taken = torch.rand(2, 1, *extent) < share
    x = SparseTensor.from_dense(whole * taken)
    x.stride = (2, 2, 2)
    points = torch.rand(2, 90, 3, dtype=torch.float64) * (torch.tensor(extent) + 0.8) - 0.4
    grid = (2 * points / torch.tensor(extent) - 1).flip(-1)[:, None, None]
    sums, weights = (
        F.grid_sample(each.double(), grid, align_corners=False, padding_mode="zeros").squeeze(2, 3)
        for each in (whole * taken, taken)
    )
    expected = torch.where(weights > 0, sums / weights, 0).transpose(1, 2).flatten(0, 1)
    batch = torch.arange(2).repeat_interleave(90)
    found = devoxelize(
        x, points.flatten(0, 1) * 2 * EDGE, voxel_size=EDGE, batch_P=batch, mode="trilinear"
    )
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("mode", ["nearest", "trilinear"])
@pytest.mark.parametrize("reduce", ["mean", "first"])
def test_first_and_second_derivatives(mode: str, reduce: str) -> None:
    coords, feats, batch = cloud(25)

    def call(feats: Tensor) -> Tensor:
        x, rows = voxelize(coords, feats, voxel_size=0.5, batch_P=batch, reduce=reduce)  # type: ignore[arg-type]
        back = devoxelize(x, coords, voxel_size=0.5, batch_P=batch, mode=mode)  # type: ignore[arg-type]
        if mode == "nearest":
            assert torch.equal(back, x.feats[rows])
        return back.square()

    assert torch.autograd.gradcheck(call, feats.requires_grad_(), fast_mode=True)
    assert torch.autograd.gradgradcheck(call, feats, fast_mode=True)


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_bits_repeat_and_halves_are_close(dtype: torch.dtype) -> None:
    coords, feats, batch = cloud(5000)

    def run(dtype: torch.dtype) -> list[Tensor]:
        leaf = feats.to(dtype).requires_grad_()
        x, _ = voxelize(coords, leaf, voxel_size=EDGE, batch_P=batch)
        out = devoxelize(x, coords, voxel_size=EDGE, batch_P=batch, mode="trilinear")
        return [out, *torch.autograd.grad(out.float().square().sum(), leaf)]

    first, second = run(dtype), run(dtype)
    assert all(map(torch.equal, first, second))
    torch.testing.assert_close(first[0].double(), run(torch.float64)[0], rtol=2e-2, atol=1e-2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_mean_of_many_large_features_in_16_bits(dtype: torch.dtype) -> None:
    feats = torch.full((3000, 1), 200.0, dtype=dtype)
    x, _ = voxelize(torch.zeros(3000, 3), feats, voxel_size=EDGE)
    assert torch.equal(x.feats, feats[:1])


def test_unknown_words_are_refused() -> None:
    points, feats = torch.ones(2, 3), torch.ones(2, 1)
    with pytest.raises(ConfigError, match="reduce='max'"):
        voxelize(points, feats, voxel_size=EDGE, reduce="max")  # type: ignore[arg-type]
    x, _ = voxelize(points, feats, voxel_size=EDGE)
    with pytest.raises(ConfigError, match="mode='linear'"):
        devoxelize(x, points, voxel_size=EDGE, mode="linear")  # type: ignore[arg-type]


def test_no_points() -> None:
    nothing = torch.zeros(0, 3)
    for batch in (None, torch.zeros(0, dtype=torch.int64)):
        feats = torch.zeros(0, 2, requires_grad=True)
        x, rows = voxelize(nothing, feats, voxel_size=EDGE, batch_P=batch)
        assert (len(x), len(rows)) == (0, 0)
        out = devoxelize(x, torch.rand(4, 3), voxel_size=EDGE, mode="trilinear")
        assert torch.equal(out, torch.zeros(4, 2))
        out.sum().backward()
        assert feats.grad is not None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"coords_P3": torch.full((2, 3), float("nan"))}, "not finite"),
        ({"coords_P3": torch.full((2, 3), -0.1)}, "from -1 to -1"),
        ({"coords_P3": torch.full((2, 3), 1e9)}, "not within 0 to"),
        ({"coords_P3": torch.ones(2, 2)}, "positions are"),
        ({"feats_PC": torch.ones(3, 1)}, "do not belong to 2 points"),
        ({"batch_P": torch.zeros(3).int()}, "batch_P is"),
        ({"batch_P": torch.zeros(2).int() - 1}, "batch index -1"),
        ({"voxel_size": 0.0}, "voxel_size=0.0"),
        ({"spatial_shape": 2}, "outside the spatial_shape"),
    ],
)
def test_points_that_do_not_fit_are_refused(change: dict[str, object], message: str) -> None:
    arguments: dict[str, object] = {
        "coords_P3": torch.ones(2, 3), "feats_PC": torch.ones(2, 1), "voxel_size": EDGE,
    }  # fmt: skip
    with pytest.raises(CoordinateError, match=message) as caught:
        voxelize(**(arguments | change))  # type: ignore[arg-type]
    assert caught.value.remedy
