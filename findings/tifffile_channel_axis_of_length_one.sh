#!/usr/bin/env bash
# Package: tifffile 2026.3.3, imread
# Behaviour: of an array with axes of length 1, a plain TIFF file gives all axes back, also if it
#   names them; an OME or ImageJ file leaves these axes out, although its metadata have them.
# One would guess: what imwrite takes, imread returns, in any of its three kinds of files; at least
#   an axis that the writer names, such as C for channels, stays.
# Seen: [1, 6, 5, 8] named CZYX comes back as [1, 6, 5, 8] from a plain file, and as [6, 5, 8] from
#   the others. Whoever takes the first axis for channels then reads 6 slices as 6 channels.
#   TiffFile(path).series[0].get_axes(squeeze=False) still names all axes.
# PIP_ARGS may name an index.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check ${PIP_ARGS:-} \
    tifffile==2026.3.3 numpy==2.3.5
cat > "$folder/axes.py" <<'PYTHON'
import sys

import numpy as np
import tifffile

KINDS = {"plain": {}, "ome": {"ome": True}, "imagej": {"imagej": True}}
AXES, SHAPE = "CZYX", (1, 6, 5, 8)

seen = {}
for name, settings in KINDS.items():
    # ImageJ's own order of axes is ZCYX.
    axes, shape = ("ZCYX", (6, 1, 5, 8)) if name == "imagej" else (AXES, SHAPE)
    path = f"{sys.argv[1]}/{name}.tif"
    values = np.zeros(shape, np.uint8)
    tifffile.imwrite(path, values, photometric="minisblack", metadata={"axes": axes}, **settings)
    with tifffile.TiffFile(path) as file:
        full = file.series[0].get_axes(squeeze=False)
    seen[name] = tifffile.imread(path).shape
    print(f"{name}: {axes} of {shape} comes back as {seen[name]}; its metadata have {full}")
if seen != {"plain": SHAPE, "ome": SHAPE[1:], "imagej": SHAPE[1:]}:
    raise SystemExit("This differs from what was seen with tifffile 2026.3.3.")
PYTHON
"$folder/venv/bin/python" "$folder/axes.py" "$folder"
