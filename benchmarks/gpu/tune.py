"""Measures which block sizes are fastest on this GPU, and adds them to the table of the kernels.

    python benchmarks/gpu/tune.py                      # on the GPU at hand
    python benchmarks/gpu/tune.py --dry-run            # what would be timed; needs no GPU

A row of the table holds for an architecture, bits of a feature, kind of kernel, channels rounded up
to powers of 2, and bits of the number of rows; the nearest of these serve for others. Each is timed
on shells of voxels, about as many as the levels of sparse VGG16-BN have at 50^3, batch 64, with the
weights as the passes give them; the fastest of all candidates is kept. All are compiled side by
side first. Rows of other architectures stay.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from sparsepipe.sparse import KernelSpec, SparseTensor
from sparsepipe.sparse.backends.triton import configurations, convolution, weights
from sparsepipe.sparse.backends.triton.configurations import TABLE, Configuration, Kind
from sparsepipe.sparse.backends.triton.tiles import TILE_ROWS, output_tiles, pairs
from sparsepipe.sparse.kernel_map import KernelMap

LEVELS = [  # sites at batch 64, input and output channels
    (213_933, [(64, 64)]),
    (132_024, [(64, 128), (128, 128)]),
    (46_567, [(128, 256), (256, 256)]),
    (12_631, [(256, 512), (512, 512)]),
    (3_049, [(512, 512)]),
]
DTYPES = (torch.bfloat16, torch.float32)
WARM_UP, REPEATS = 3, 10
WINDOW = KernelSpec.of(3)


def candidates(bits: int) -> Iterator[Configuration]:
    """Yields block sizes worth a try; those that the card cannot run are left out later."""
    reduced = (32, 64) if bits == 16 else (16, 32)
    for sizes in itertools.product(TILE_ROWS, (64, 128, 256), reduced, (4, 8), (3, 5, 7)):
        yield Configuration(*sizes)


def shells(count: int) -> SparseTensor:
    """About ``count`` sites on the surfaces of 64 boxes."""
    side = max(3, round((count / 64 / 6) ** 0.5))
    axis = torch.arange(side)
    box = torch.cartesian_prod(axis, axis, axis)
    shell = box[((box == 0) | (box == side - 1)).any(1)]
    batch = torch.arange(64).repeat_interleave(len(shell))
    coords = torch.cat([batch[:, None], shell.repeat(64, 1)], 1).int().cuda()
    feats = torch.zeros(len(coords), 1, device="cuda")
    return SparseTensor(feats, coords, spatial_shape=(side,) * 3, batch_size=64)


def time_ms(run: Any) -> float:
    """Fewest milliseconds of a repetition."""
    for _ in range(WARM_UP):
        run()
    times = []
    for _ in range(REPEATS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        run()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return float(min(times))


def fastest(
    kind: Kind, feats: Tensor, grad: Tensor, kernel: Tensor, found: KernelMap
) -> tuple[float, Configuration]:
    """The fewest milliseconds, and the configuration that takes them."""
    module: Any = convolution if kind == "pass" else weights
    chosen = threading.local()
    module.configuration = lambda *_: chosen.each

    def run(each: Configuration) -> str:
        chosen.each = each
        try:
            if kind == "pass":
                convolution.add_products(feats, kernel, None, found, to="outputs")
            else:
                weights.weight_gradient(feats, grad, kernel, found)
        except Exception as error:  # too much shared memory, for instance
            return type(error).__name__
        return ""

    for rows in TILE_ROWS:
        output_tiles(found, rows)
    every = list(candidates(8 * feats.element_size()))
    try:
        with ThreadPoolExecutor(os.cpu_count()) as pool:  # first runs compile
            faults = list(pool.map(run, every))
        for each, fault in zip(every, faults, strict=True):
            if fault:
                print(f"  {each}: {fault}")
        able = [each for each, fault in zip(every, faults, strict=True) if not fault]
        return min((time_ms(lambda each=each: run(each)), each) for each in able)
    finally:
        module.configuration = configurations.configuration


def main() -> None:
    """Times all rows for this GPU and writes the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--dry-run", action="store_true", help="only list what would be timed")
    if parser.parse_args().dry_run:
        for count, layers in LEVELS:
            print(f"{count:,} sites: channels {layers}, in {', '.join(map(str, DTYPES))}")
        print(f"candidates for each: {len(list(candidates(16)))}")
        return
    major, minor = torch.cuda.get_device_capability()
    name = f"sm_{major}{minor}"
    torch.set_float32_matmul_precision("high")
    with TABLE.open(encoding="ascii", newline="") as file:
        head, *known = csv.reader(file)
    rows = {tuple(row[:6]): row for row in known if row[0] != name}
    for (count, layers), dtype in itertools.product(LEVELS, DTYPES):
        x = shells(count)
        found = x.cache.kernel_map(WINDOW)
        pairs(found)
        for channels, width in layers:
            feats = torch.randn(len(x), channels, device="cuda").to(dtype)
            grad = torch.randn(len(x), width, device="cuda").to(dtype)
            kernel = torch.randn(27, channels, width, device="cuda").to(dtype)
            # In the gradient of features, and in float32 in both passes, weights are transposed.
            tried: list[tuple[Kind, Tensor, Tensor]] = [("weights", feats, kernel)]
            if dtype == torch.float32 or channels == width:
                kernel = kernel.transpose(1, 2).contiguous().transpose(1, 2)
            tried.append(("pass", feats, kernel))
            if channels != width:
                tried.append(("pass", grad, kernel.transpose(1, 2)))
            for kind, given, by in tried:
                took, best = fastest(kind, given, grad, by, found)
                bits = 8 * feats.element_size()
                key = (name, bits, kind, *by.shape[1:], len(x).bit_length())
                values = (best.rows, best.columns, best.reduced, best.warps, best.stages)
                rows[tuple(map(str, key))] = [*map(str, (*key, *values))]
                print(f"{key}: {took:.3f} ms with {best}", flush=True)
    with TABLE.open("w", encoding="ascii", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows([head, *sorted(rows.values())])


if __name__ == "__main__":
    main()
