"""Time a training step of MinkUNet18 on a scene of voxels of 2 cm.

The scene is a made-up corner of a room with furniture, turned by an odd angle and noisy, as a
scanner sees it. A step is forward, cross-entropy and backward on new coordinates: kernel maps,
norms and activations count, as they do in a training.

The yardstick is the FLOP floor: the floating point operations of exactly the pairs (input voxel,
output voxel) that exist, at the speed of one large ``torch.mm`` measured in the same run. The same
network on spconv, with the same weights, is a row where spconv can be imported, at one thread
beside ours at one thread: with more, its CPU wheel returns wrong sums. Repetitions of all rows are
interleaved; medians and the range are printed.

    python benchmarks/unet.py                  # 1 and 2 threads
    python benchmarks/unet.py --network minkunet14 --size 1.5 --repeats 3 --profile

Shape suffixes: N voxels, P points.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import math
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from sparse_conv import cpu_name, fresh, large_mm
from sparse_conv_peers import on_one_thread
from torch import Tensor, nn
from torch.nn import functional as F

from sparsepipe import models, sparse
from sparsepipe.models.convert import converted
from sparsepipe.utils.process import keep_freed_memory

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.support.spconv_unet import SpconvUNet

VOXEL_M = 0.02
CLASSES = 13
FEATURES = 6
CHANNELS = (32, 64, 128, 256, 256, 128, 96, 96)
BLOCKS = {"minkunet14": (1,) * 8, "minkunet18": (2,) * 8, "minkunet34": (2, 3, 4, 6, 2, 2, 2, 2)}


def room(size_m: float, generator: torch.Generator) -> Tensor:
    """Points [P, 3] in metres on a floor, two walls and furniture: boxes, drums and balls."""
    per_m2 = 12_000  # about five points a voxel, so that few are missed

    def uniform(points: int, *size: float) -> Tensor:
        return torch.rand(points, len(size), generator=generator) * torch.tensor(size)

    def sheet(u: float, v: float, axis: int) -> Tensor:
        flat = uniform(int(per_m2 * u * v), u, v)
        columns = list(flat.unbind(1))
        columns.insert(axis, torch.zeros(len(flat)))
        return torch.stack(columns, 1)

    parts = [sheet(size_m, size_m, 2), sheet(size_m, 2.2, 0), sheet(size_m, 2.2, 1)]
    for number in range(round(3 * size_m)):
        at_3 = torch.cat([0.3 + uniform(1, size_m - 0.8, size_m - 0.8)[0], torch.zeros(1)])
        x, y, z = (0.3 + uniform(1, 0.5, 0.5, 0.6)[0]).tolist()
        if number % 3 == 0:
            faces = [sheet(x, y, 2) + torch.tensor([0, 0, z])]
            for axis, (width, depth) in enumerate(((y, x), (x, y))):
                far_3 = torch.zeros(3)
                far_3[axis] = depth
                faces += [sheet(width, z, axis), sheet(width, z, axis) + far_3]
            parts.append(torch.cat(faces) + at_3)
        elif number % 3 == 1:
            around, height = uniform(int(per_m2 * math.pi * x * z), 2 * math.pi, z).unbind(1)
            drum = torch.stack([x / 2 * around.cos(), x / 2 * around.sin(), height], 1)
            parts.append(drum + at_3)
        else:
            ball = torch.randn(int(per_m2 * math.pi * x * x), 3, generator=generator)
            ball = F.normalize(ball) * x / 2 + torch.tensor([0, 0, x / 2])
            parts.append(ball + at_3)
    points_P3 = torch.cat(parts)
    points_P3 = points_P3 + 0.004 * torch.randn(points_P3.shape, generator=generator)
    cos, sin = math.cos(0.4), math.sin(0.4)
    return points_P3 @ torch.tensor([[cos, sin, 0.0], [-sin, cos, 0.0], [0.0, 0.0, 1.0]])


def make_scene(size_m: float, seed: int) -> sparse.SparseTensor:
    """The voxels of a room, in lexicographic order, with random features."""
    generator = torch.Generator().manual_seed(seed)
    points_P3 = room(size_m, generator)
    voxels_P3 = ((points_P3 - points_P3.amin(0)) / VOXEL_M).long()
    coords_N3 = torch.unique(voxels_P3, dim=0)
    feats = torch.rand(len(coords_N3), FEATURES, generator=generator)
    shape = [-(-int(size + 1) // 64) * 64 for size in coords_N3.amax(0)]
    return sparse.sparse_collate([(coords_N3, feats)], spatial_shape=shape)


def flops_of(network: nn.Module, scene: sparse.SparseTensor) -> float:
    """Floating-point operations of the products of a step: two for each pair and weight in the
    forward, twice as many in the backward, of which the first layer needs half.
    """
    counts: list[float] = []

    def count(layer: nn.Module, given: tuple[sparse.SparseTensor, ...], _: object) -> None:
        if isinstance(layer, sparse.Linear):
            counts.append(6.0 * len(given[0]) * layer.weight.numel())
        elif isinstance(layer, sparse.Conv3d):
            level = given[-1].cache  # of an inverse convolution the tensor on the finer sites
            spec = layer.spec
            pairs = len(given[0]) if spec.volume == 1 else level.kernel_map(spec).num_pairs
            passes = 4.0 if layer.in_channels == FEATURES else 6.0
            counts.append(passes * pairs * layer.in_channels * layer.out_channels)

    hooks = [each.register_forward_hook(count) for each in network.modules()]
    with torch.no_grad():
        network(scene)
    for hook in hooks:
        hook.remove()
    return sum(counts)


def step_of(network: nn.Module, scene: sparse.SparseTensor) -> Callable[[], None]:
    """A training step without the optimizer's, on coordinates from which nothing is derived yet."""
    label_N = torch.randint(CLASSES, (len(scene),), generator=torch.Generator().manual_seed(0))

    def run() -> None:
        out = network(fresh(scene))
        logits_NK = out.feats if isinstance(out, sparse.SparseTensor) else out
        F.cross_entropy(logits_NK, label_N).backward()  # type: ignore[no-untyped-call]
        network.zero_grad()

    return run


