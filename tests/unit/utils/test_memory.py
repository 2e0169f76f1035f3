"""Freed memory stays with a process or goes back, in processes of their own."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping

import pytest

from sparsepipe.utils.memory import user_decides
from tests.support.freed_blocks import needs_glibc
from tests.support.paths import environment

KEEP = "keep_freed_memory()\n"
GIVE_BACK = "give_freed_memory_back()\n"
MEASURED = "print(kept_mib())\n"
PREAMBLE = """
from tests.support.freed_blocks import kept_mib, resident_mib
from sparsepipe.utils.memory import give_freed_memory_back, keep_freed_memory
"""


def printed(program: str, **variables: str) -> int:
    """What a program prints that runs where nobody has told glibc anything else."""
    inherited = {k: v for k, v in environment().items() if "MALLOC" not in k}
    inherited.pop("GLIBC_TUNABLES", None)
    done = subprocess.run(
        [sys.executable, "-c", PREAMBLE + program],
        env=inherited | variables,
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    return int(done.stdout)


@needs_glibc
@pytest.mark.parametrize(
    ("program", "kept"),
    [("", False), (KEEP, True), (GIVE_BACK, False), (KEEP + GIVE_BACK, False)],
    ids=["glibc's own way", "kept", "given back", "given back after all"],
)
def test_freed_memory_stays_or_goes(program: str, kept: bool) -> None:
    found = printed(program + MEASURED)
    assert found > 190 if kept else found < 10


@needs_glibc
def test_what_was_kept_goes_back_when_it_is_to() -> None:
    more = f"before = resident_mib()\nkept_mib()\n{GIVE_BACK}print(resident_mib() - before)\n"
    assert printed(KEEP + more) < 10


@needs_glibc
def test_who_sets_glibcs_variables_decides() -> None:
    assert printed(KEEP + MEASURED, MALLOC_MMAP_THRESHOLD_="131072") < 10


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
