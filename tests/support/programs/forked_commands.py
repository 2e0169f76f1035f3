"""Runs commands of sparsepipe, each in a fork of one process that has imported all.

Reads a JSON line ``{"cwd": ..., "arguments": [...]}`` from standard input, and writes one with
``code`` (negative: the signal), ``seconds``, ``peak_bytes`` and ``output`` of the command.
"""

import json
import os
import resource
import signal
import sys
import tempfile
import time
import traceback
from pathlib import Path

import pandas  # noqa: F401
import torch  # noqa: F401

import sparsepipe.cli
import sparsepipe.launch.job
import sparsepipe.paper.report_task
import sparsepipe.tasks.compare
import sparsepipe.tasks.predict
import sparsepipe.tasks.simulate
import sparsepipe.tasks.train

LONGEST_S = 25
MOST_BYTES = 3 << 30  # of address space beyond what a fork begins with: no test fills the machine


def command(cwd: str, arguments: list[str], output: int) -> int:
    os.setsid()
    os.chdir(cwd)
    os.dup2(output, 1)
    os.dup2(output, 2)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + MOST_BYTES
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


for line in sys.stdin:
    with tempfile.TemporaryFile() as output:
        began_s = time.monotonic()
        child = os.fork()
        if not child:
            code = command(**json.loads(line), output=output.fileno())
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
        done = 0
        while not done and time.monotonic() - began_s < LONGEST_S:
            time.sleep(0.01)
            done, status, usage = os.wait4(child, os.WNOHANG)
        if not done:
            os.killpg(child, signal.SIGKILL)
            _, status, usage = os.wait4(child, 0)
        output.seek(0)
        found = {
            "code": os.waitstatus_to_exitcode(status),
            "seconds": time.monotonic() - began_s,
            "peak_bytes": usage.ru_maxrss * 1024,
            "output": output.read().decode(errors="replace"),
        }
    print(json.dumps(found), flush=True)
