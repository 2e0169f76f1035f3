"""Where ranks listen: on the loopback, or on the one interface between hosts."""

from __future__ import annotations

import os
import socket
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch.distributed as dist
from torch.distributed.elastic.rendezvous import RendezvousParameters

from sparsepipe.errors import ConfigError
from sparsepipe.runtime import rendezvous
from sparsepipe.runtime.collectives import meeting_point, process_group
from sparsepipe.runtime.collectives.meeting_point import choose_interfaces, keep_store, on_one_host
from tests.support.listening import address_for_others, listening
from tests.support.processes import run
from tests.support.waiting import LONG_S, held_port

SOON = timedelta(seconds=10)
INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


def test_a_store_listens_on_its_address_alone() -> None:
    store = keep_store("localhost", 0, timeout=SOON)
    peer = dist.TCPStore("127.0.0.1", store.port, is_master=False, timeout=SOON)
    peer.set("word", "heard")
    assert store.get("word") == b"heard"
    with socket.socket() as stranger, pytest.raises(OSError, match="refused"):
        stranger.connect((address_for_others(), store.port))


@pytest.mark.parametrize(
    ("address", "across", "message"),
    [
        ("192.0.2.1", False, "ranks cannot meet at 192.0.2.1, port 0"),
        ("localhost", True, "localhost resolves to 127.0.0.1 on this host, which other hosts"),
        ("no-such-host.invalid", False, "cannot be resolved on this host"),
    ],
)
def test_an_address_that_cannot_be_used(address: str, across: bool, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as error:
        keep_store(address, 0, timeout=SOON, across_hosts=across)
    assert error.value.remedy


def test_the_interface_between_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    def chosen(master: str, *, one_host: bool, **given: str) -> list[str]:
        for name in INTERFACES:
            monkeypatch.setenv(name, given.get(name, ""))
        choose_interfaces(master, one_host=one_host)
        return [os.environ[name] for name in INTERFACES]

    outer = address_for_others()
    assert chosen(outer, one_host=True) == ["lo", "=lo"]
    gloo, nccl = chosen(outer, one_host=False)
    assert nccl == f"={gloo}"
    assert gloo in dict(map(reversed, socket.if_nameindex()))  # type: ignore[arg-type]
    assert gloo != "lo"
    assert chosen("127.0.0.1", one_host=False) == ["lo", "=lo"]
    assert chosen(outer, one_host=True, GLOO_SOCKET_IFNAME="ib0") == ["ib0", "=lo"]
    both = dict.fromkeys(INTERFACES, "ib0")
    assert chosen("nowhere.invalid", one_host=False, **both) == ["ib0", "ib0"]


@pytest.mark.parametrize("other", ["198.51.100.7", "2001:db8::7"])
def test_an_interface_has_several_addresses(monkeypatch: pytest.MonkeyPatch, other: str) -> None:
    own = {"lo": ["127.0.0.1", "::1"], "ib0": ["203.0.113.9", "2001:db8::1", other]}
    found = {name: [SimpleNamespace(address=a) for a in all_of] for name, all_of in own.items()}
    monkeypatch.setattr(meeting_point.psutil, "net_if_addrs", lambda: found)
    monkeypatch.setattr(socket.socket, "connect", lambda *_: None)
    monkeypatch.setattr(socket.socket, "getsockname", lambda _: (other, 9))
    for name in INTERFACES:
        monkeypatch.setenv(name, "")
    choose_interfaces(other, one_host=False)
    assert [os.environ[name] for name in INTERFACES] == ["ib0", "=ib0"]


def test_a_name_that_leads_to_the_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    """As Debian's /etc/hosts has it: gloo would listen where no other host comes."""
    answer = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.1.1", 0))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: answer)
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    with pytest.raises(ConfigError, match=r"server1.* resolves to 127\.0\.1\.1 on this host"):
        choose_interfaces("server1", one_host=False)


def test_whether_all_ranks_are_on_one_host() -> None:
    world = {"WORLD_SIZE": "4", "MASTER_ADDR": "127.0.0.1"}
    assert on_one_host(world)  # as Lightning's launcher has it
    assert on_one_host({**world, "LOCAL_WORLD_SIZE": "4", "MASTER_ADDR": "192.0.2.1"})
    assert not on_one_host({**world, "LOCAL_WORLD_SIZE": "2"})
    assert not on_one_host({**world, "MASTER_ADDR": "192.0.2.1"})


def parameters(endpoint: str, *, nodes: int = 2, least: int | None = None, **more: object):
    return RendezvousParameters("sparsepipe", endpoint, "a", least or nodes, nodes, **more)


@pytest.mark.parametrize(
    "given",
    [
        parameters("192.0.2.1:5"),
        parameters("192.0.2.1:5", rank=0, least=1),
        parameters("server1:x", rank=0),
    ],
)
def test_a_rendezvous_that_lacks_something(given: RendezvousParameters) -> None:
    with pytest.raises(ConfigError, match="--rdzv-backend=sparsepipe needs") as error:
        rendezvous.FixedRendezvous(given)
    assert "--rdzv-endpoint=ADDRESS:PORT" in error.value.remedy


def test_agents_meet_again_after_a_restart() -> None:
    with held_port() as port:
        place = f"{address_for_others()}:{port}"
    first, second = (rendezvous.FixedRendezvous(parameters(place, rank=rank)) for rank in range(2))
    for _ in range(2):
        mine, theirs = first.next_rendezvous(), second.next_rendezvous()
        assert (mine.rank, theirs.rank, mine.world_size, theirs.world_size) == (0, 1, 2, 2)
        assert not theirs.store.check(["word"]), "of the attempt before"
        mine.store.set("word", "heard")
        assert theirs.store.get("word") == b"heard"
        info = theirs.bootstrap_store_info
        assert info is not None
        assert f"{info.master_addr}:{info.master_port}" == place


def listens(rank: int, port: int | None) -> set[str]:
    """What this rank listens on in a group; with a port, rank 0 keeps the store."""
    del rank
    for name in INTERFACES:
        os.environ.pop(name, None)
    if port is not None:
        del os.environ["TORCHELASTIC_USE_AGENT_STORE"]
        os.environ["MASTER_PORT"] = str(port)
    process_group.join("gloo", timeout_s=LONG_S)
    found = listening([os.getpid()])
    process_group.gather_objects(0)
    process_group.leave()
    process_group.leave()
    return found


@pytest.mark.parametrize("keeps", [False, True])
def test_ranks_of_one_host_listen_on_the_loopback(keeps: bool) -> None:
    with held_port() as port:
        found = run(listens, 2, port if keeps else None, join_group=False)
    assert found == [{"127.0.0.1"}] * 2
