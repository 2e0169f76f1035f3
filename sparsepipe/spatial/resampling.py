"""Rules for pools, padding, interpolation and pixel shuffles of shards."""

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
from sparsepipe.spatial.reductions import total, widened
from sparsepipe.spatial.shard import (
    Shard,
    alike,
    computed_whole,
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
    stride = kernel_size if stride in (None, []) else stride
    given = (kernel_size, stride, padding, dilation)
    return [
        Window(kernel=k, stride=s, before=p, after=p, dilation=d, ceil_mode=ceil_mode)
        for k, s, p, d in zip(*(as_tuple(each, count) for each in given), strict=True)
    ]


class _Recomputed(torch.autograd.Function):
    """Applies a layer to a shard with halos, but saves only the shard, as the layer before does.

    The backward pass fetches the halos and computes the layer again.
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
    padding: float,
    keeps_input: bool,
) -> Shard:
    """Applies a layer with ``windows`` over the last dimensions to a shard and its halo.

    ``compute`` is called with the shard with its halo and padding, the intervals of this rank's
    outputs and the sizes of the whole. ``keeps_input``: PyTorch's layer saves its input.
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
        if not all(each.size for each in outputs):
            shape = [*ready.shape[: -len(outputs)], *(each.size for each in outputs)]
            return ready.flatten()[:0].clone().reshape(shape)  # in the graph, as on other ranks
        pads: list[int] = []
        for window, mine, size in reversed(list(zip(windows, outputs, sizes, strict=True))):
            pads += window.padding(mine, size)
        ready = F.pad(ready, pads, value=padding) if any(pads) else ready
        return compute(ready, outputs, sizes)

    local = local_of(shard)
    if not keeps_input or all(move.exchange.is_alone for move in moves):
        result = computed(moved(local, moves, grid))
    else:
        result = _Recomputed.apply(local, grid, moves, computed)  # type: ignore[no-untyped-call]
    return alike(result, shard, full=full)


@function_rule(*_MAX.values(), torch.max_pool1d, torch.max_pool2d, torch.max_pool3d)
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
    count = int(func.__name__[-2])  # max_pool2d
    windows = _pool_windows(count, kernel_size, stride, padding, dilation, ceil_mode)
    kernels, strides = [each.kernel for each in windows], [each.stride for each in windows]
    dilations = [each.dilation for each in windows]
    return _windowed(
        input,
        windows,
        lambda ready, *_: _MAX[count](ready, kernels, strides, dilation=dilations),
        padding=-math.inf,
        keeps_input=True,
    )


@function_rule(*_AVG.values())
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
        kernel = [window.kernel for window in windows]
        mean = _AVG[count](ready, kernel, [window.stride for window in windows])
        for place, (window, mine, size) in enumerate(zip(windows, outputs, sizes, strict=True)):
            pad = window.before if count_include_pad else 0
            starts = (o * window.stride - window.before for o in range(mine.start, mine.stop))
            seen = [min(s + window.kernel, size + pad) - max(s, -pad) for s in starts]
            if divisor_override is not None:
                seen = [divisor_override if place == 0 else 1] * mine.size
            if any(each != window.kernel for each in seen):
                factor = mean.new_tensor([window.kernel / each for each in seen])
                mean = mean * factor.view(-1, *[1] * (count - 1 - place))
        return mean

    return _windowed(input, windows, pool, padding=0.0, keeps_input=True)


_Taps = Sequence[Sequence[tuple[int, float]]]
"""For each output, a weighted sum of inputs, the (position, weight) of each of these."""


def _picked(shard: Shard, dim: int, taps: _Taps) -> Shard:
    """Computes weighted sums of positions in ``dim`` (negative), one for each entry of ``taps``.

    As in PyTorch, sums of values of half precision are computed in single precision.
    """
    local, full, start = local_of(shard), list(shard.full), 0
    if dim in shard.dims:
        grid, axis = shard.grid, shard.dims.index(dim)
        outputs, place = shares(len(taps), grid.shape[axis]), grid.coordinate(axis)
        hulls = []
        for each in outputs:
            ends = [i for o in taps[each.start : each.stop] for i in (o[0][0], o[-1][0])]
            hulls.append(Interval(min(ends), max(ends) + 1) if ends else Interval(0, 0))
        plans = exchanges(full[axis], tuple((hull,) for hull in hulls))
        local = moved(local, (Move(dim, axis, plans[place]),), grid)
        full[axis], start = len(taps), hulls[place].start
        taps = taps[outputs[place].start : outputs[place].stop]
    rows = [[(i - start, weight) for i, weight in row] for row in taps]
    result = local.narrow(dim, 0, 0)
    for tap in range(len(rows[0]) if rows else 0):
        index = torch.tensor([row[tap][0] for row in rows], device=local.device)
        part = local.index_select(local.dim() + dim, index)
        if any(row[tap][1] != 1 for row in rows):
            part = part.to(widened(part.dtype))
            weight = part.new_tensor([row[tap][1] for row in rows])
            part = part * weight.view(-1, *[1] * (-dim - 1))
        result = part if tap == 0 else result + part
    return alike(result.to(local.dtype), shard, full=full)


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
    if antialias or mode not in ("nearest", "nearest-exact", "linear", "bilinear", "trilinear"):
        more = (size, scale_factor, mode, align_corners, recompute_scale_factor, antialias)
        return computed_whole(F.interpolate, (input, *more), {})  # type: ignore[no-any-return]
    count = input.dim() - 2
    before = input.shape[2:]
    like = local_of(input).new_zeros([1, 1, *[2] * count])
    # The dtype that PyTorch chooses, under autocast as well.
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
        if mode.startswith("nearest"):
            local = local_of(result)
            taps = _nearest_taps(n, m, scales[place], local, exact=mode == "nearest-exact")
        result = _picked(result, place - count, taps)
    return result


def _nearest_taps(n: int, m: int, scale: float | None, values: Tensor, *, exact: bool) -> _Taps:
    """Returns the nearest of ``n`` inputs to each of ``m`` outputs, rounding as PyTorch does."""
    on_host = values.device.type == "cpu"
    real = np.float64 if on_host and values.dtype == torch.float64 else np.float32
    ratio = real(n) / real(m) if scale is None else real(1 / scale)
    taps = []
    for output in range(m):
        place = output + 0.5 * exact
        at = place * float(ratio) if on_host and exact else real(place) * ratio
        taps.append([(min(math.floor(np.float32(at)), n - 1), 1.0)])
    return taps


def _linear_taps(n: int, m: int, scale: float | None, align_corners: bool) -> _Taps:
    if align_corners:
        ratio = (n - 1) / (m - 1) if m > 1 else 0.0
    else:
        ratio = n / m if scale is None else 1 / scale
    taps = []
    for output in range(m):
        at = output * ratio if align_corners else max((output + 0.5) * ratio - 0.5, 0.0)
        low = min(math.floor(at), n - 1)
        high = min(low + 1, n - 1)
        share = min(max(at - low, 0.0), 1.0)
        taps.append([(low, 1 - share), (high, share)])
    return taps


@function_rule(F.pad)
def _pad(
    _: Any, input: Shard, pad: Sequence[int], mode: str = "constant", value: float | None = None
) -> Any:
    F.pad(torch.empty(input.shape, device="meta"), pad, mode, value)  # raises PyTorch's errors
    if mode != "constant":
        return computed_whole(F.pad, (input, pad, mode), {})
    local, full, grid = local_of(input), list(input.full), input.grid
    pads = list(pad)
    for axis, dim in enumerate(input.dims):
        if -2 * dim > len(pad):
            continue
        before, after = pad[-2 * dim - 2], pad[-2 * dim - 1]
        inner, full[axis] = Interval(0, full[axis]), full[axis] + before + after
        outputs, place = shares(full[axis], grid.shape[axis]), grid.coordinate(axis)
        needs = tuple((Interval(o.start - before, o.stop - before) & inner,) for o in outputs)
        plan = exchanges(inner.size, needs)[place]
        local = moved(local, (Move(dim, axis, plan),), grid)
        missing = outputs[place].size - local.shape[dim]
        front = min(max(before - outputs[place].start, 0), missing)
        pads[-2 * dim - 2], pads[-2 * dim - 1] = front, missing - front
    return alike(F.pad(local, pads, value=value), input, full=full)


@function_rule(
    *(F.adaptive_avg_pool1d, F.adaptive_avg_pool2d, F.adaptive_avg_pool3d),
    *(F.adaptive_max_pool1d, F.adaptive_max_pool2d, F.adaptive_max_pool3d),
    torch.adaptive_avg_pool1d,
)
def _adaptive_pool(
    func: Callable[..., Any],
    input: Shard,
    output_size: int | Sequence[int | None],
    return_indices: bool = False,
) -> Any:
    """Computes a global average by a sum over ranks; gathers the whole for any other pool."""
    if return_indices:
        raise without_rule("adaptive_max_pool with return_indices")
    count = input.dim() - 2
    given = (output_size,) * count if isinstance(output_size, int) else tuple(output_size)
    if any(given[count + dim] != 1 for dim in input.dims):
        return computed_whole(func, (input, output_size), {})
    if "avg" in func.__name__:
        return func(total(input, input.dims, torch.mean), output_size)
    return func(whole(input), output_size)
