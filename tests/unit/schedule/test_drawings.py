"""docs/schedules.md shows the schedules as they are."""

import re
import runpy
from pathlib import Path

import pytest

from sparsepipe.errors import ScheduleError
from sparsepipe.schedule import asynchronous, check
from tests.support.plans import configs, plan_of

DOCS = Path(__file__).parents[3] / "docs"
SCRIPT = runpy.run_path(str(DOCS / "draw_schedules.py"))
PAGE = (DOCS / "schedules.md").read_text()


@pytest.mark.parametrize("name", SCRIPT["DRAWINGS"])
def test_the_page_holds_the_drawing_in_characters(name):
    shown = re.search(rf"```text {name}\n(.*?)```", PAGE, re.DOTALL)
    assert shown is not None
    assert shown[1] == SCRIPT["text"](name)


def test_the_code_of_the_page_runs(capsys):
    block = re.search(r"```python\n(.*?)```", PAGE, re.DOTALL)[1]
    exec(compile(block, "schedules.md", "exec"), {})
    assert capsys.readouterr().out.splitlines() == re.findall(r"\)  # (.+)", block)


def test_the_page_counts_the_plans_that_lock_up():
    plans, locked = 0, 0
    for config in configs(8):
        plans += 1
        try:
            check(asynchronous(plan_of(config), 40), gradient_first=False)
        except ScheduleError:
            locked += 1
    said = f"the {plans} plans of up to 8 ranks, that order deadlocks {locked}"
    assert said in " ".join(PAGE.split())
