"""Runs commands of sparsepipe, each in a fork of one process that has imported all.

Reads a JSON line ``{"cwd": ..., "arguments": [...]}`` from standard input, and writes one with
``code`` (negative: the signal), ``seconds``, ``peak_bytes`` and ``output`` when the command has
ended.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

import pandas  # noqa: F401
import torch  # noqa: F401

import sparsepipe.cli
import sparsepipe.launch.job
import sparsepipe.paper.report_task
import sparsepipe.tasks.compare
import sparsepipe.tasks.partition
import sparsepipe.tasks.predict
import sparsepipe.tasks.simulate
import sparsepipe.tasks.train

_LONGEST_S = 25
_MOST_BYTES = 3 << 30
"""Of address space beyond what the process has begun with: no test may fill the machine."""


def _address_space_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


def _command(arguments: list[str], output: int) -> int:
    os.dup2(output, 1)
    os.dup2(output, 2)
    limit = _address_space_bytes() + _MOST_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    sys.argv = ["sparsepipe", *arguments]
    try:
        sparsepipe.cli.main()
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def run(cwd: str, arguments: list[str]) -> dict[str, Any]:
    """How one command ends."""
    with tempfile.TemporaryFile() as output:
        began_s = time.monotonic()
        child = os.fork()
        if not child:
            os.setsid()
            os.chdir(cwd)
            code = _command(arguments, output.fileno())
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
        while time.monotonic() - began_s < _LONGEST_S:
            done, status, usage = os.wait4(child, os.WNOHANG)
            if done:
                break
            time.sleep(0.01)
        else:
            os.killpg(child, signal.SIGKILL)
            _, status, usage = os.wait4(child, 0)
        output.seek(0)
        return {
            "code": os.waitstatus_to_exitcode(status),
            "seconds": time.monotonic() - began_s,
            "peak_bytes": usage.ru_maxrss * 1024,
            "output": output.read().decode(errors="replace"),
        }


def main() -> None:
    for line in sys.stdin:
        sys.stdout.write(json.dumps(run(**json.loads(line))) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
