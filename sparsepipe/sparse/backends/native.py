"""The default backend, in plain PyTorch for any device, and its differentiable max pooling.

Shape suffixes: N input sites, M output sites, K offsets, C channels, P pairs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from sparsepipe.errors import BackendError, CoordinateError
from sparsepipe.sparse.backends.convolution import convolve, pairs_by_offset
from sparsepipe.sparse.kernel_map import CoordinateCache, KernelMap
from sparsepipe.sparse.kernel_spec import KernelSpec
from sparsepipe.sparse.row_sums import RowSums
from sparsepipe.sparse.saved_tensors import save, saved
from sparsepipe.sparse.tensor import SparseTensor


@dataclass(frozen=True)
class NativeBackend:
    """Convolves by gathering rows, a matrix product for each offset, and a sum for each output row.

    Computes in float32, float64, bfloat16 and float16; under autocast in the autocast
    dtype. Results are repeatable bit for bit on a CPU and on CUDA: no atomic additions.
    """

    name: ClassVar[str] = "native"

    def conv3d(
        self, x: SparseTensor, kernel: Tensor, bias: Tensor | None, spec: KernelSpec
    ) -> SparseTensor:
        """As :class:`.Backend` says; raises a BackendError if the kernel does not fit ``x``."""
        feats, kernel, bias = operands(x.feats, kernel, bias, spec)
        if spec.volume == 1 and spec.is_submanifold:  # a plain matrix product
            out = feats @ kernel[0]
            return x.replace_feats(out if bias is None else out + bias)
        found = self._kernel_map(feats, x.cache, spec)
        return at_level(x, self._convolve(feats, kernel, bias, found), found.output, spec)

    def conv_transpose3d(
        self,
        x: SparseTensor,
        kernel: Tensor,
        bias: Tensor | None,
        spec: KernelSpec,
        *,
        like: SparseTensor | None = None,
    ) -> SparseTensor:
        """Takes features from the outputs of a window back to its inputs: each site adds
        ``x @ kernel[k]`` to what it reads at offset ``k``.

        Args:
            x: features [M, Cin] on the outputs of the window.
            kernel: [K, Cin, Cout] over the offsets of the window, x fastest.
            bias: [Cout]; None: no bias.
            spec: the window.
            like: tensor on the inputs of the window, whose sites the result has; None: all sites
                that the window reaches (:func:`.build_transposed_map`), or those of ``x`` where
                the stride is 1.

        Raises:
            BackendError: the kernel does not fit.
            CoordinateError: ``x`` is not on the outputs of the window over ``like``, or without
                ``like`` has a stride that is not a multiple of the window's.
        """
        feats, kernel, bias = operands(x.feats, kernel, bias, spec)
        if like is None and not spec.is_submanifold:
            found = x.cache.kernel_map(spec, is_transposed=True)
            out = self._convolve(feats, kernel, bias, found)
            return at_level(x, out, found.output, spec, is_finer=True)
        like = x if like is None else like
        found = self._kernel_map(feats, like.cache, spec, is_turned=not spec.is_symmetric)
        _check_outputs(x, like, found)
        if spec.is_symmetric:  # its map is its own turned round, with offsets in reverse order
            return self.conv3d(like.replace_feats(feats), kernel.flip(0), bias, spec)
        return like.replace_feats(self._convolve(feats, kernel, bias, found.turned()))

    def _kernel_map(
        self,
        feats: Tensor,
        cache: CoordinateCache,
        spec: KernelSpec,
        *,
        is_turned: bool = False,
    ) -> KernelMap:
        """Returns a window's map; ``is_turned``: it will be turned round, which may be prepared."""
        return cache.kernel_map(spec)

    def _convolve(
        self, feats: Tensor, kernel: Tensor, bias: Tensor | None, kernel_map: KernelMap
    ) -> Tensor:
        out = convolve(feats, kernel, kernel_map)
        return out if bias is None else out + bias

    def max_pool3d(self, x: SparseTensor, spec: KernelSpec) -> SparseTensor:
        """See :class:`~sparsepipe.sparse.Backend`.

        Where several inputs share the maximum, the gradient goes to the first one in
        (x, y, z) order, as in dense max pooling.
        """
        kernel_map = x.cache.kernel_map(spec)
        if kernel_map.num_outputs:
            out = _MaxPool.apply(x.feats, kernel_map)  # type: ignore[no-untyped-call]
        else:
            out = x.feats.sum(0).expand(0, -1)
        return at_level(x, out, kernel_map.output, spec)

    def avg_pool3d(self, x: SparseTensor, spec: KernelSpec) -> SparseTensor:
        """Takes, in each channel, the mean of the features of the input sites in each window."""
        kernel_map = x.cache.kernel_map(spec)
        means = kernel_map.derived("means", build_means)
        return at_level(x, means(x.feats), kernel_map.output, spec)

    def global_max_pool(self, x: SparseTensor) -> Tensor:
        """Takes each sample's largest feature in each channel, [B, C]; 0 without sites.

        The gradient goes to the first row of the sample with this feature.
        """
        out: Tensor = _GlobalMax.apply(x.feats, *x.cache.samples())  # type: ignore[no-untyped-call]
        return out

    def global_avg_pool(self, x: SparseTensor) -> Tensor:
        """Takes the mean of each sample's features, [B, C]; 0 for a sample without sites."""
        _, counts_B = x.cache.samples()
        wide_NC = x.feats.to(torch.promote_types(x.dtype, torch.float32))
        total_BC: Tensor = _SampleSum.apply(wide_NC, x.cache)  # type: ignore[no-untyped-call]
        return (total_BC / counts_B.clamp(min=1)[:, None].to(wide_NC.dtype)).to(x.dtype)


