#!/usr/bin/env bash
# Package: spconv 2.3.8 (the CPU wheel), with torch 2.13.0
# Behaviour: SparseConvTensor takes coordinates as they lie in memory and ignores their strides.
# One would guess: coordinates from mask.nonzero().int() mean what their rows say, or are refused,
#   as features of a wrong shape are.
# Seen: torch.nonzero returns a tensor whose columns are contiguous, and .int() keeps that, so that
#   spconv reads other voxels from it: a layer's numbers are wrong in silence. With .contiguous()
#   the same coordinates give those of a dense convolution.
# PIP_ARGS may name an index, such as that of the smaller CPU build of torch.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check ${PIP_ARGS:-} \
    torch==2.13.0 spconv==2.3.8 setuptools numpy
cat > "$folder/rows.py" <<'PYTHON'
import spconv.pytorch as spconv
import torch
from torch.nn import functional as F

torch.set_num_threads(1)
torch.manual_seed(0)
mask = torch.rand(1, 8, 8, 8) < 0.1
coords = mask.nonzero().int()
feats = torch.randn(len(coords), 2)
layer = spconv.SubMConv3d(2, 2, 3, bias=False, algo=spconv.ConvAlgo.Native)
_, x, y, z = coords.long().unbind(1)
dense = torch.zeros(1, 2, 8, 8, 8)
dense[0][:, x, y, z] = feats.t()
expected = F.conv3d(dense, layer.weight.permute(0, 4, 1, 2, 3), padding=1)[0][:, x, y, z].t()


@torch.no_grad()
def error(given: torch.Tensor) -> float:
    tensor = spconv.SparseConvTensor(feats.clone(), given, [8, 8, 8], 1)
    return float((layer(tensor).features - expected).abs().max())


as_found, contiguous = error(coords), error(coords.contiguous())
print(f"strides of mask.nonzero().int(): {coords.stride()}")
print(f"largest difference from a dense convolution: {as_found:.3f} as they are, "
      f"{contiguous:.1e} contiguous")
if as_found < 0.01 or contiguous > 1e-4:
    raise SystemExit("This differs from what was seen with spconv 2.3.8.")
PYTHON
"$folder/venv/bin/python" "$folder/rows.py" 2> "$folder/warnings" || {
    cat "$folder/warnings" >&2
    exit 1
}
