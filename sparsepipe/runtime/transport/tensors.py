"""Single tensors as bytes and back, with their memory layout."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor


class Unsendable(Exception):
    """A value that cannot travel; the text says which and what to do."""

    def __init__(self, what: str, *, remedy: str) -> None:
        super().__init__(what)
        self.what = what
        self.remedy = remedy


class TensorSpec(NamedTuple):
    """What the receiver must know of a tensor before it comes.

    Attributes:
        dtype: element type.
        shape: sizes.
        stride: in elements; a dense tensor keeps its layout (channels last, say), since
            kernels choose by it how they sum.
        wants_gradient: it required one where it came from.
        where: "host" or "device", the memory it is to lie in; "meta" has no data.
        data: its bytes if they are in the header, else None: they follow.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    wants_gradient: bool
    where: str
    data: bytes | None = None

    @property
    def size_bytes(self) -> int:
        """Of the elements."""
        return math.prod(self.shape) * self.dtype.itemsize


def describe(
    tensor: Tensor, *, wants_gradient: bool, inline_bytes: int
) -> tuple[TensorSpec, Tensor]:
    """A tensor as its spec and its bytes (uint8 [size_bytes]; no copy of dense tensors).

    Args:
        tensor: strided, on the host, a CUDA device or "meta".
        wants_gradient: whether the receiver's shall require one.
        inline_bytes: a tensor on the host of at most that size has its bytes in the spec.

    Raises:
        Unsendable: not a plain strided tensor.
    """
    known = type(tensor) in (Tensor, torch.nn.Parameter)
    if not known or tensor.layout != torch.strided or tensor.is_quantized:
        raise Unsendable(
            f"a {type(tensor).__name__} of layout {tensor.layout}",
            remedy="hand on plain dense tensors: .as_subclass(torch.Tensor) or .to_dense()",
        )
    plain = tensor.detach().resolve_conj().resolve_neg()
    if not plain.is_contiguous():  # most are, and to look closer takes a while
        order = sorted(range(plain.dim()), key=plain.stride, reverse=True)
        if not plain.permute(order).is_contiguous():
            plain = plain.contiguous()
    where = {"cpu": "host", "meta": "meta"}.get(plain.device.type, "device")
    flat = _flat_bytes(plain)
    inline = flat.numel() == 0 or (where == "host" and flat.numel() <= inline_bytes)
    spec = TensorSpec(
        dtype=plain.dtype,
        shape=tuple(plain.shape),
        stride=plain.stride(),
        wants_gradient=wants_gradient,
        where=where,
        data=flat.cpu().numpy().tobytes() if inline else None,
    )
    return spec, flat


def materialise(spec: TensorSpec, storage: Tensor | None, *, device: torch.device) -> Tensor:
    """The tensor that ``spec`` describes.

    Args:
        spec: its description.
        storage: uint8 [at least size_bytes] that holds its bytes and is not copied: the
            tensor is made of this memory. None where the bytes are in the spec.
        device: where an empty tensor for the device goes.
    """
    if spec.where == "meta":
        tensor = torch.empty_strided(spec.shape, spec.stride, dtype=spec.dtype, device="meta")
        return tensor.requires_grad_(spec.wants_gradient)
    if storage is None:
        assert spec.data is not None
        # One more byte, since there is no tensor on an empty buffer.
        storage = torch.frombuffer(bytearray(spec.data + b"\0"), dtype=torch.uint8)
        storage = storage.to(device) if spec.where == "device" else storage
    tensor = torch.empty(0, dtype=spec.dtype, device=storage.device)
    tensor.set_(storage.untyped_storage(), 0, spec.shape, spec.stride)
    return tensor.requires_grad_(spec.wants_gradient)


def _flat_bytes(dense: Tensor) -> Tensor:
    """The memory of a dense tensor; a "meta" tensor has none."""
    if dense.is_meta:
        return torch.empty(0, dtype=torch.uint8)
    flat = torch.empty(0, dtype=torch.uint8, device=dense.device)
    start = dense.storage_offset() * dense.element_size()
    return flat.set_(dense.untyped_storage(), start, (dense.numel() * dense.element_size(),), (1,))
