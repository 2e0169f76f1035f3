"""Time the 13 convolutions of VGG16-BN on sparse voxels, forward plus backward.

The yardstick is the FLOP floor: the floating point operations of exactly the pairs
(input voxel, output voxel) that exist, at the speed of one large ``torch.mm`` measured
in the same run. "torch.mm alone" runs those products on their exact shapes, without
gathering and summing. Kernel maps are made anew for every step of a training run and
are a row of their own. Repetitions of all rows are interleaved; medians are printed.

    python benchmarks/sparse_conv.py                        # batch 8 and 16, 2 threads
    python benchmarks/sparse_conv.py --batch 16 --no-dense

Peers are rows where they can be imported, at one thread beside ours at one thread:
with more, spconv's CPU wheel returns wrong sums. It goes beside the project, not into
its environment:

    python -m venv /tmp/peers && /tmp/peers/bin/pip install spconv
    PYTHONPATH=$(echo /tmp/peers/lib/python*/site-packages) python benchmarks/sparse_conv.py

Shape suffixes: N voxels, M points, K offsets, C input and D output channels.
"""

from __future__ import annotations

import argparse
import functools
import math
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from sparse_conv_peers import on_one_thread, peer_rows
from torch import Tensor

from sparsepipe.sparse import Conv3d, KernelSpec, SparseTensor, sparse_collate
from sparsepipe.sparse.backends import convolution
from sparsepipe.sparse.backends.native import build_rounds

RESOLUTION = 50
POINTS = 4096
LEVELS: tuple[tuple[tuple[int, int], ...], ...] = (
    ((1, 64), (64, 64)),
    ((64, 128), (128, 128)),
    ((128, 256), (256, 256), (256, 256)),
)
LEVELS += ((256, 512), (512, 512), (512, 512)), ((512, 512), (512, 512), (512, 512))
WINDOW = KernelSpec.of(3)
DOWN = KernelSpec.of(2, stride=2)


def surface_points(kind: str, generator: torch.Generator) -> Tensor:
    """Points [M, 3] on a box, torus, cylinder or ellipsoid of random proportions."""
    u, v = torch.rand(2, POINTS, generator=generator) * 2 * math.pi
    size_3 = 0.4 + 0.6 * torch.rand(3, generator=generator)
    if kind == "box":
        points = torch.rand(POINTS, 3, generator=generator) * 2 - 1
        axis = torch.randint(0, 3, (POINTS,), generator=generator)
        side = torch.randint(0, 2, (POINTS,), generator=generator) * 2.0 - 1
        points[torch.arange(POINTS), axis] = side
    elif kind == "torus":
        ring, tube = 1.0, 0.25 + 0.25 * float(size_3[0])
        radius = ring + tube * v.cos()
        points = torch.stack([radius * u.cos(), radius * u.sin(), tube * v.sin()], dim=1)
    elif kind == "cylinder":
        points = torch.stack([u.cos(), u.sin(), v / math.pi - 1], dim=1)
    else:
        points = torch.randn(POINTS, 3, generator=generator)
        points = points / points.norm(dim=1, keepdim=True)
    return points * size_3


def make_batch(batch_size: int, seed: int) -> SparseTensor:
    """A batch of voxelised surfaces with the constant feature 1."""
    generator = torch.Generator().manual_seed(seed)
    kinds = ("box", "torus", "cylinder", "ellipsoid")
    samples = []
    for i in range(batch_size):
        points = surface_points(kinds[i % 4], generator)
        low, high = points.amin(0), points.amax(0)
        voxels = ((points - low) / (high - low) * RESOLUTION).long().clamp(max=RESOLUTION - 1)
        coords_n3 = torch.unique(voxels, dim=0)
        samples.append((coords_n3, torch.ones(len(coords_n3), 1)))
    return sparse_collate(samples, spatial_shape=(RESOLUTION,) * 3)


def fresh(batch: SparseTensor) -> SparseTensor:
    """The same batch without its cache."""
    return SparseTensor(
        batch.feats,
        batch.coords,
        spatial_shape=batch.spatial_shape,
        batch_size=batch.batch_size,
    )


