"""spconv-triton's implicit products as a backend, fed with this package's maps and masks."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from sparsepipe.errors import BackendError
from sparsepipe.sparse.backends.convolution import differentiable_gradients
from sparsepipe.sparse.backends.triton.backend import TritonBackend
from sparsepipe.sparse.backends.triton.narrow import MOST_CHANNELS
from sparsepipe.sparse.backends.triton.tiles import input_order, input_rows, output_order
from sparsepipe.sparse.kernel_map import KernelMap
from sparsepipe.sparse.saved_tensors import save, saved

_MASKS = [np.array([0xFFFFFFFF], np.uint32)]


@dataclass(frozen=True)
class SpconvTritonBackend(TritonBackend):
    """Convolves with spconv-triton; kernel maps, narrow layers, inverse convolutions, and pooling
    are those of Triton.

    spconv-triton times configurations at each new shape, so that the first steps are slow, and
    another run may choose others and round differently.

    Raises:
        BackendError: spconv-triton is not installed.
    """

    name: ClassVar[str] = "spconv_triton"

    def __post_init__(self) -> None:
        if importlib.util.find_spec("spconv_triton") is None:
            raise BackendError(
                "spconv-triton is not installed",
                remedy="install the extra spconv_triton, or use backend=auto",
            )

    def _multiply(
        self, feats: Tensor, kernel: Tensor, bias: Tensor | None, kernel_map: KernelMap
    ) -> Tensor:
        if kernel.shape[1] <= MOST_CHANNELS or kernel_map.turned_of:
            return super()._multiply(feats, kernel, bias, kernel_map)
        out: Tensor = _Convolution.apply(feats, kernel, kernel_map)  # type: ignore[no-untyped-call]
        return out if bias is None else out + bias


class _Convolution(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, feats_NC: Tensor, kernel_KCD: Tensor, kernel_map: KernelMap) -> Tensor:
        ops = _operations()
        save(ctx, feats_NC, kernel_KCD, derived=kernel_map)
        out: Tensor = ops.implicit_gemm(
            feats_NC,
            kernel_KCD.permute(2, 0, 1).contiguous(),
            kernel_map.neighbours_KM,
            *_outputs(kernel_map),
            kernel_map.num_outputs,
            _MASKS,
            is_train=True,
            is_subm=kernel_map.spec.is_submanifold,
            fp32_accum=True,
        )[0]
        return out

    @staticmethod
    def backward(ctx: Any, grad_MD: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        (feats_NC, kernel_KCD), kernel_map = saved(ctx)
        if torch.is_grad_enabled():  # for a second derivative
            needs = ctx.needs_input_grad
            return (
                *differentiable_gradients(feats_NC, kernel_KCD, grad_MD, kernel_map, needs),
                None,
            )
        readers_KN = input_rows(kernel_map).sources_KM
        masks, orders = zip(_outputs(kernel_map), _inputs(kernel_map), strict=True)
        grad_feats, grad_DKC = _operations().implicit_gemm_backward(
            feats_NC,
            kernel_KCD.permute(2, 0, 1).contiguous(),
            grad_MD,
            kernel_map.neighbours_KM,
            readers_KN,
            *masks,
            *orders,
            torch.Tensor(),
            _MASKS,
            -1,
            is_subm=kernel_map.spec.is_submanifold,
            fp32_accum=True,
        )
        return grad_feats, grad_DKC.permute(1, 2, 0), None


def _operations() -> Any:
    """Returns the library's functions, which multiply float32 as torch's setting says."""
    from spconv_triton import constants
    from spconv_triton.pytorch import ops

    constants.SPCONV_ALLOW_TF32 = torch.get_float32_matmul_precision() != "highest"
    return ops


def _outputs(kernel_map: KernelMap) -> tuple[list[Tensor], list[Tensor]]:
    return kernel_map.derived(
        "spconv-triton's outputs",
        lambda own: _masked(own.neighbours_KM, output_order(own)),
    )


def _inputs(kernel_map: KernelMap) -> tuple[list[Tensor], list[Tensor]]:
    return kernel_map.derived(
        "spconv-triton's inputs",
        lambda own: _masked(input_rows(own).sources_KM, input_order(own)),
    )


def _masked(rows_KM: Tensor, order_M: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    """Returns the masks and the order of rows, in the library's format."""
    bits_K = torch.arange(rows_KM.shape[0], dtype=torch.int32, device=rows_KM.device)
    masks_M = ((rows_KM >= 0).int() << bits_K[:, None]).sum(0, dtype=torch.int32)
    return [masks_M.index_select(0, order_M)], [order_M.int()]
