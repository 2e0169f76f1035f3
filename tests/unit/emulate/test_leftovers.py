"""Whose namespaces there are, told by names."""

from __future__ import annotations

import pytest

from sparsepipe.emulate.layout import BLOCKS, Owner
from sparsepipe.emulate.leftovers import free_block, leftovers, owner_of, owners
from sparsepipe.errors import HardwareError

LIVING = ["sparsepipe-70-1000-0-0", "sparsepipe-70-1000-0-1", "sparsepipe-70-1000-0-switch"]
DEAD = ["sparsepipe-71-900-1-0", "sparsepipe-71-900-1-switch"]
REUSED = ["sparsepipe-70-400-2-0"]  # the number was a killed process's before
OTHERS = ["blue", "sparsepipe", "sparsepipe-x-1-0-0", "sparsepipe-70-1000-0-0-more", "cni-123"]
ALL = [*LIVING, *DEAD, *REUSED, *OTHERS]


def test_owners_are_read_from_names() -> None:
    assert owner_of(LIVING[0]) == Owner(pid=70, started=1000)
    assert [owner_of(name) for name in OTHERS] == [None] * 5
    assert owners(ALL) == {
        Owner(pid=70, started=1000),
        Owner(pid=71, started=900),
        Owner(pid=70, started=400),
    }


def test_only_what_killed_processes_made_is_left_over() -> None:
    interfaces = ["lo", "eth0", "spe70c0", "spe70c1", "spe71c0", "spe9c12", "spec", "spe70c0.1"]
    found = leftovers(ALL, interfaces, living={Owner(pid=70, started=1000)})
    assert set(found.namespaces) == {*DEAD, *REUSED}
    assert set(found.cables) == {"spe71c0", "spe9c12"}


def test_without_a_living_process_everything_of_ours_is() -> None:
    found = leftovers(ALL, ["spe70c0", "eth0"], living=set())
    assert set(found.namespaces) == {*LIVING, *DEAD, *REUSED}
    assert found.cables == ("spe70c0",)


def test_nothing_is_left_over_of_nothing() -> None:
    found = leftovers(OTHERS, ["lo", "eth0"], living=set())
    assert (found.namespaces, found.cables) == ((), ())


def test_blocks_are_given_once() -> None:
    assert free_block([]) == 0
    assert free_block(ALL) == 3
    assert free_block([*DEAD, *OTHERS]) == 0
    with pytest.raises(HardwareError, match=f"{BLOCKS} emulated clusters"):
        free_block([f"sparsepipe-1-1-{block}-switch" for block in range(BLOCKS)])
