"""Normalisation of shards with statistics of the whole sample.

One function serves all norms: it normalises a channel of the minibatch (batch norm), or a group of
channels or one channel of a sample. It saves no tensor as large as a sample except its input.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from sparsepipe.runtime.collectives.halo import gather_rows, start_adding_up
from sparsepipe.spatial.grid import Grid
from sparsepipe.spatial.reductions import widened
from sparsepipe.spatial.shard import (
    Shard,
    alike,
    function_rule,
    local_of,
    uncut,
    whole_shape,
    without_rule,
)


def recomputing() -> bool:
    """Returns whether a backward pass is running: forward passes within it are recomputations."""
    return bool(torch._C._current_graph_task_id() != -1)


class _Normalised(torch.autograd.Function):
    """Computes ``weight * (x - mean) / sqrt(variance + eps) + bias`` for this rank's part of x."""

    @staticmethod
    def forward(
        ctx: Any, value: Tensor, weight: Tensor | None, bias: Tensor | None, over: _Over
    ) -> tuple[Tensor, Tensor, Tensor]:
        # Samples are large: what can be computed in the memory of the result is computed there.
        count = math.prod(value.shape[dim] for dim in over.dims)
        sums = value.sum(over.dims, keepdim=True, dtype=widened(value.dtype))
        own = sums / max(count, 1)
        result = value - own
        squares = torch.linalg.vector_norm(result, dim=over.dims, keepdim=True).square()
        # One message for both moments; differences of ranks' means are added to the second after
        # Chan, Golub and LeVeque, "Updating formulae ... for computing sample variances", eq. 2.1.
        counts, sums, squares = gather_rows(
            torch.stack([torch.full_like(sums, count), sums, squares]),
            over.grid.group,
            what="gathering the statistics of a norm",
        ).unbind(1)
        mean = sums.sum(0) / over.count
        apart = counts * (sums / counts.clamp(min=1) - mean).square()
        variance = (squares + apart).sum(0) / over.count
        inverse = (variance + over.eps).rsqrt()
        ctx.over = over
        ctx.save_for_backward(value, weight, bias, mean, inverse)
        ctx.mark_non_differentiable(mean, variance)
        scale = inverse if weight is None else inverse * weight
        shift = (own - mean) * scale
        result.mul_(scale).add_(shift if bias is None else shift + bias)
        return result.to(value.dtype), mean, variance

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        value, weight, bias, mean, inverse = ctx.saved_tensors
        over: _Over = ctx.over
        gradient = gradient.to(mean.dtype)
        result = value - mean
        # Sums over positions that share a weight, and then over those that share a mean.
        affine = weight if weight is not None else bias
        dims = [dim for dim in over.dims if affine is None or affine.shape[dim] == 1]
        sums = gradient.sum(dims, keepdim=True)
        products = result.mul_(gradient).sum(dims, keepdim=True) * inverse
        of_weight = None if weight is None else products.sum_to_size(weight.shape)
        of_bias = None if bias is None else sums.sum_to_size(bias.shape)
        scaled = [each if weight is None else each * weight for each in (sums, products)]
        parts = torch.stack([each.sum(over.dims, keepdim=True) for each in scaled])
        adding = start_adding_up(parts, over.grid.group, what="adding up the gradients of a norm")
        torch.mul(gradient, inverse if weight is None else inverse * weight, out=result)
        first, second = inverse * adding.wait()[0] / over.count
        slope = second * inverse
        result.addcmul_(value, slope, value=-1).add_(mean * slope - first)
        return result.to(value.dtype), of_weight, of_bias, None


@dataclass(frozen=True, slots=True)
class _Over:
    """The values normalised together: those along ``dims``, ``count`` of them in the whole."""

    dims: tuple[int, ...]
    count: int
    eps: float
    grid: Grid


def batch_norm(module: nn.modules.batchnorm._BatchNorm, grid: Grid, input: Shard) -> Tensor:
    """Rule of batch norms; a batch counts once even if checkpointing repeats its forward."""
    tracked = module.running_mean is not None
    momentum = module.momentum
    if module.training and tracked:
        assert module.num_batches_tracked is not None
        if not recomputing():
            module.num_batches_tracked.add_(1)
        if momentum is None:
            momentum = 1 / float(module.num_batches_tracked)
    return F.batch_norm(
        input,
        module.running_mean,
        module.running_var,
        module.weight,
        module.bias,
        module.training or not tracked,
        momentum or 0.0,
        module.eps,
    )


@function_rule(F.batch_norm)
def _batch_norm(
    _: Any,
    input: Shard,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """Normalises with the statistics of the whole; running variances are unbiased (n - 1).

    A forward pass that activation checkpointing repeats does not change running statistics.
    """
    uncut(input, 1, "a batch norm of channels in")
    local = local_of(input)
    if not training:
        result = F.batch_norm(local, running_mean, running_var, weight, bias, False, 0.0, eps)
        return alike(result, input)
    shape = whole_shape(input)
    count = shape.numel() // shape[1]
    if count <= 1:
        raise ValueError(
            f"Expected more than 1 value per channel when training, got input size {shape}"
        )
    over = _Over((0, *range(2, len(shape))), count, eps, input.grid)
    scales = [
        None if each is None else each.view(1, -1, *[1] * (len(shape) - 2))
        for each in (weight, bias)
    ]
    result, mean, variance = _Normalised.apply(local, *scales, over)  # type: ignore[no-untyped-call]
    if running_mean is not None and running_var is not None and not recomputing():
        with torch.no_grad():
            sample_variance = variance.flatten() * (count / (count - 1))
            running_mean.lerp_(mean.flatten().to(running_mean.dtype), momentum)
            running_var.lerp_(sample_variance.to(running_var.dtype), momentum)
    return alike(result, input)


@function_rule(F.group_norm)
def _group_norm(
    func: Any,
    input: Shard,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    local = local_of(input)
    if func is F.group_norm and local.is_cuda and torch.is_autocast_enabled("cuda"):
        local = local.float()  # as PyTorch's group norm does under autocast
    uncut(input, 1, "a norm of groups of channels in")
    shape = whole_shape(input)
    grouped = local.reshape(shape[0], num_groups, shape[1] // num_groups, *local.shape[2:])
    count = shape[1:].numel() // num_groups
    over = _Over(tuple(range(2, grouped.dim())), count, eps, input.grid)
    weights = [
        None if each is None else each.view(1, num_groups, -1, *[1] * (len(shape) - 2))
        for each in (weight, bias)
    ]
    result, _mean, _variance = _Normalised.apply(grouped, *weights, over)  # type: ignore[no-untyped-call]
    return alike(result.flatten(1, 2), input)


@function_rule(F.instance_norm)
def _instance_norm(
    func: Any,
    input: Shard,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    if running_mean is not None:
        raise without_rule("an instance norm that tracks running statistics")
    return _group_norm(func, input, input.shape[1], weight, bias, eps)
