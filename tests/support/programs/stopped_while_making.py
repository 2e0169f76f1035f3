"""Two signals come to it while it makes a cluster; prints the one that ended it."""

import os
import signal
import threading

from sparsepipe.emulate import emulated_hosts, machine
from sparsepipe.runs.signals import SignalWatch
from sparsepipe.runtime.failures.rank_reports import Stopped
from tests.support.namespace_cases import cluster

plain = machine.do


def send() -> None:
    for signum in (signal.SIGTERM, signal.SIGHUP):
        os.kill(os.getpid(), signum)


def do(command: machine.Command) -> None:
    plain(command)
    if command[:3] == ("ip", "link", "add"):  # of each host, amid its commands
        sender = threading.Thread(target=send)
        sender.start()
        sender.join()


# Takes signals that the first thread holds back, as those of numpy do.
threading.Thread(target=threading.Event().wait, daemon=True).start()
machine.do = do
try:
    with SignalWatch(), emulated_hosts(cluster()):
        print("made", flush=True)
except Stopped as stop:
    print(signal.Signals(stop.signum).name, flush=True)