@dataclass(frozen=True, slots=True)
class Layer:
    """One convolution with its input, its output's gradient and its pairs per offset."""

    x: SparseTensor
    conv: Conv3d
    grad_ND: Tensor
    pairs_K: list[int]

    @property
    def first(self) -> bool:
        """Whether it is the network's first layer, whose input needs no gradient."""
        return self.conv.in_channels == 1

    @property
    def flops(self) -> float:
        """Of the products, forward and backward."""
        products = 2 if self.first else 3
        return 2.0 * products * sum(self.pairs_K) * self.conv.in_channels * self.conv.out_channels


def make_layers(batch: SparseTensor, dtype: torch.dtype) -> list[Layer]:
    """The 13 convolutions on the five levels' own coordinates, random features, on its device."""
    torch.manual_seed(0)
    layers, cache, device = [], batch.cache, batch.device
    for depth, shapes in enumerate(LEVELS):
        if depth:
            cache = cache.kernel_map(DOWN).output or cache
        pairs_K = (cache.kernel_map(WINDOW).neighbours_KM >= 0).sum(1).tolist()
        for channels, width in shapes:
            feats = torch.rand(len(cache.coords_N4), channels, dtype=dtype, device=device)
            x = SparseTensor(
                feats.requires_grad_(channels > 1),
                cache.coords_N4,
                spatial_shape=cache.spatial_shape,
                batch_size=cache.batch_size,
                cache=cache,
            )
            with device:  # draws the kernel there: on a CPU that takes a second
                conv = Conv3d(channels, width).to(dtype)
            grad_ND = torch.randn(len(x), width, dtype=dtype, device=device)
            layers.append(Layer(x, conv, grad_ND, pairs_K))
    return layers


def run_ours(layers: list[Layer]) -> None:
    """Forward through all layers, then backward through all."""
    outputs = [layer.conv(layer.x).feats for layer in layers]
    for layer, out in zip(reversed(layers), reversed(outputs), strict=True):
        out.backward(layer.grad_ND)
        layer.conv.kernel.grad = layer.x.feats.grad = None


def mm_alone(layers: list[Layer]) -> Callable[[], None]:
    """The products of every offset on their exact shapes, into buffers made before."""
    rows = max(max(layer.pairs_K) for layer in layers)
    dtype = layers[0].grad_ND.dtype
    pool_in, pool_out, pool_grad = (torch.rand(rows * 512, dtype=dtype) for _ in range(3))
    kernels = [layer.conv.kernel.detach() for layer in layers]
    grads = [torch.empty_like(kernel) for kernel in kernels]

    def run() -> None:
        for layer, kernel_KCD, grad_KCD in zip(layers, kernels, grads, strict=True):
            channels, width = kernel_KCD.shape[1:]
            for k, pairs in enumerate(layer.pairs_K):
                inputs = pool_in[: pairs * channels].view(pairs, channels)
                outputs = pool_out[: pairs * width].view(pairs, width)
                torch.mm(inputs, kernel_KCD[k], out=outputs)
                torch.mm(inputs.t(), outputs, out=grad_KCD[k])
                if not layer.first:
                    back = pool_grad[: pairs * channels].view(pairs, channels)
                    torch.mm(outputs, kernel_KCD[k].t(), out=back)

    return run


def build_maps(batch: SparseTensor) -> None:
    """Everything the five levels derive from coordinates, from nothing."""
    cache = fresh(batch).cache
    for depth, shapes in enumerate(LEVELS):
        if depth:
            down = cache.kernel_map(DOWN)
            down.derived("rounds", build_rounds)
            cache = down.output or cache
        kernel_map = cache.kernel_map(WINDOW)
        for channels, width in shapes:
            if channels <= convolution._NARROW_CHANNELS:
                _ = kernel_map.neighbours_MK
                continue
            kernel = torch.empty(WINDOW.volume, channels, width, device=batch.device)
            rows = convolution._block_rows(kernel_map, kernel)
            kernel_map.gather_plan(rows)
            kernel_map.scatter_plan(rows)


def large_mm(dtype: torch.dtype) -> tuple[Callable[[], object], float]:
    """One large product and its floating point operations."""
    size = 2048
    a, b = torch.rand(2, size, size).to(dtype)
    out = torch.empty(size, size, dtype=dtype)
    return lambda: torch.mm(a, b, out=out), 2.0 * size**3


