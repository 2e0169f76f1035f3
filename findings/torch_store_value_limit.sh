#!/usr/bin/env bash
# Package: torch 2.13.0, torch.distributed.TCPStore
# Behaviour: the default backend (libuv) takes values of up to 8 MiB. A client that sets one
#   byte more loses its connection; its error speaks of the network and names no limit.
# One would guess: a store takes values of any size, since its documentation gives no limit and
#   since the older backend (use_libuv=False) takes them, or its error names the limit.
# Seen: both backends store 8,388,608 bytes. The older backend also stores 8,388,609 bytes, where
#   the client of the default one raises DistNetworkError; only a warning of the server names the
#   limit. Whoever passes results between ranks by a store must send them in parts.
# PIP_ARGS may name an index, such as that of the smaller CPU build.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check ${PIP_ARGS:-} torch==2.13.0
cat > "$folder/store.py" <<'PYTHON'
from datetime import timedelta

from torch.distributed import DistNetworkError, TCPStore

LIMIT = 8 * 2**20


def answer(size: int, *, libuv: bool) -> str:
    wait = timedelta(seconds=30)
    server = TCPStore("127.0.0.1", 0, 1, True, wait, wait_for_workers=False, use_libuv=libuv)
    client = TCPStore(
        "127.0.0.1", server.port, 1, False, wait, wait_for_workers=False, use_libuv=libuv
    )
    try:
        client.set("key", b"x" * size)
        return f"{len(client.get('key')):,} bytes stored"
    except DistNetworkError as error:
        return f"DistNetworkError: {str(error).splitlines()[0]}"


cases = [(libuv, size) for libuv in (True, False) for size in (LIMIT, LIMIT + 1)]
seen = {(libuv, size): answer(size, libuv=libuv) for libuv, size in cases}
for (libuv, size), what in seen.items():
    print(f"use_libuv={libuv}, value of {size:,} bytes: {what}")
refused = [key for key, what in seen.items() if what.startswith("DistNetworkError")]
if refused != [(True, LIMIT + 1)]:
    raise SystemExit("This differs from what was seen with torch 2.13.0.")
PYTHON
"$folder/venv/bin/python" "$folder/store.py" 2> "$folder/warnings" || {
    cat "$folder/warnings" >&2
    exit 1
}
echo "The server warns:"
grep --only-matching 'Invalid payload size.*' "$folder/warnings" | sort --unique
