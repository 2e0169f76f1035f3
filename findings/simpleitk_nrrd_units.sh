#!/usr/bin/env bash
# Package: SimpleITK 2.5.7, ReadImage and WriteImage of NRRD files
# Behaviour: an NRRD file names the units of its axes, as "um" for micrometres. SimpleITK reads the
#   numbers as they are, and keeps the units nowhere, not even among the image's metadata. Written
#   again, the file has no units, which readers take for millimetres.
# One would guess: spacing and origin come in millimetres, as the NIfTI reader converts them; or a
#   metadata key tells the units, since one tells the file's space.
# Seen: voxels of 500 um, half a millimetre, have the spacing 500 in NRRD and 0.5 in NIfTI. So a
#   volume of a microscope is a thousand times too large beside one that was saved as NIfTI.
# PIP_ARGS may name an index.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check ${PIP_ARGS:-} \
    simpleitk==2.5.7 pynrrd==1.1.3 nibabel==5.4.2 numpy==2.3.5
cat > "$folder/units.py" <<'PYTHON'
import sys

import nibabel
import nrrd
import numpy as np
import SimpleITK as sitk

values, folder = np.zeros((4, 5, 6), np.float32), sys.argv[1]
affine = np.diag([500.0, 500.0, 2000.0, 1.0])
header = {
    "space": "left-posterior-superior",
    "space directions": affine[:3, :3],
    "space origin": [0.0, 0.0, 0.0],
    "space units": ["um", "um", "um"],
}
nrrd.write(f"{folder}/scan.nrrd", values, header)
image = nibabel.Nifti1Image(values, affine)
image.header.set_xyzt_units("micron")
nibabel.save(image, f"{folder}/scan.nii")

seen = {}
for kind in ("nii", "nrrd"):
    read = sitk.ReadImage(f"{folder}/scan.{kind}")
    seen[kind] = tuple(round(side, 6) for side in read.GetSpacing())
    print(f"{kind}: spacing {seen[kind]} of voxels of 500 x 500 x 2000 um")
units = [key for key in read.GetMetaDataKeys() if "unit" in key.lower()]
sitk.WriteImage(read, f"{folder}/again.nrrd")
again = nrrd.read_header(f"{folder}/again.nrrd")
print("metadata keys of the NRRD file about units:", units or "none")
print("units after writing it again:", again.get("space units", "none"))
if seen != {"nii": (0.5, 0.5, 2.0), "nrrd": (500.0, 500.0, 2000.0)} or units or "space units" in again:
    raise SystemExit("This differs from what was seen with SimpleITK 2.5.7.")
PYTHON
"$folder/venv/bin/python" "$folder/units.py" "$folder"