def dense_step(batch_size: int) -> Callable[[], None]:
    """The same 13 convolutions on dense grids."""
    torch.manual_seed(0)
    work = []
    for depth, shapes in enumerate(LEVELS):
        size = math.ceil(RESOLUTION / 2**depth)
        for channels, width in shapes:
            conv = torch.nn.Conv3d(channels, width, 3, padding=1, bias=False)
            x = torch.rand(batch_size, channels, size, size, size, requires_grad=channels > 1)
            work.append((conv, x))

    def run() -> None:
        for conv, x in work:
            out = conv(x)
            out.backward(out.detach())
            conv.weight.grad = x.grad = None

    return run


def time_interleaved(steps: dict[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """Median seconds of each step over interleaved repetitions, after a warm-up."""
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for repeat in range(repeats + 1):
        for name, step in steps.items():
            begin = time.perf_counter()
            step()
            if repeat:
                seconds[name].append(time.perf_counter() - begin)
    return {name: statistics.median(values) for name, values in seconds.items()}


def measure(batch_size: int, args: argparse.Namespace) -> None:
    """Print the table of one batch size."""
    batch = make_batch(batch_size, args.seed)
    steps: dict[str, Callable[[], object]] = {}
    for dtype, name in ((torch.float32, "fp32"), (torch.bfloat16, "bf16")):
        layers = make_layers(batch, dtype)
        steps[f"floor {name}"], mm_flops = large_mm(dtype)
        steps[f"torch.mm alone {name}"] = mm_alone(layers)
        steps[f"ours {name}"] = functools.partial(run_ours, layers)
    steps["kernel maps"] = functools.partial(build_maps, batch)
    layers = make_layers(batch, torch.float32)
    flops = sum(layer.flops for layer in layers)
    peers = peer_rows([(layer.x, layer.conv.out_channels) for layer in layers])
    torch.set_num_threads(args.threads)
    if peers:
        steps["floor fp32 (1 thread)"] = on_one_thread(large_mm(torch.float32)[0])
        steps["ours fp32 (1 thread)"] = on_one_thread(functools.partial(run_ours, layers))
        steps |= peers
    seconds = time_interleaved(steps, args.repeats)
    if not args.no_dense:
        dense_batch = min(batch_size, args.dense_batch)
        once = time_interleaved({"dense": dense_step(dense_batch)}, 1)["dense"]
        seconds[f"dense nn.Conv3d (from batch {dense_batch})"] = once * batch_size / dense_batch
    for name in (name for name in seconds if name.startswith("floor")):
        seconds[name] *= flops / mm_flops
    occupied = len(batch) / batch_size
    print(f"\nbatch {batch_size}: {occupied:.0f} voxels a shape, {flops / 1e9:.1f} GFLOP")
    print(f"{'':36}{'seconds':>9}{'x floor':>9}{'vs ours':>9}")
    for name, value in seconds.items():
        kind = "bf16" if "bf16" in name else "fp32"
        one = " (1 thread)" if "(1 thread)" in name else ""
        floor, ours = seconds[f"floor {kind}{one}"], seconds[f"ours {kind}{one}"]
        print(f"{name:36}{value:9.4f}{value / floor:9.2f}{value / ours:9.2f}")
    step = seconds["ours fp32"] + seconds["kernel maps"]
    print(f"kernel maps are {100 * seconds['kernel maps'] / step:.1f} % of maps plus ours fp32")


def main() -> None:
    """Parse the command line and measure."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--batch", type=int, nargs="+", default=[8, 16])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dense-batch", type=int, default=1, help="samples of the dense row")
    parser.add_argument("--no-dense", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    print(f"python {platform.python_version()}, torch {torch.__version__}, {cpu_name()}")
    print(f"{args.threads} threads, capability {torch.backends.cpu.get_cpu_capability()}")
    for batch_size in args.batch:
        measure(batch_size, args)


def cpu_name() -> str:
    """The processor's model name where the system tells it."""
    try:
        with open("/proc/cpuinfo") as lines:
            names = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
        return f"{names[0]} ({len(names)} cores)"
    except (OSError, IndexError):
        return platform.processor() or platform.machine()


if __name__ == "__main__":
    main()
