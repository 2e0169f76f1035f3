"""Measures which block sizes are fastest on this GPU, and adds them to the table of the kernels.

    python benchmarks/gpu/tune.py                      # on the GPU at hand
    python benchmarks/gpu/tune.py --dry-run            # what would be timed; needs no GPU

A row of the table holds for an architecture, bits of a feature, kind of kernel, channels rounded up
to powers of 2, and bits of the number of rows. Each is timed on shells of voxels, about as many as
the levels of sparse VGG16-BN have at 50^3; the fastest of all candidates is kept. Rows of other
architectures stay.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from sparsepipe.sparse import KernelSpec, SparseTensor
from sparsepipe.sparse.backends.triton import configurations, convolution, weights
from sparsepipe.sparse.backends.triton.configurations import TABLE, Configuration, Kind
from sparsepipe.sparse.backends.triton.tiles import output_tiles, pairs
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
KINDS: tuple[Kind, ...] = ("pass", "weights")
WINDOW = KernelSpec.of(3)


def candidates(kind: Kind, bits: int) -> Iterator[Configuration]:
    """Yields block sizes worth a try; those that the card cannot run are left out later."""
    reduced = (32, 64, 128) if bits == 16 else (16, 32, 64)
    rows = (64,) if kind == "pass" else (64, 128)
    for sizes in itertools.product(rows, (64, 128, 256), reduced, (4, 8), (3, 4, 5, 6)):
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
    """The configuration with the shortest time, and its milliseconds."""
    best = math.inf, Configuration(64, 64, 32, 4, 3)
    for each in candidates(kind, 8 * feats.element_size()):
        module: Any = convolution if kind == "pass" else weights
        module.configuration = lambda *_, each=each: each
        try:
            if kind == "pass":
                took = time_ms(
                    lambda: convolution.add_products(feats, kernel, None, output_tiles(found))
                )
            else:
                took = time_ms(lambda: weights.weight_gradient(feats, grad, kernel, found))
        except Exception as error:  # too much shared memory, for instance
            print(f"  {each}: {type(error).__name__}")
            continue
        if took < best[0]:
            best = took, each
        module.configuration = configurations.configuration
    return best


def main() -> None:
    """Times all rows for this GPU and writes the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--dry-run", action="store_true", help="only list what would be timed")
    if parser.parse_args().dry_run:
        for count, layers in LEVELS:
            print(f"{count:,} sites: channels {layers}, in {', '.join(map(str, DTYPES))}")
        numbers = [len(list(candidates(kind, 16))) for kind in KINDS]
        print(f"candidates of a pass: {numbers[0]}, of a weight gradient: {numbers[1]}")
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
            for kind in KINDS:
                took, best = fastest(kind, feats, grad, kernel, found)
                bits = 8 * feats.element_size()
                key = (name, bits, kind, channels, width, len(x).bit_length())
                values = (best.rows, best.columns, best.reduced, best.warps, best.stages)
                rows[tuple(map(str, key))] = [*map(str, (*key, *values))]
                print(f"{key}: {took:.3f} ms with {best}", flush=True)
    with TABLE.open("w", encoding="ascii", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows([head, *sorted(rows.values())])


if __name__ == "__main__":
    main()
