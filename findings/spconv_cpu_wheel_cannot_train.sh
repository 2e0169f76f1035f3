#!/usr/bin/env bash
# Package: spconv 2.3.8 (the CPU wheel), with a CPU build of torch 2.13.0
# Behaviour: the forward pass of a convolution runs on a CPU, with gradients asked for; the backward
#   pass raises AssertionError, "Torch not compiled with CUDA enabled".
# One would guess: a wheel for CPUs trains on CPUs, or refuses in the forward pass.
# Seen: the backward pass asks for the current CUDA stream, though all tensors are on the CPU.
# PIP_ARGS may name an index, such as that of the smaller CPU build of torch.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check ${PIP_ARGS:-} \
    torch==2.13.0 spconv==2.3.8 setuptools numpy
cat > "$folder/train.py" <<'PYTHON'
import spconv.pytorch as spconv
import torch

torch.set_num_threads(1)
coords = torch.tensor([[0, 1, 1, 1], [0, 1, 1, 2]], dtype=torch.int32)
layer = spconv.SubMConv3d(2, 2, 3, algo=spconv.ConvAlgo.Native)
out = layer(spconv.SparseConvTensor(torch.ones(2, 2), coords, [4, 4, 4], 1)).features
print(f"forward: {tuple(out.shape)} on {out.device}, requires_grad={out.requires_grad}")
try:
    out.sum().backward()
    seen = "a gradient"
except Exception as error:
    seen = f"{type(error).__name__}: {str(error).splitlines()[0]}"
print(f"backward: {seen}")
if seen == "a gradient":
    raise SystemExit("This differs from what was seen with spconv 2.3.8.")
PYTHON
"$folder/venv/bin/python" "$folder/train.py" 2> "$folder/warnings" || {
    cat "$folder/warnings" >&2
    exit 1
}
