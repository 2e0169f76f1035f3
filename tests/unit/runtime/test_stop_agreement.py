"""All ranks stop after the same step, and none asks for ever."""

from __future__ import annotations

import os
import signal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed import HashStore

from sparsepipe.errors import TransportError
from sparsepipe.runtime.collectives import process_group
from sparsepipe.runtime.collectives.stop_agreement import StopAgreement, StoreClient
from tests.support.processes import outcomes, run
from tests.support.waiting import LONG_S, held_port, post_mark, shorten_limit, wait_for_marks


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_all_ranks_stop_after_the_same_step(data: st.DataObject) -> None:
    """Ranks go on in any order, never more than ``spread`` steps apart; some wish to stop."""
    ranks = data.draw(st.integers(2, 4), label="ranks")
    spread = data.draw(st.integers(1, 4), label="spread")
    wishes = data.draw(
        st.dictionaries(st.integers(0, ranks - 1), st.integers(1, 8), min_size=1), label="wishes"
    )
    store = HashStore()
    clients = [StoreClient(store, limit_s=20) for _ in range(ranks)]
    pairs = [[StopAgreement(spread=spread, client=client) for _ in range(2)] for client in clients]
    done, stopped = [0] * ranks, [False] * ranks
    while not all(stopped):
        behind = min(done[rank] for rank in range(ranks))
        able = [r for r in range(ranks) if not stopped[r] and done[r] - behind < spread]
        assert able, f"stopped after different steps: {done}"
        rank = data.draw(st.sampled_from(able))
        done[rank] += 1
        asked = done[rank] >= wishes.get(rank, 10**9)
        first, second = pairs[rank]
        assert not first.reached(done[rank], requested=False)  # nobody wishes for that
        stopped[rank] = second.reached(done[rank], requested=asked)
    assert len(set(done)) == 1
    assert min(wishes.values()) <= done[0] <= max(wishes.values()) + 3 * spread + 2


class Counting:
    """A store that counts questions."""

    def __init__(self) -> None:
        self.store, self.asked = HashStore(), 0

    def __getattr__(self, name: str):
        self.asked += 1
        return getattr(self.store, name)


def test_agreements_of_a_process_ask_once_a_step() -> None:
    store = Counting()
    client = StoreClient(store, limit_s=20)
    agreements = [StopAgreement(spread=4, client=client) for _ in range(3)]
    for step in range(10):
        assert not any(agreement.reached(step, requested=False) for agreement in agreements)
    assert store.asked == 10


def asking_rank(rank: int, signum: int, limit_s: float) -> None:
    """Rank 0 keeps the store, as under Lightning's own launcher."""
    process_group.join("gloo", timeout_s=LONG_S)
    process_group.gather_objects(rank)
    shorten_limit(limit_s)
    agreement = StopAgreement(spread=2)
    assert not agreement.reached(0, requested=False)
    if rank == 0:
        wait_for_marks("rank 1 has asked")
        os.kill(os.getpid(), signum)
    post_mark("rank 1 has asked")
    for step in range(1, 1_000_000):
        agreement.reached(step, requested=False)


@pytest.mark.parametrize(
    ("signum", "limit_s", "how"),
    [
        (signal.SIGSTOP, 4.0, "did not answer within 4 s"),
        (signal.SIGKILL, LONG_S, "is gone"),
    ],
)
def test_a_store_whose_rank_stands_still_or_is_gone(signum: int, limit_s: float, how: str) -> None:
    with held_port() as port:
        environment = {"TORCHELASTIC_USE_AGENT_STORE": "False", "MASTER_PORT": str(port)}
        found = outcomes(
            asking_rank,
            2,
            signum,
            limit_s,
            awaited=[1],
            join_group=False,
            environment=environment,
        )[1]
    assert isinstance(found.error, TransportError), str(found)
    assert found.error.message == f"rank 0 {how} when rank 1 checked whether to stop"
    assert found.ended_s < 45


def stopping_rank(rank: int) -> tuple[int, bool]:
    """One rank wishes; what is agreed on for another kind of stop is not touched."""
    agreements = [StopAgreement(spread=1) for _ in range(2)]
    for step in range(100):
        process_group.gather_objects(False)  # holds the ranks together
        if agreements[1].reached(step, requested=rank == 1 and step == 3):
            return step, agreements[0].reached(step, requested=False)
    return -1, False


def test_ranks_of_a_group_agree() -> None:
    assert run(stopping_rank, 2) == [(7, False), (7, False)]
