"""Of all that ranks say of a failure, its cause is what the launcher tells."""

from __future__ import annotations

import pytest

from sparsepipe.errors import SparsePipeError, TransportError

BUSY = """
from sparsepipe.runtime.failures.rank_reports import Stopped, write_failure_report
def leave(error, code):
    write_failure_report(error, exit_code=code, trace=f"Traceback: {error}")
    os._exit(code)
if rank:
    while not Path("busy").exists():
        time.sleep(0.02)
    leave(ValueError("the real cause"), 1)
"""


def test_cause_is_not_hidden_by_a_peer_that_was_stopped_for_it(ranks) -> None:
    """The agent's SIGTERM reaches a rank in a long step before any collective fails."""
    with pytest.raises(SparsePipeError, match="rank 1 raised ValueError: the real cause"):
        ranks(
            BUSY
            + """
signal.signal(signal.SIGTERM, lambda signum, frame: leave(Stopped(signum), 143))
Path("busy").touch()
time.sleep(60)
"""
        )


@pytest.mark.full  # the agent waits half a minute before it kills
def test_cause_is_not_hidden_by_a_peer_that_had_to_be_killed(ranks) -> None:
    with pytest.raises(SparsePipeError, match="rank 1 raised ValueError: the real cause"):
        ranks(
            BUSY
            + """
signal.signal(signal.SIGTERM, signal.SIG_IGN)
Path("busy").touch()
time.sleep(60)
""",
            grace_s=3,
        )


def test_a_rank_that_names_a_peer_gives_way_to_that_peers_own_word(ranks) -> None:
    with pytest.raises(SparsePipeError, match="rank 1 raised ValueError: the real cause"):
        ranks(
            BUSY
            + """
from sparsepipe.errors import TransportError
signal.signal(signal.SIGTERM, signal.SIG_IGN)
Path("busy").touch()
while not Path("reports/rank1.json").exists():
    time.sleep(0.02)
leave(TransportError("rank 1 is gone", remedy="look"), 7)
"""
        )


@pytest.mark.parametrize("stopped", [False, True])
def test_a_killed_rank_is_named_and_what_the_one_that_missed_it_reports(
    ranks, stopped: bool
) -> None:
    """It knows stage and minibatch, which the agent does not, also where that stops it too."""
    text = (
        r"rank 1 was killed by SIGKILL; rank 0 reported: rank 1 \(stage 1\) is gone .* minibatch 3"
    )
    with pytest.raises(TransportError, match=text):
        ranks(
            f"""
            from sparsepipe.errors import TransportError
            from sparsepipe.runtime.failures.rank_reports import Stopped
            from sparsepipe.runtime.failures.rank_reports import exit_immediately
            if rank:
                while not Path("deaf").exists():
                    time.sleep(0.02)
                Path("dies").touch()
                os.kill(os.getpid(), signal.SIGKILL)
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            Path("deaf").touch()
            while not Path("dies").exists():
                time.sleep(0.02)
            error = TransportError("rank 1 (stage 1) is gone ... minibatch 3", remedy="look")
            stop = Stopped(signal.SIGTERM)
            stop.__cause__ = error
            exit_immediately(stop if {stopped} else error)
            """
        )


@pytest.mark.parametrize(
    "raised",
    ["KeyError('skip_connection')", "RuntimeError('the connection to my database timed out')"],
)
def test_an_error_that_speaks_of_connections_is_a_cause(ranks, raised: str) -> None:
    """Its peer, which waited in vain, has been the first to complain."""
    script = f"""
        from sparsepipe.errors import TransportError
        from sparsepipe.runtime.failures.rank_reports import exit_immediately
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if rank:
            Path("ready").touch()
            while not Path("reports/rank0.json").exists():
                time.sleep(0.02)
            exit_immediately({raised})
        while not Path("ready").exists():
            time.sleep(0.02)
        exit_immediately(TransportError("rank 1 is gone", remedy="look"))
        """
    with pytest.raises(SparsePipeError, match=r"rank 1 raised .*connection"):
        ranks(script)
