#!/usr/bin/env bash
# Package: spconv 2.3.8 (the CPU wheel), with torch 2.13.0
# Behaviour: on more than one thread of torch, submanifold convolutions of a few hundred voxels
#   return other numbers than on one thread, in silence, in float64 as in float32.
# One would guess: the number of threads changes the last digits at most.
# Seen: on one thread the layer agrees with torch's dense convolution to 1e-15. On two, all of 20
#   forward passes over the same numbers are off, by up to 0.5. Whoever checks results against
#   spconv on a CPU must call torch.set_num_threads(1).
# PIP_ARGS may name an index, such as that of the smaller CPU build of torch. Needs two cores.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check ${PIP_ARGS:-} \
    torch==2.13.0 spconv==2.3.8 setuptools numpy
cat > "$folder/sums.py" <<'PYTHON'
import spconv.pytorch as spconv
import torch
from torch.nn import functional as F

SIDE, CHANNELS = 12, 4
torch.manual_seed(0)
coords = (torch.rand(1, SIDE, SIDE, SIDE) < 0.5).nonzero().int().contiguous()
feats = torch.randn(len(coords), CHANNELS, dtype=torch.float64)
layer = spconv.SubMConv3d(CHANNELS, CHANNELS, 3, bias=False, algo=spconv.ConvAlgo.Native).double()
_, x, y, z = coords.long().unbind(1)
dense = torch.zeros(1, CHANNELS, SIDE, SIDE, SIDE, dtype=torch.float64)
dense[0][:, x, y, z] = feats.t()
weight = layer.weight.detach().permute(0, 4, 1, 2, 3)
expected = F.conv3d(dense, weight, padding=1)[0][:, x, y, z].t()


@torch.no_grad()
def errors(threads: int) -> list[float]:
    torch.set_num_threads(threads)
    found = []
    for _ in range(20):
        given = spconv.SparseConvTensor(feats.clone(), coords, [SIDE] * 3, 1)
        found.append(float((layer(given).features - expected).abs().max()))
    return found


one, two = errors(1), errors(2)
print(f"{len(coords)} voxels, largest difference from a dense convolution in 20 passes:")
print(f"  one thread: {max(one):.1e}; two threads: {max(two):.1e}")
print(f"  wrong passes: {sum(e > 1e-9 for e in one)} on one, {sum(e > 1e-9 for e in two)} on two")
if max(one) > 1e-9 or max(two) < 1e-9:
    raise SystemExit("This differs from what was seen with spconv 2.3.8.")
PYTHON
"$folder/venv/bin/python" "$folder/sums.py" 2> "$folder/warnings" || {
    cat "$folder/warnings" >&2
    exit 1
}