def time_interleaved(
    steps: dict[str, Callable[[], object]], repeats: int
) -> dict[str, list[float]]:
    """Seconds of each step over interleaved repetitions, after a warm-up."""
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for repeat in range(repeats + 1):
        for name, step in steps.items():
            begin = time.perf_counter()
            step()
            if repeat:
                seconds[name].append(time.perf_counter() - begin)
    return seconds


def parsed() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--network", choices=sorted(BLOCKS), default="minkunet18")
    parser.add_argument("--size", type=float, default=2.5, help="length of the room, in metres")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--no-spconv", action="store_true")
    parser.add_argument("--glibc", action="store_true", help="give freed memory back as glibc does")
    parser.add_argument("--profile", action="store_true", help="print where one step's time goes")
    return parser.parse_args()


def main() -> None:
    """Parse the command line, measure and print the table."""
    args = parsed()
    if not args.glibc:
        keep_freed_memory()  # as trainings of SparsePipe do
    scene = make_scene(args.size, args.seed)
    torch.manual_seed(args.seed)
    network = getattr(models, args.network)(CLASSES, in_channels=FEATURES)
    flops = flops_of(network, fresh(scene))
    print(f"python {platform.python_version()}, torch {torch.__version__}, {cpu_name()}")
    print(f"{args.network}: {len(scene)} voxels of 2 cm, {flops / 1e9:.0f} GFLOP a step")
    if args.profile:
        torch.set_num_threads(args.threads[0])
        step = step_of(network, scene)
        step()
        with torch.profiler.profile() as found:
            step()
        print(found.key_averages().table(sort_by="self_cpu_time_total", row_limit=25))
        return
    large, large_flops = large_mm(torch.float32)
    steps: dict[str, Callable[[], object]] = {}

    def on_threads(threads: int, step: Callable[[], object]) -> None:
        torch.set_num_threads(threads)
        step()

    for threads in args.threads:
        steps[f"floor, {threads} threads"] = functools.partial(on_threads, threads, large)
        own = functools.partial(on_threads, threads, step_of(network, scene))
        steps[f"ours, {threads} threads"] = own
    if importlib.util.find_spec("spconv") and not args.no_spconv:
        peer = SpconvUNet(
            FEATURES,
            CLASSES,
            channels=CHANNELS,
            blocks=BLOCKS[args.network],
            wide_down=False,
            eps=1e-5,
        )
        network.load_state_dict(converted(peer.state_dict(), network))
        with torch.no_grad():
            own, theirs = network(fresh(scene)).feats, peer(scene)
        print(f"largest difference of logits: {float((own - theirs).abs().max()):.1e}")
        steps["spconv, 1 threads"] = on_one_thread(step_of(peer, scene))
    seconds = time_interleaved(steps, args.repeats)
    for name in (name for name in seconds if name.startswith("floor")):
        seconds[name] = [value * flops / large_flops for value in seconds[name]]
    print(f"{'':22}{'seconds':>9}{'range':>18}{'x floor':>9}")
    for name, values in seconds.items():
        median, threads = statistics.median(values), name.partition(", ")[2]
        floor = statistics.median(seconds[f"floor, {threads}"])
        spread = f"{min(values):.3f} to {max(values):.3f}"
        print(f"{name:22}{median:9.3f}{spread:>18}{median / floor:9.2f}")
    if "spconv, 1 threads" in seconds:
        ours, theirs = (statistics.median(seconds[f"{k}, 1 threads"]) for k in ("ours", "spconv"))
        print(f"ours is {theirs / ours:.2f} times as fast as spconv at one thread")


if __name__ == "__main__":
    main()
