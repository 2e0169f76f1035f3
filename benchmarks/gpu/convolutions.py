"""The 13 sparse convolutions of VGG16-BN at 50^3: our backends, two floors, other libraries.

Forward, input gradient, weight gradient and kernel maps are timed apart, layer by layer, each
repeatedly after a warm-up. The first layer has no input gradient. The floors are those of the
same pairs (input voxel, output voxel): their FLOPs at the rate of one large ``torch.mm`` of that
precision, and their fewest bytes (features, kernel and result once an operation) at the rate of a
copy. Every row has the largest relative error of two of its layers, of outputs and both gradients,
against float64 on the same device and the same numbers; that is held against the CPU in a row of
its own.
"""

from __future__ import annotations

import copy
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path

import torch
from convolution_peers import LIBRARIES, Library, Operations, Ours, present
from records import Row, Rows
from sparse_conv import LEVELS, Layer, make_batch, make_layers
from torch import Tensor

from sparsepipe.profiling.timing import Clock, copy_speed
from sparsepipe.sparse import SparseTensor
from sparsepipe.utils.process import multiplying

COLUMNS: Mapping[str, str] = {
    "library": "library",
    "version": "version",
    "flop_per_s": "FLOP/s",
    "bytes_per_s": "bytes/s",
    "voxels_a_shape": "voxels a shape",
    "neighbours_a_voxel": "neighbours a voxel",
    "maps_s": "kernel maps, s",
    "forward_s": "forward, s",
    "input_gradient_s": "input gradient, s",
    "weight_gradient_s": "weight gradient, s",
    "step_s": "step, s",
    "floor_flops_s": "floor of FLOPs, s",
    "floor_bytes_s": "floor of bytes, s",
    "times_floor": "step over the larger floor",
    "times_native": "step over native",
    "relative_error": "relative error",
    "wrong": "wrong",
    "peak_bytes": "peak, bytes",
    "note": "note",
    "missing": "missing",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Precision:
    """How numbers are kept and multiplied.

    Attributes:
        name: in rows.
        dtype: of features, kernels and gradients.
        tf32: whether products may be rounded to TF32.
        tolerance: of the relative error.
    """

    name: str
    dtype: torch.dtype
    tf32: bool = False
    tolerance: float


FP32 = Precision(name="fp32", dtype=torch.float32, tolerance=1e-4)
TF32 = Precision(name="TF32", dtype=torch.float32, tf32=True, tolerance=3e-3)
BF16 = Precision(name="bf16", dtype=torch.bfloat16, tolerance=2e-2)
FP16 = Precision(name="fp16", dtype=torch.float16, tolerance=2e-2)

_ON_CPU = ("fp32", "bf16")
_DEPTHS = [depth for depth, shapes in enumerate(LEVELS) for _ in shapes]
_CHECKED = (1, 5)
"""Layers of which results are compared: 64 to 64 channels at the first level, 256 to 256."""

_REPEATED_S = 0.05
_FEWEST_REPEATS = {"cuda": 5, "cpu": 1}
_MOST_REPEATS = 30
"""Each operation is repeated for so long, but at least and at most so often."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """What one row measures.

    Attributes:
        library: that computes.
        precision: in which.
        batch: voxels, on the device.
        flop_per_s: of a large product in that precision; None where it was not measured.
        bytes_per_s: of a copy; None where it was not measured.
        native_step_s: of the native backend's row; None for that itself.
    """

    library: Library
    precision: Precision
    batch: SparseTensor
    flop_per_s: float | None
    bytes_per_s: float | None
    native_step_s: float | None = None


def measure(rows: Rows, *, device: torch.device, work: Path) -> None:
    """Measures all rows in order of worth; on a CPU two shapes, and only the native backend.

    Args:
        rows: of the record.
        device: that computes.
        work: not needed, nothing is written but rows.
    """
    on_cuda = device.type == "cuda"
    native = Ours("native", *((p.name for p in (BF16, TF32, FP16, FP32)) if on_cuda else _ON_CPU))
    precisions = {p.name: p for p in (FP32, TF32, BF16, FP16) if p.name in native.precisions}
    flop_per_s, bytes_per_s = _floors(rows, list(precisions.values()), device)
    batches = [make_batch(size, seed=0).to(device) for size in ((64, 128) if on_cuda else (2,))]
    native_s: dict[tuple[int, str], float] = {}

    def layers(library: Library, name: str) -> None:
        for batch in batches:
            case = Case(
                library=library,
                precision=precisions[name],
                batch=batch,
                flop_per_s=flop_per_s[name],
                bytes_per_s=bytes_per_s,
                native_step_s=native_s.get((batch.batch_size, name)),
            )
            _measure_maps(rows, library, batch)
            if (row := _measure_layers(rows, case)) and library is native:
                native_s[batch.batch_size, name] = row["step_s"]

    for name in native.precisions:
        layers(native, name)
    libraries = present(rows, LIBRARIES, on_cuda=on_cuda)
    # Each one's worthiest precision first: tuning takes most of the time, in each precision anew.
    for rank in range(len(native.precisions)):
        for library in libraries:
            for name in library.precisions[rank : rank + 1]:
                layers(library, name)
    if on_cuda:
        rows.measure("float64 on the device against the CPU", lambda: _against_the_cpu(device))


def _floors(
    rows: Rows, precisions: Sequence[Precision], device: torch.device
) -> tuple[dict[str, float | None], float | None]:
    """FLOP a second by precision, and bytes a second of a copy."""
    on_cuda = device.type == "cuda"

    def product(precision: Precision) -> Row:
        size = 8192 if on_cuda else 1024
        left, right = torch.randn(2, size, size, device=device).to(precision.dtype)
        out = torch.empty_like(left)
        with multiplying("high" if precision.tf32 else "highest"):
            time_s = _median_s(lambda: torch.mm(left, right, out=out), device)
        return {"precision": precision.name, "size": size, "flop_per_s": 2.0 * size**3 / time_s}

    def copy() -> Row:
        size_bytes = 4_000_000_000 if on_cuda else 200_000_000
        speed = copy_speed(device, size_bytes=size_bytes, warmups=2, repeats=10)
        return {"size_bytes": size_bytes, "bytes_per_s": speed.per_s}

    flop_per_s: dict[str, float | None] = {}
    for precision in precisions:
        row = rows.measure(f"floor {precision.name} torch.mm", lambda p=precision: product(p))  # type: ignore[misc]
        flop_per_s[precision.name] = row["flop_per_s"] if row else None
    row = rows.measure("floor copy", copy)
    return flop_per_s, row["bytes_per_s"] if row else None


def _measure_maps(rows: Rows, library: Library, batch: SparseTensor) -> None:
    def maps() -> Row:
        time_s = _median_s(lambda: library.maps(batch), batch.device)
        return {
            "library": library.name,
            "version": library.version,
            "batch": batch.batch_size,
            "maps_s": time_s,
        }

    rows.measure(f"batch {batch.batch_size} kernel maps {library.name}", maps)


def _measure_layers(rows: Rows, case: Case) -> Row | None:
    name = f"batch {case.batch.batch_size} {case.precision.name} {case.library.name}"
    return rows.measure(name, lambda: _row_of(case))


def _row_of(case: Case) -> Row:
    """The row; where another library fails, what it says: that is no failure of ours."""
    if isinstance(case.library, Ours):
        return _layers_row(case)
    try:
        return _layers_row(case)
    except RuntimeError as error:
        if isinstance(error, torch.OutOfMemoryError):
            raise
        said = f"fails here: {type(error).__name__}: {error}"[:300]
        return {"library": case.library.name, "version": case.library.version, "missing": said}


def _layers_row(case: Case) -> Row:
    """Times of all layers one after the other, so that they do not share the memory."""
    device, precision = case.batch.device, case.precision
    layers = make_layers(case.batch, precision.dtype)
    maps = case.library.maps(case.batch)
    times_s: list[_Times] = []
    peaks_bytes: list[int] = []
    errors: list[float] = []
    case.library.allow_tf32(precision.tf32)
    with multiplying("high" if precision.tf32 else "highest"):
        for i, (depth, layer) in enumerate(zip(_DEPTHS, layers, strict=True)):
            operations = case.library.operations(maps, depth, layer)
            if device.type == "cuda":
                torch.cuda.reset_peak_memory_stats(device)
            times_s.append(_times_s(operations, device))
            if device.type == "cuda":
                peaks_bytes.append(torch.cuda.max_memory_allocated(device))
            if i in _CHECKED:
                errors += _errors(operations, _in_float64(layer))
            del operations
    error = max(errors, key=lambda value: math.inf if math.isnan(value) else value)
    return {
        "library": case.library.name,
        "version": case.library.version,
        "note": case.library.note,
        "precision": precision.name,
        "batch": case.batch.batch_size,
        "voxels_a_shape": len(layers[0].x) / case.batch.batch_size,
        "neighbours_a_voxel": sum(layers[0].pairs_K) / len(layers[0].x),
        **_sums(times_s, layers, case),
        "relative_error": error,
        "wrong": not error <= precision.tolerance,
        "peak_bytes": max(peaks_bytes, default=None),
    }


_Times = tuple[float, float | None, float]
"""Of forward, input gradient and weight gradient."""


def _times_s(operations: Operations, device: torch.device) -> _Times:
    input_gradient = operations.input_gradient
    return (
        _median_s(operations.forward, device),
        None if input_gradient is None else _median_s(input_gradient, device),
        _median_s(operations.weight_gradient, device),
    )


def _sums(times_s: Sequence[_Times], layers: Sequence[Layer], case: Case) -> Row:
    """The layers' times, their sums, and both floors beside them."""
    forward_s, input_s, weight_s = (list(column) for column in zip(*times_s, strict=True))
    known_input_s = [time_s for time_s in input_s if time_s is not None]
    step_s = sum(filter(None, chain(forward_s, known_input_s, weight_s)))
    floors_s = {
        "floor_flops_s": _quotient(sum(layer.flops for layer in layers), case.flop_per_s),
        "floor_bytes_s": _quotient(sum(map(_fewest_bytes, layers)), case.bytes_per_s),
    }
    larger_s = max((floor_s for floor_s in floors_s.values() if floor_s), default=None)
    return {
        "forward_s": sum(filter(None, forward_s)),
        "input_gradient_s": sum(known_input_s) if known_input_s else None,
        "weight_gradient_s": sum(filter(None, weight_s)),
        "step_s": step_s,
        **floors_s,
        "times_floor": _quotient(step_s, larger_s),
        "times_native": _quotient(step_s, case.native_step_s),
        "layers_forward_s": forward_s,
        "layers_input_gradient_s": input_s,
        "layers_weight_gradient_s": weight_s,
    }


def _quotient(amount: float, unit: float | None) -> float | None:
    return amount / unit if unit else None


def _fewest_bytes(layer: Layer) -> int:
    """That the operations of a layer read and write, each operand and each result once."""
    feats, grad = layer.x.feats, layer.grad_ND
    sizes = feats.numel() + layer.conv.kernel.numel() + grad.numel()
    return (2 if layer.first else 3) * sizes * feats.element_size()


def _in_float64(layer: Layer, device: torch.device | None = None) -> Operations:
    """Our operations of a layer on the same numbers in float64, perhaps on another device."""
    x = layer.x.detach()
    if device is None:
        x = x.replace_feats(x.feats.double())
    else:
        x = SparseTensor(
            x.feats.to(device).double(),
            x.coords.to(device),
            spatial_shape=x.spatial_shape,
            batch_size=x.batch_size,
        )
    conv = copy.deepcopy(layer.conv).to(x.device, torch.float64)
    grad_ND = layer.grad_ND.to(x.device, torch.float64)
    return Ours("native").operations(None, 0, replace(layer, x=x, conv=conv, grad_ND=grad_ND))


def _errors(operations: Operations, exact: Operations) -> list[float]:
    """Relative errors of the output and of the gradients there are, in the Frobenius norm."""
    rows, kernel = operations.to_our_rows, operations.to_our_kernel
    errors = [_relative_error(rows(operations.forward()), exact.forward())]
    errors.append(_relative_error(kernel(operations.weight_gradient()), exact.weight_gradient()))
    if operations.input_gradient is not None and exact.input_gradient is not None:
        result = rows(operations.input_gradient())
        errors.append(_relative_error(result, exact.input_gradient()))
    return errors


def _relative_error(result: Tensor, exact: Tensor) -> float:
    exact = exact.to(result.device)
    return float((result.double() - exact).norm() / exact.norm())


def _against_the_cpu(device: torch.device) -> Row:
    """Our float64, which the other rows are held against, on the device and on a CPU."""
    layers = make_layers(make_batch(1, seed=1), torch.float64)
    errors = [_errors(_in_float64(layers[i], device), _in_float64(layers[i])) for i in _CHECKED]
    error = max(chain(*errors))
    return {"library": "native", "batch": 1, "relative_error": error, "wrong": not error <= 1e-12}


def _median_s(function: Callable[[], object], device: torch.device) -> float:
    """Of one call; the first ones, which compile, tune and allocate, are left out."""
    clock = Clock(device)
    function()
    clock.synchronise()
    times_s: list[float] = []
    repeats = 1
    while len(times_s) < repeats:
        clock.mark()
        for _ in range(repeats - len(times_s)):
            function()
            clock.mark()
        times_s += clock.seconds()
        fitting = int(_REPEATED_S / max(times_s[0], 1e-6))
        repeats = max(_FEWEST_REPEATS[device.type], min(_MOST_REPEATS, fitting))
    return statistics.median(times_s)
