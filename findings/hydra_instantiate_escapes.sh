#!/usr/bin/env bash
# Package: hydra-core 1.3.8 with omegaconf 2.3.1, hydra.utils.instantiate
# Behaviour: instantiate resolves every text twice. An escaped interpolation, which OmegaConf
#   itself reads as text, becomes an interpolation and is resolved after all.
# One would guess: a text in which "${" is escaped arrives at the callable as OmegaConf's own
#   access and to_container give it.
# Seen: for the text \${user}, to_container(resolve=True) returns ${user}, and instantiate passes
#   the value of user. For a key that does not exist it raises an error. Only a third backslash
#   keeps the text. Whoever passes texts that may contain "${", such as names of folders, must
#   build objects another way.
# PIP_ARGS may name an index.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check ${PIP_ARGS:-} \
    hydra-core==1.3.8 omegaconf==2.3.1
cat > "$folder/escape.py" <<'PYTHON'
from hydra.utils import instantiate
from omegaconf import OmegaConf

seen = []
for backslashes in (1, 3):
    text = "\\" * backslashes + "${user}"
    node = OmegaConf.create({"_target_": "builtins.dict", "user": "somebody", "text": text})
    read = OmegaConf.to_container(node, resolve=True)["text"]
    passed = instantiate(node)["text"]
    print(f"{text}: to_container returns {read}, instantiate passes {passed}")
    seen.append((read, passed))
if seen != [("${user}", "somebody"), ("\\${user}", "${user}")]:
    raise SystemExit("This differs from what was seen with hydra-core 1.3.8.")
PYTHON
"$folder/venv/bin/python" "$folder/escape.py"