def operands(
    feats: Tensor, kernel: Tensor, bias: Tensor | None, spec: KernelSpec
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Returns features, kernel and bias of a convolution, under autocast in its dtype; raises a
    BackendError if the kernel does not fit the window or the features.
    """
    if torch.is_autocast_enabled(feats.device.type) and feats.dtype != torch.float64:
        dtype = torch.get_autocast_dtype(feats.device.type)
        feats, kernel = feats.to(dtype), kernel.to(dtype)
        bias = None if bias is None else bias.to(dtype)
    if kernel.dim() != 3 or kernel.shape[:2] != (spec.volume, feats.shape[1]):
        raise BackendError(
            f"a kernel of shape {tuple(kernel.shape)} does not fit a window of size {spec.size} and"
            f" features of shape {tuple(feats.shape)}",
            remedy=f"give a kernel of shape [{spec.volume}, {feats.shape[1]}, out_channels]",
        )
    if kernel.dtype != feats.dtype:
        raise BackendError(
            f"features are {feats.dtype}, but the kernel is {kernel.dtype}",
            remedy="convert one of them, for example with x.to(kernel.dtype), or, if neither "
            "is float64, run under torch.autocast",
        )
    return feats, kernel, bias


def at_level(
    x: SparseTensor,
    feats: Tensor,
    level: CoordinateCache | None,
    spec: KernelSpec,
    *,
    is_finer: bool = False,
) -> SparseTensor:
    """Returns ``feats`` on the sites of ``level``, to which the window leads from ``x``.

    ``level``: None for that of ``x``; ``is_finer``: whether the window was transposed.
    """
    if level is None:
        return x.replace_feats(feats)
    strides = list(zip(x.stride, spec.stride, strict=True))
    if is_finer and any(a % b for a, b in strides):
        raise CoordinateError(
            f"a tensor of stride {x.stride} has no level that is finer by {spec.stride}",
            remedy="give the tensor its stride, in voxels of the finest grid to be reached",
        )
    sx, sy, sz = (a // b if is_finer else a * b for a, b in strides)
    return SparseTensor(
        feats,
        level.coords_N4,
        stride=(sx, sy, sz),
        spatial_shape=level.spatial_shape,
        batch_size=x.batch_size,
        cache=level,
    )


def _check_outputs(x: SparseTensor, like: SparseTensor, kernel_map: KernelMap) -> None:
    """Raises a CoordinateError unless ``x`` is on the outputs of a map over the sites of ``like``;
    equal sites that are not the same tensor are compared, which waits for the device.
    """
    level, spec = kernel_map.output or like.cache, kernel_map.spec
    stride = tuple(a * b for a, b in zip(like.stride, spec.stride, strict=True))
    needed = (stride, level.spatial_shape, like.batch_size)
    if (x.stride, x.spatial_shape, x.batch_size) != needed or not (
        x.coords is level.coords_N4 or torch.equal(x.coords, level.coords_N4)
    ):
        raise CoordinateError(
            f"the sites of {x!r} are not those to which a window of size {spec.size}, stride "
            f"{spec.stride} and dilation {spec.dilation} leads from {like!r}",
            remedy="give as second tensor one on the sites before the convolution that led to "
            "those of the first, and the same kernel size, stride and dilation",
        )


@dataclass(frozen=True, slots=True)
class Round:
    """One round of max pooling: for some n, the n-th input-output pair of every window that has at
    least n inputs.

    Attributes:
        outputs_P: int64, the output row of each pair; no row occurs twice.
        inputs_P: int32, the input row.
        offsets_P1: int16 [P, 1], the kernel offset.
    """

    outputs_P: Tensor
    inputs_P: Tensor
    offsets_P1: Tensor


def build_rounds(kernel_map: KernelMap) -> list[Round]:
    """Sorts pairs into rounds by their position in their window, in dense pooling's scan order.

    On a surface, most windows hold one or two inputs, so only the first rounds are long.
    """
    # Offsets (x fastest) in the scan order of dense pooling (z fastest).
    sx, sy, sz = map(range, kernel_map.spec.size)
    places = [(z * len(sy) + y) * len(sx) + x for x in sx for y in sy for z in sz]
    order = torch.tensor(places, device=kernel_map.neighbours_KM.device)
    rows_MK = kernel_map.neighbours_KM.index_select(0, order).t().contiguous()
    exists_MK = rows_MK >= 0
    outputs_P, places_P = exists_MK.nonzero().unbind(1)
    inputs_P = rows_MK[exists_MK]
    counts_M = exists_MK.sum(1)
    starts_M = counts_M.cumsum(0) - counts_M
    round_P = torch.arange(len(outputs_P), device=order.device) - starts_M[outputs_P]
    by_round_P = torch.argsort(round_P.short(), stable=True)
    sizes: list[int] = torch.bincount(round_P).tolist()
    columns = (outputs_P, inputs_P, order[places_P].short()[:, None])
    sections = (column[by_round_P].split_with_sizes(sizes) for column in columns)
    return [Round(*section) for section in zip(*sections, strict=True)]


class _MaxPool(torch.autograd.Function):
    """Largest input of each window [M, C]; the gradient goes to the first of the largest inputs."""

    @staticmethod
    def forward(ctx: Any, feats_NC: Tensor, kernel_map: KernelMap) -> Tensor:
        # Every output has an input, so the first round covers them all, in order.
        first, *others = kernel_map.derived("rounds", build_rounds)
        best_MC = feats_NC.index_select(0, first.inputs_P)
        winner_MC = first.offsets_P1.expand(best_MC.shape).contiguous()
        for later in others:
            best_PC = best_MC.index_select(0, later.outputs_P)
            other_PC = feats_NC.index_select(0, later.inputs_P)
            winner_PC = winner_MC.index_select(0, later.outputs_P)
            winner_PC = torch.where(other_PC > best_PC, later.offsets_P1, winner_PC)
            winner_MC.index_copy_(0, later.outputs_P, winner_PC)
            best_MC.index_copy_(0, later.outputs_P, torch.maximum(other_PC, best_PC))
        save(ctx, winner_MC, derived=kernel_map)
        return best_MC

    @staticmethod
    def backward(ctx: Any, grad_MC: Tensor) -> tuple[Tensor, None]:
        (winner_MC,), kernel_map = saved(ctx)
        return max_pool_gradient(winner_MC, grad_MC, kernel_map), None


def max_pool_gradient(winner_MC: Tensor, grad_MC: Tensor, kernel_map: KernelMap) -> Tensor:
    """Returns the gradient [N, C] of pooled features, with operations that autograd can
    differentiate; ``winner_MC``: the offset of the largest input of each window.
    """
    if kernel_map.parent_N is not None and kernel_map.offset_N is not None:
        own_NC = winner_MC.index_select(0, kernel_map.parent_N)
        own_NC = own_NC == kernel_map.offset_N.to(winner_MC.dtype)[:, None]
        return grad_MC.index_select(0, kernel_map.parent_N).mul_(own_NC)
    # For each input, the sum of the gradients of all windows in which it is the maximum.
    grad_NC = grad_MC.new_zeros(kernel_map.num_inputs, grad_MC.shape[1])
    for k, (outputs_P, inputs_P) in enumerate(kernel_map.derived("pairs", pairs_by_offset)):
        is_winner_PC = winner_MC.index_select(0, outputs_P) == k
        share_PC = grad_MC.index_select(0, outputs_P).mul_(is_winner_PC)
        # At one offset each input is read by at most one window, so that rows never collide.
        grad_NC.index_copy_(0, inputs_P, share_PC.add_(grad_NC.index_select(0, inputs_P)))
    return grad_NC


def build_means(kernel_map: KernelMap) -> RowSums:
    """Returns the map from inputs to the mean of each window."""
    outputs_P, inputs_P = map(torch.cat, zip(*pairs_by_offset(kernel_map), strict=True))
    inputs, outputs = kernel_map.num_inputs, kernel_map.num_outputs
    return RowSums.of(inputs_P, outputs_P, num_sources=inputs, num_targets=outputs, is_mean=True)


def _by_sample(feats_NC: Tensor, rows_BL: Tensor, padding: float) -> Tensor:
    padded = torch.cat([feats_NC, feats_NC.new_full((1, feats_NC.shape[1]), padding)])
    return padded.index_select(0, rows_BL.view(-1)).view(*rows_BL.shape, feats_NC.shape[1])


class _GlobalMax(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, feats_NC: Tensor, rows_BL: Tensor, counts_B: Tensor) -> Tensor:
        batch, longest = rows_BL.shape
        ctx.num_rows = feats_NC.shape[0]
        if longest == 0:
            ctx.save_for_backward(rows_BL.new_empty(batch, feats_NC.shape[1]))
            return feats_NC.new_zeros(batch, feats_NC.shape[1])
        best, place_BC = _by_sample(feats_NC, rows_BL, -torch.inf).max(1)
        # Row N, one past the features, takes the gradients of samples without sites.
        ctx.save_for_backward(rows_BL.gather(1, place_BC))
        return best.masked_fill_(counts_B[:, None] == 0, 0)

    @staticmethod
    def backward(ctx: Any, grad_BC: Tensor) -> tuple[Tensor, None, None]:
        (winner_BC,) = ctx.saved_tensors
        grad = grad_BC.new_zeros(ctx.num_rows + 1, grad_BC.shape[1])
        if ctx.num_rows:
            grad.scatter_(0, winner_BC, grad_BC)
        return grad[: ctx.num_rows], None, None


class _SampleSum(torch.autograd.Function):
    """Sum of the rows of each sample [B, C], the adjoint of :class:`_SampleRows`."""

    @staticmethod
    def forward(ctx: Any, feats_NC: Tensor, level: CoordinateCache) -> Tensor:
        save(ctx, derived=level)
        return _by_sample(feats_NC, level.samples()[0], 0.0).sum(1)

    @staticmethod
    def backward(ctx: Any, grad_BC: Tensor) -> tuple[Tensor, None]:
        return sample_rows(grad_BC, saved(ctx)[1]), None


class _SampleRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values_BC: Tensor, level: CoordinateCache) -> Tensor:
        save(ctx, derived=level)
        return values_BC.index_select(0, level.coords_N4[:, 0])

    @staticmethod
    def backward(ctx: Any, grad_NC: Tensor) -> tuple[Tensor, None]:
        return _SampleSum.apply(grad_NC, saved(ctx)[1]), None  # type: ignore[no-untyped-call]


def sample_rows(values_BC: Tensor, level: CoordinateCache) -> Tensor:
    """Returns, for each site of ``level``, the values of its sample, [N, C]."""
    out: Tensor = _SampleRows.apply(values_BC, level)  # type: ignore[no-untyped-call]
    return out
