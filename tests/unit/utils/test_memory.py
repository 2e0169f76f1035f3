"""Freed memory stays with a process or goes back, in processes of their own."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping

import pytest

from sparsepipe.utils.process import user_decides
from tests.support.freed_blocks import needs_glibc
from tests.support.paths import environment

STEPS = """
from tests.support.freed_blocks import kept_mib, resident_mib
from sparsepipe.utils.process import give_freed_memory_back, keep_freed_memory
at_first_mib = kept_mib()
give_freed_memory_back()
given_back_mib = kept_mib()
before_mib = resident_mib()
keep_freed_memory()
kept_mib_then = kept_mib()
give_freed_memory_back()
print(at_first_mib, given_back_mib, kept_mib_then, resident_mib() - before_mib, kept_mib())
"""


def printed(**variables: str) -> list[int]:
    """The numbers of :data:`STEPS`, where the environment has no other settings of glibc."""
    inherited = {k: v for k, v in environment().items() if "MALLOC" not in k}
    inherited.pop("GLIBC_TUNABLES", None)
    done = subprocess.run(
        [sys.executable, "-c", STEPS],
        env=inherited | variables,
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    return [int(number) for number in done.stdout.split()]


@needs_glibc
def test_freed_memory_stays_or_goes() -> None:
    at_first, given_back, kept, left, given_back_after_all = printed()
    assert at_first < 10
    assert given_back < 10
    assert kept > 190
    assert left < 10, "what was kept is returned as well"
    assert given_back_after_all < 10


@needs_glibc
def test_glibcs_variables_of_the_user_count() -> None:
    assert printed(MALLOC_MMAP_THRESHOLD_="131072")[2] < 10


@pytest.mark.parametrize(
    ("environment", "decides"),
    [
        ({}, False),
        ({"MALLOC_TRIM_THRESHOLD_": "0"}, True),
        ({"MALLOC_ARENA_MAX": "2"}, False),  # which says nothing of freed memory
        ({"MALLOC_PERTURB_": "2"}, False),
        ({"GLIBC_TUNABLES": "glibc.malloc.mmap_max=9"}, True),
        ({"GLIBC_TUNABLES": "glibc.malloc.arena_max=9"}, False),
    ],
)
def test_variables_that_decide(environment: Mapping[str, str], decides: bool) -> None:
    assert user_decides(environment) is decides
