"""What this process may use of its machine."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser

from sparsepipe.machine import cpu_name, plain_name


def test_only_the_cores_of_this_process_count() -> None:
    if not hasattr(os, "sched_setaffinity"):
        pytest.skip("this system does not bind processes to cores")
    bound = "import os; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})"
    count = "from sparsepipe.machine import usable_cores; print(usable_cores())"
    command = [sys.executable, "-c", f"{bound}; {count}"]
    assert subprocess.run(command, check=True, capture_output=True, text=True).stdout == "1\n"


@pytest.mark.parametrize(
    ("model", "plain"),
    [
        ("Intel(R) Xeon(R) Processor", "Intel Xeon Processor"),
        ("Intel(R) Core(TM) i7-8700 CPU @ 3.20GHz", "Intel Core i7-8700 CPU @ 3.20GHz"),
        (" AMD EPYC 7B13 64-Core Processor ", "AMD EPYC 7B13 64-Core Processor"),
        ("Neoverse-N1, rev 1", "Neoverse-N1 rev 1"),
        ("ARMv8 Processor rev 1 [v8l]", "ARMv8 Processor rev 1 v8l"),
    ],
)
def test_a_processor_has_a_name_that_an_override_takes(model: str, plain: str) -> None:
    assert plain_name(model) == plain
    override = OverridesParser.create().parse_override(f"task.profiles={{{plain}: profile.json}}")
    assert override.value() == {plain: "profile.json"}


def test_the_processor_here_has_such_a_name() -> None:
    assert cpu_name() == plain_name(cpu_name()) != ""
