"""Pools, padding, interpolation and pixel shuffles of shards."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from sparsepipe.spatial.convolution import as_tuple, halo_moves
from sparsepipe.spatial.grid import Grid, Move, fetch, give_back, moved
from sparsepipe.spatial.intervals import Interval, Window, exchanges, shares
from sparsepipe.spatial.reductions import first_largest, total, widened
from sparsepipe.spatial.shard import (
    Shard,
    alike,
    cut,
    function_rule,
    local_of,
    whole,
    whole_shape,
    without_rule,
)

_MAX = {1: F.max_pool1d, 2: F.max_pool2d, 3: F.max_pool3d}
_AVG = {1: F.avg_pool1d, 2: F.avg_pool2d, 3: F.avg_pool3d}


def _pool_windows(
    count: int,
    kernel_size: int | Sequence[int],
    stride: int | Sequence[int] | None,
    padding: int | Sequence[int],
    dilation: int | Sequence[int],
    ceil_mode: bool,
) -> list[Window]:
    kernels = as_tuple(kernel_size, count)
    strides = kernels if stride is None or stride == [] else as_tuple(stride, count)
    return [
        Window(kernel=k, stride=s, before=p, after=p, dilation=d, ceil_mode=ceil_mode)
        for k, s, p, d in zip(
            kernels, strides, as_tuple(padding, count), as_tuple(dilation, count), strict=True
        )
    ]


class _Recomputed(torch.autograd.Function):
    """A layer that needs halos and keeps for its backward pass the shard without them.

    That is what the layer before has kept as well. The backward pass fetches the halos and computes
    the layer again.
    """

    @staticmethod
    def forward(
        ctx: Any,
        local: Tensor,
        grid: Grid,
        moves: tuple[Move, ...],
        compute: Callable[[Tensor], Tensor],
    ) -> Tensor:
        kind = local.device.type
        ctx.grid, ctx.moves, ctx.compute = grid, moves, compute
        ctx.autocast = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
        ctx.save_for_backward(local)
        return compute(fetch(local, moves, grid))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        (local,) = ctx.saved_tensors
        ready = fetch(local, ctx.moves, ctx.grid).detach().requires_grad_()
        enabled, dtype = ctx.autocast
        with torch.enable_grad(), torch.autocast(local.device.type, dtype, enabled):
            result = ctx.compute(ready)
        (into,) = torch.autograd.grad(result, ready, gradient)
        return give_back(into, ctx.moves, ctx.grid), None, None, None


def _windowed(
    shard: Shard,
    windows: Sequence[Window],
    compute: Callable[[Tensor, list[Interval], list[int]], Tensor],
    *,
    keeps_input: bool,
) -> Shard:
    """Applies a windowed layer to a shard and its halo.

    Args:
        shard: of the whole.
        windows: of the layer, for each of the last dimensions.
        compute: from the shard with its halo, the outputs of this rank and the sizes of the whole,
            in each of these dimensions.
        keeps_input: whether PyTorch's layer keeps its input for the backward pass.
    """
    moves, grid = halo_moves(shard, windows), shard.grid
    sizes = list(whole_shape(shard)[-len(windows) :])
    outputs = [
        Interval(0, window.output_size(size)) for window, size in zip(windows, sizes, strict=True)
    ]
    full = [outputs[dim].size for dim in shard.dims]
    for axis, dim in enumerate(shard.dims):
        outputs[dim] = grid.held(axis, outputs[dim].size)

    def computed(ready: Tensor) -> Tensor:
        if all(each.size for each in outputs):
            return compute(ready, outputs, sizes)
        shape = [*ready.shape[: -len(outputs)], *(each.size for each in outputs)]
        return ready.flatten()[:0].clone().reshape(shape)  # connected, as on the other ranks

    local = local_of(shard)
    if not keeps_input or all(move.exchange.is_alone for move in moves):
        result = computed(moved(local, moves, grid))
    else:
        result = _Recomputed.apply(local, grid, moves, computed)  # type: ignore[no-untyped-call]
    return alike(result, shard, full=full)


def _padded(
    ready: Tensor, windows: Sequence[Window], outputs: Sequence[Interval], sizes: Sequence[int],
    value: float,
) -> Tensor:  # fmt: skip
    pads: list[int] = []
    for window, mine, size in reversed(list(zip(windows, outputs, sizes, strict=True))):
        pads += window.padding(mine, size)
    return F.pad(ready, pads, value=value) if any(pads) else ready


def _max_pool(
    func: Callable[..., Any],
    input: Shard,
    kernel_size: int | Sequence[int],
    stride: int | Sequence[int] | None = None,
    padding: int | Sequence[int] = 0,
    dilation: int | Sequence[int] = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
) -> Shard:
    if return_indices:
        raise without_rule("max_pool with return_indices")
    count = next(n for n, names in _MAX_NAMES.items() if func in names)
    windows = _pool_windows(count, kernel_size, stride, padding, dilation, ceil_mode)

    def pool(ready: Tensor, outputs: list[Interval], sizes: list[int]) -> Tensor:
        return _MAX[count](
            _padded(ready, windows, outputs, sizes, -math.inf),
            [window.kernel for window in windows],
            [window.stride for window in windows],
            dilation=[window.dilation for window in windows],
        )

    return _windowed(input, windows, pool, keeps_input=True)


_MAX_NAMES = {
    1: (F.max_pool1d, torch.max_pool1d),
    2: (F.max_pool2d, torch.max_pool2d),
    3: (F.max_pool3d, torch.max_pool3d),
}
function_rule(*(name for names in _MAX_NAMES.values() for name in names))(_max_pool)


@function_rule(F.avg_pool1d, F.avg_pool2d, F.avg_pool3d)
def _avg_pool(
    func: Callable[..., Any],
    input: Shard,
    kernel_size: int | Sequence[int],
    stride: int | Sequence[int] | None = None,
    padding: int | Sequence[int] = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> Shard:
    count = next(n for n, function in _AVG.items() if func is function)
    windows = _pool_windows(count, kernel_size, stride, padding, 1, ceil_mode)

    def pool(ready: Tensor, outputs: list[Interval], sizes: list[int]) -> Tensor:
        ready = _padded(ready, windows, outputs, sizes, 0.0)
        kernel = [window.kernel for window in windows]
        mean = _AVG[count](ready, kernel, [window.stride for window in windows])
        for place, (window, mine, size) in enumerate(zip(windows, outputs, sizes, strict=True)):
            seen = _taps(window, mine, size, count_include_pad)
            if divisor_override is not None:
                seen = [divisor_override if place == 0 else 1] * mine.size
            if any(each != window.kernel for each in seen):
                factor = mean.new_tensor([window.kernel / each for each in seen])
                mean = mean * factor.view(-1, *[1] * (count - 1 - place))
        return mean

    return _windowed(input, windows, pool, keeps_input=True)


def _taps(window: Window, outputs: Interval, size: int, include_pad: bool) -> list[int]:
    """Divisors of an average pool, one for each output."""
    low, high = (-window.before, size + window.after) if include_pad else (0, size)
    starts = (o * window.stride - window.before for o in range(outputs.start, outputs.stop))
    return [min(s + window.kernel, high) - max(s, low) for s in starts]


def _along(
    shard: Shard, dim: int, size: int, needs: Callable[[int], Interval]
) -> tuple[Shard, list[int], int]:
    """A shard with what its outputs need along one of the last dimensions.

    Args:
        shard: to move.
        dim: counted from the end.
        size: of the whole output.
        needs: the inputs of one output.

    Returns:
        The moved tensor as a shard of the new size, the outputs of this rank, and the first
        position that is there.
    """

    def hull(outputs: Interval) -> Interval:
        if not outputs.size:
            return Interval(0, 0)
        first, last = needs(outputs.start), needs(outputs.stop - 1)
        return Interval(min(first.start, last.start), max(first.stop, last.stop))

    if dim not in shard.dims:
        return shard, list(range(size)), 0
    grid, axis = shard.grid, shard.dims.index(dim)
    outputs = shares(size, grid.shape[axis])
    plans = exchanges(shard.full[axis], tuple((hull(each),) for each in outputs))
    place = grid.coordinate(axis)
    ready = moved(local_of(shard), (Move(dim, axis, plans[place]),), grid)
    full = (*shard.full[:axis], size, *shard.full[axis + 1 :])
    mine = outputs[place]
    return alike(ready, shard, full=full), list(range(mine.start, mine.stop)), hull(mine).start


def _picked(local: Tensor, dim: int, rows: Sequence[Sequence[tuple[int, float]]]) -> Tensor:
    """Weighted sums of positions of one dimension: for each output its positions and weights.

    As PyTorch does, it computes with values of half precision in single precision.
    """
    taps = max((len(row) for row in rows), default=1)
    result = local.narrow(dim, 0, 0)
    for tap in range(taps if rows else 0):
        index = torch.tensor([row[tap][0] for row in rows], device=local.device)
        part = local.index_select(local.dim() + dim, index)
        if any(row[tap][1] != 1 for row in rows):
            part = part.to(widened(part.dtype))
            weight = part.new_tensor([row[tap][1] for row in rows])
            part = part * weight.view(-1, *[1] * (-dim - 1))
        result = part if tap == 0 else result + part
    return result.to(local.dtype)


@function_rule(F.interpolate, F.upsample)
def _interpolate(
    _: Any,
    input: Shard,
    size: int | Sequence[int] | None = None,
    scale_factor: float | Sequence[float] | None = None,
    mode: str = "nearest",
    align_corners: bool | None = None,
    recompute_scale_factor: bool | None = None,
    antialias: bool = False,
) -> Shard:
    linear = mode in ("linear", "bilinear", "trilinear")
    if antialias or not (linear or mode in ("nearest", "nearest-exact")):
        raise without_rule(f"interpolate with mode={mode!r}" + " and antialias" * antialias)
    count = input.dim() - 2
    before = input.shape[2:]
    like = local_of(input).new_zeros([1, 1, *[2] * count])
    # PyTorch's choice, under autocast as well.
    input = input.to(F.interpolate(like, scale_factor=2.0, mode=mode).dtype)  # type: ignore[assignment]
    scales: list[float | None] = [None] * count
    if size is not None:
        sizes = as_tuple(size, count)
    else:
        assert scale_factor is not None
        given = (scale_factor,) if isinstance(scale_factor, int | float) else tuple(scale_factor)
        given = given * count if len(given) == 1 else given
        sizes = tuple(math.floor(n * float(f)) for n, f in zip(before, given, strict=True))
        scales = [None if recompute_scale_factor else float(f) for f in given]
    result = input
    for place in range(count):
        n, m = before[place], sizes[place]
        if n == m and scales[place] in (None, 1.0):
            continue
        taps = _linear_taps(n, m, scales[place], bool(align_corners))
        if not linear:
            local = local_of(result)
            taps = _nearest_taps(n, m, scales[place], local, exact=mode == "nearest-exact")
        result, outputs, first = _along(
            result,
            place - count,
            m,
            lambda o, taps=taps: _span(taps(o)),  # type: ignore[misc]
        )
        rows = [[(i - first, w) for i, w in taps(o)] for o in outputs]
        full = result.full
        result = alike(_picked(local_of(result), place - count, rows), input, full=full)
    return result


_Taps = Callable[[int], list[tuple[int, float]]]


def _span(taps: list[tuple[int, float]]) -> Interval:
    return Interval(taps[0][0], taps[-1][0] + 1)


def _nearest_taps(n: int, m: int, scale: float | None, values: Tensor, *, exact: bool) -> _Taps:
    """Nearest inputs as PyTorch rounds them: on a CUDA device in single precision throughout."""
    on_host = values.device.type == "cpu"
    real = np.float64 if on_host and values.dtype == torch.float64 else np.float32
    ratio = real(n) / real(m) if scale is None else real(1 / scale)

    def taps(o: int) -> list[tuple[int, float]]:
        place = o + 0.5 * exact
        at = place * float(ratio) if on_host and exact else real(place) * ratio
        return [(min(math.floor(np.float32(at)), n - 1), 1.0)]

    return taps


def _linear_taps(n: int, m: int, scale: float | None, align_corners: bool) -> _Taps:
    if align_corners:
        ratio = (n - 1) / (m - 1) if m > 1 else 0.0
    else:
        ratio = n / m if scale is None else 1 / scale

    def taps(o: int) -> list[tuple[int, float]]:
        at = o * ratio if align_corners else max((o + 0.5) * ratio - 0.5, 0.0)
        low = min(math.floor(at), n - 1)
        high = min(low + 1, n - 1)
        share = min(max(at - low, 0.0), 1.0)
        return [(low, 1 - share), (high, share)]

    return taps


@function_rule(F.pad)
def _pad(
    _: Any, input: Shard, pad: Sequence[int], mode: str = "constant", value: float | None = None
) -> Shard:
    F.pad(torch.empty(input.shape, device="meta"), pad, mode, value)  # refuses what PyTorch does
    result = input
    for place in range(len(pad) // 2):
        before, after = pad[2 * place], pad[2 * place + 1]
        if before or after:
            result = _pad_one(result, -1 - place, before, after, mode, value)
    return result


def _pad_one(
    shard: Shard, dim: int, before: int, after: int, mode: str, value: float | None
) -> Shard:
    if dim not in shard.dims:
        local = local_of(shard)
        pads = [0, 0] * (-dim - 1) + [before, after]
        if mode == "constant":
            return alike(F.pad(local, pads, value=value), shard)
        index = [
            _source(o - before, local.shape[dim], mode)
            for o in range(local.shape[dim] + before + after)
        ]
        return alike(_picked(local, dim, [[(i, 1.0)] for i in index]), shard)
    grid, axis = shard.grid, shard.dims.index(dim)
    n = shard.full[axis]
    m = n + before + after
    full = (*shard.full[:axis], m, *shard.full[axis + 1 :])
    outputs = shares(m, grid.shape[axis])
    place = grid.coordinate(axis)
    if mode == "constant":
        inner = Interval(0, n)
        needs = [each.shifted(-before) & inner for each in outputs]
        plan = exchanges(n, tuple((each,) for each in needs))[place]
        ready = moved(local_of(shard), (Move(dim, axis, plan),), grid)
        missing = outputs[place].size - ready.shape[dim]
        front = min(max(before - outputs[place].start, 0), missing)
        pads = [0, 0] * (-dim - 1) + [front, missing - front]
        return alike(F.pad(ready, pads, value=value), shard, full=full)
    # Runs of neighbouring sources: of a circular padding there are several.
    runs = [
        _runs([_source(o - before, n, mode) for o in range(each.start, each.stop)])
        for each in outputs
    ]
    plan = exchanges(n, tuple(tuple(run[0] for run in each) for each in runs))[place]
    ready = moved(local_of(shard), (Move(dim, axis, plan),), grid)
    rows, start = [], 0
    for interval, positions in runs[place]:
        rows += [[(start + each - interval.start, 1.0)] for each in positions]
        start += interval.size
    return alike(_picked(ready, dim, rows), shard, full=full)


def _source(position: int, n: int, mode: str) -> int:
    """The input that is seen at a position outside of the inputs, or inside."""
    if mode == "circular":
        return position % n
    if mode == "replicate":
        return min(max(position, 0), n - 1)
    if mode == "reflect":
        return (n - 1) - abs((n - 1) - abs(position))
    raise without_rule(f"pad with mode={mode!r}")


def _runs(positions: Sequence[int]) -> list[tuple[Interval, list[int]]]:
    """Positions in their order, cut where a next one is none of the neighbours of the last."""
    runs: list[list[int]] = []
    for position in positions:
        if runs and abs(position - runs[-1][-1]) <= 1:
            runs[-1].append(position)
        else:
            runs.append([position])
    return [(Interval(min(run), max(run) + 1), run) for run in runs]


@function_rule(F.pixel_shuffle, torch.pixel_shuffle, F.pixel_unshuffle, torch.pixel_unshuffle)
def by_whole(func: Callable[..., Tensor], input: Shard, *args: Any, **kwargs: Any) -> Shard:
    """Gathers the whole, computes on every rank what one device would, and cuts the result.

    The rule of rare functions: it takes the memory and the time of one device.

    Raises:
        ConfigError: the dimensions that are cut are not the last ones.
    """
    if input.dims != tuple(range(-input.grid.dimensions, 0)):
        raise without_rule(f"{func.__name__} of dimensions in another order")
    return cut(func(whole(input), *args, **kwargs), input.grid)


@function_rule(
    F.adaptive_avg_pool1d,
    F.adaptive_avg_pool2d,
    F.adaptive_avg_pool3d,
    torch.adaptive_avg_pool1d,
    F.adaptive_max_pool1d,
    F.adaptive_max_pool2d,
    F.adaptive_max_pool3d,
)
def _adaptive_pool(
    func: Callable[..., Any],
    input: Shard,
    output_size: int | Sequence[int | None],
    return_indices: bool = False,
) -> Any:
    """A global pool by sums over ranks, any other one by the whole."""
    if return_indices:
        raise without_rule("adaptive_max_pool with return_indices")
    count = input.dim() - 2
    given = (output_size,) * count if isinstance(output_size, int) else tuple(output_size)
    if any(given[count + dim] != 1 for dim in input.dims):
        return by_whole(func, input, output_size)
    is_mean = "avg" in func.__name__
    pooled = total(input, input.dims, torch.mean) if is_mean else first_largest(input)
    return func(pooled, output_size)
