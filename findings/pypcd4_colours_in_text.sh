#!/usr/bin/env bash
# Package: pypcd4 1.5.1
# Behaviour: PointCloud.save with Encoding.ASCII writes the packed colour as a rounded number.
# One would guess: a cloud that is written as text and read again has its colours, as it has in the
#   binary encoding, since PCD keeps the bytes of a colour in a float and PCL writes all its digits.
# Seen: such floats are tiny numbers, of which the text has ten decimals: all colours are black.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check ${PIP_ARGS:-} pypcd4==1.5.1
cat > "$folder/colours.py" <<'PYTHON'
import sys

import numpy as np
import pypcd4

rng = np.random.default_rng(0)
colours = rng.integers(0, 256, (100, 3), np.uint8)
columns = [*rng.random((3, 100)).astype(np.float32), pypcd4.PointCloud.encode_rgb(colours)]
cloud = pypcd4.PointCloud.from_points(columns, ("x", "y", "z", "rgb"), (np.float32,) * 4)
kept = {}
for encoding in (pypcd4.Encoding.BINARY, pypcd4.Encoding.ASCII):
    path = f"{sys.argv[1]}/cloud.pcd"
    cloud.save(path, encoding=encoding)
    found = pypcd4.PointCloud.decode_rgb(pypcd4.PointCloud.from_path(path).pc_data["rgb"])
    kept[encoding.name] = float((found == colours).all(axis=1).mean())
    print(f"{encoding.name}: {100 * kept[encoding.name]:.0f} % of the colours kept, "
          f"largest channel {found.max()}")
if kept != {"BINARY": 1.0, "ASCII": 0.0}:
    raise SystemExit("This differs from what was seen with pypcd4 1.5.1.")
PYTHON
"$folder/venv/bin/python" "$folder/colours.py" "$folder"
