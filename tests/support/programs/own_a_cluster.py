"""Makes a cluster with a process on its first host, prints the process's number, and waits."""

import subprocess
import sys
import time
from pathlib import Path

from sparsepipe.emulate import emulated_hosts
from sparsepipe.runs.signals import SignalWatch
from tests.support.namespace_cases import cluster

with SignalWatch(), emulated_hosts(cluster()) as layout:
    resident = subprocess.Popen(
        ["ip", "netns", "exec", layout.stations[0].namespace, sys.executable,
         str(Path(__file__).with_name("sleep.py"))],
        stdout=subprocess.PIPE,
    )  # fmt: skip
    assert resident.stdout is not None
    resident.stdout.readline()
    print(resident.pid, flush=True)
    time.sleep(600)
