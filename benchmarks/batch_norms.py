"""What it costs that batch norms see more than their microbatch (`parallel.strategy.batch_norm`).

A sparse VGG16 goes forward and backward through the microbatches of a minibatch, in one process and
without updates, in each mode in turn; the least processor time of each is printed, and its ratio to
that of plain batch norms (`microbatch`).

    python benchmarks/batch_norms.py
    python benchmarks/batch_norms.py --width 1.0 --microbatches 4
"""

from __future__ import annotations

import argparse
import time

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sparsepipe.models.vgg import sparse_vgg
from sparsepipe.runtime.batch_norm import MinibatchNorms, NormMode, norms_of
from sparsepipe.runtime.collectives.replicas import Replicas
from sparsepipe.sparse import SparseTensor

CLASSES = 40


def spheres(shapes: int, *, points: int, resolution: int) -> Tensor:
    """Sites [N, 4] of shapes' surfaces: as many as CAD models have, about."""
    coords = []
    for shape in range(shapes):
        on_sphere = F.normalize(torch.randn(points, 3), dim=1)
        voxels = ((on_sphere * 0.48 + 0.5) * resolution).long().clamp(0, resolution - 1)
        coords.append(F.pad(torch.unique(voxels, dim=0), (1, 0), value=shape))
    return torch.cat(coords).int()


def step_s(layers: nn.Sequential, parts: list[Tensor], mode: NormMode, resolution: int) -> float:
    """Processor time of a minibatch."""
    norms = MinibatchNorms(norms_of(layers), mode)
    grid = (resolution,) * 3
    began = time.process_time()
    with norms.gathering():
        for coords in parts:
            x = SparseTensor(torch.ones(len(coords), 1), coords, spatial_shape=grid)
            layers(x).square().mean().backward()
        norms.move(Replicas(None, {}))
    return time.process_time() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--width", type=float, default=0.5)
    parser.add_argument("--resolution", type=int, default=50)
    parser.add_argument("--points", type=int, default=3000)
    parser.add_argument("--shapes", type=int, default=4, help="of a microbatch")
    parser.add_argument("--microbatches", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=8)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    layers = sparse_vgg(16, CLASSES, width=options.width, dropout=0.0)
    parts = [
        spheres(options.shapes, points=options.points, resolution=options.resolution)
        for _ in range(options.microbatches)
    ]
    best = dict.fromkeys(NormMode, float("inf"))
    for repeat in range(options.repeats + 1):
        for mode in NormMode:
            taken_s = step_s(layers, parts, mode, options.resolution)
            if repeat:  # else still warming up
                best[mode] = min(best[mode], taken_s)
    print(f"{options.microbatches} microbatches of {len(parts[0])} voxels, one thread")
    for mode, taken_s in best.items():
        print(f"{mode.value:10} {taken_s:.3f} s  x {taken_s / best[NormMode.MICROBATCH]:.3f}")


if __name__ == "__main__":
    main()
