"""Overlapping windows beside MONAI's sliding_window_inference, with the same network and windows.

Both compute the same volume in turns, on one thread, of which the CPU time counts. The largest
difference of logits is printed, and for each network the median time and the median ratio of ours
to MONAI's of each turn. The network of one convolution shows what the windows themselves take.

    python benchmarks/windows.py
    python benchmarks/windows.py --size 192 --window 96 --repeats 5
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from monai.inferers.utils import sliding_window_inference
from torch import Tensor, nn

from sparsepipe import models
from sparsepipe.models.windows import Windows
from sparsepipe.utils.process import keep_freed_memory

CLASSES = 5
BOUND = 1e-6
"""Largest difference of logits, relative to the largest logit: the goal."""


@torch.inference_mode()
def compare(name: str, network: nn.Module, x: Tensor, options: argparse.Namespace) -> None:
    window, overlap = [options.window] * 3, options.overlap
    more = {"overlap": overlap, "mode": "gaussian"}
    ways: dict[str, Callable[[], Tensor]] = {
        "ours": lambda: Windows(window, overlap)(network, x),
        "MONAI": lambda: sliding_window_inference(x, window, options.batch, network, **more),
    }
    mine, theirs = (way() for way in ways.values())  # which warms up
    error = float((mine - theirs).abs().max() / theirs.abs().max())
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    for repeat in range(options.repeats):
        for way in sorted(ways, reverse=bool(repeat % 2)):
            begun = time.process_time()
            ways[way]()
            seconds[way].append(time.process_time() - begun)
    ratios = [a / b for a, b in zip(seconds["ours"], seconds["MONAI"], strict=True)]
    print(name, *(f"{way} {statistics.median(each):.3f} s" for way, each in seconds.items()))
    ratio, spread = statistics.median(ratios), f"{min(ratios):.3f}..{max(ratios):.3f}"
    verdicts = ["met" if is_met else "MISSED" for is_met in (ratio <= 1, error <= BOUND)]
    print(f"  ratio {ratio:.3f} [{spread}] (goal at most 1), {verdicts[0]}")
    print(f"  largest relative difference {error:.1e} (goal at most {BOUND:.0e}), {verdicts[1]}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", type=int, default=96, help="voxels along each axis of the volume")
    parser.add_argument("--window", type=int, default=32, help="voxels along each axis of a window")
    parser.add_argument("--overlap", type=float, default=0.5)
    parser.add_argument("--batch", type=int, default=1, help="windows that MONAI computes at once")
    parser.add_argument("--repeats", type=int, default=9)
    options = parser.parse_args()
    torch.set_num_threads(1)
    keep_freed_memory()
    torch.manual_seed(0)
    x = torch.randn(1, 1, *[options.size] * 3)
    compare("one convolution", nn.Conv3d(1, CLASSES, 1), x, options)
    compare("unet3d", models.unet3d(CLASSES, width=0.125, levels=2).eval(), x, options)


if __name__ == "__main__":
    main()
