#!/usr/bin/env bash
# Package: laspy 2.7.0
# Behaviour: laspy.convert to a point format from 6 on does not carry over the scan angle.
# One would guess: formats 0 to 5 have it as scan_angle_rank in whole degrees, 6 to 10 as scan_angle
#   in steps of 0.006 degrees, so that a conversion scales it; or that what is lost is said.
# Seen: scan_angle is 0 at all points, without a warning, while intensity and times are kept.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check ${PIP_ARGS:-} laspy==2.7.0 numpy==2.4.6
cat > "$folder/angles.py" <<'PYTHON'
import laspy
import numpy as np

las = laspy.create(point_format=1, file_version="1.2")
las.x, las.y, las.z = np.random.default_rng(0).uniform(0, 50, (3, 100))
las.intensity = np.arange(100)
las.scan_angle_rank = np.arange(100) - 50
found = laspy.convert(las, point_format_id=6)
print(f"intensities kept: {bool((found.intensity == las.intensity).all())}")
print(f"degrees before: {las.scan_angle_rank.min()} to {las.scan_angle_rank.max()}")
print(f"degrees after: {found.scan_angle.min() * 0.006} to {found.scan_angle.max() * 0.006}")
if not (found.intensity == las.intensity).all() or found.scan_angle.any():
    raise SystemExit("This differs from what was seen with laspy 2.7.0.")
PYTHON
"$folder/venv/bin/python" "$folder/angles.py"
