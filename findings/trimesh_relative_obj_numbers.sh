#!/usr/bin/env bash
# Package: trimesh 5.2.0, loading OBJ files
# Behaviour: a negative number in a face counts back from the last vertex of the whole file, for
#   every face.
# One would guess: it counts back from the last vertex above the face, as the format says; files
#   that are written shape by shape (v ... v, f -4 -3 -2 -1, v ... v, f -4 -3 -2 -1) rely on it.
# Seen: squares of 1 and of 4 units of area, one below the other, have 5 with absolute numbers and
#   8 with relative ones, since the larger square is read twice and the smaller one is lost. There
#   is no warning.
# PIP_ARGS may name an index.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check ${PIP_ARGS:-} trimesh==5.2.0
cat > "$folder/squares.py" <<'PYTHON'
import io

import trimesh

SMALL = "v 0 0 0\nv 1 0 0\nv 1 1 0\nv 0 1 0\n"
LARGE = "v 0 0 1\nv 2 0 1\nv 2 2 1\nv 0 2 1\n"
FACES = {
    "absolute": ("f 1 2 3 4\n", "f 5 6 7 8\n"),
    "relative": ("f -4 -3 -2 -1\n", "f -4 -3 -2 -1\n"),
}

areas = {}
for kind, (first, second) in FACES.items():
    content = io.BytesIO((SMALL + first + LARGE + second).encode())
    areas[kind] = float(trimesh.load_mesh(content, file_type="obj", process=False).area)
    print(f"faces with {kind} numbers: area {areas[kind]:g}")
if areas != {"absolute": 5.0, "relative": 8.0}:
    raise SystemExit("This differs from what was seen with trimesh 5.2.0.")
PYTHON
"$folder/venv/bin/python" "$folder/squares.py"
