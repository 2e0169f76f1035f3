"""Which signals a run takes over."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

from sparsepipe.runs.signals import SignalWatch
from sparsepipe.runtime.failures.rank_reports import Stopped


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    signums = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {signum: signal.getsignal(signum) for signum in signums}
    yield
    for signum, handler in before.items():
        signal.signal(signum, handler)


@pytest.mark.parametrize("ignored", [signal.SIGHUP, signal.SIGINT, signal.SIGTERM])
def test_what_was_ignored_at_the_start_stays_ignored(ignored: signal.Signals) -> None:
    signal.signal(ignored, signal.SIG_IGN)
    with SignalWatch() as watch:
        os.kill(os.getpid(), ignored)
        signal.signal(ignored, lambda signum, frame: pytest.fail("somebody else's"))
        watch.install()
        os.kill(os.getpid(), ignored)
        assert watch.signum is None
        heeded = signal.SIGTERM if ignored is signal.SIGHUP else signal.SIGHUP
        with pytest.raises(Stopped):
            os.kill(os.getpid(), heeded)
    assert signal.getsignal(ignored) is signal.SIG_IGN
