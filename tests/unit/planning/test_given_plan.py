"""Plan files that tell of layers to recompute, as a run with ``recompute=auto`` leaves them."""

from __future__ import annotations

from pathlib import Path

import pytest

from sparsepipe.errors import ConfigError
from sparsepipe.partition.activation_checkpointing.setting import with_spans
from sparsepipe.planning.device_profiles import load_profiles
from sparsepipe.planning.division import division_of
from sparsepipe.planning.plan_resolution import plan_to_simulate
from sparsepipe.planning.recomputation import recompute_of, refuse_recompute
from sparsepipe.schedule import Plan
from tests.support.command_line import composed
from tests.support.planned_cases import MODEL
from tests.support.recompute_cases import AUTO, SEARCHED, given, inventory, settled
from tests.support.resolved import run_directory


def auto_plan(tmp_path: Path) -> Path:
    """The plan file of a run that had layers chosen, for two stages of two layers."""
    settled(tmp_path, 1.4e6, *SEARCHED, AUTO, given(tmp_path))
    return tmp_path / "run" / "plan.json"


@pytest.mark.parametrize("setting", [None, "{layers: [3, [0, 0]]}", "auto", "{}"])
def test_a_plan_file_has_its_layers_recomputed(tmp_path: Path, setting: str | None) -> None:
    asked = [] if setting is None else [f"parallel.strategy.recompute={setting}"]
    file = f"parallel.plan.file={auto_plan(tmp_path)}"
    config = composed(*MODEL, "parallel=gpipe", file, *asked, given(tmp_path))
    division = division_of(config)
    refuse_recompute(config, inventory(1.4e6), division)
    layers = {"layers": [[0, 0], [3, 3]]}
    own = {"{}": {}, "{layers: [3, [0, 0]]}": config.parallel.recompute}.get(str(setting), layers)
    assert recompute_of(config.parallel, division) == own, "the setting's own layers come first"
    named = config.parallel.search.profiles
    profiles = load_profiles(inventory(1.4e6), "mlp", given=named)
    plan = plan_to_simulate(config, division, inventory(1.4e6), profiles)
    if setting == "{}":
        assert not {"recomputed", "bottleneck_s"} & plan.details.keys()
    else:
        assert plan.details["recomputed"] == [[0, 0], [3, 3]]
        assert plan.details["bottleneck_s"] == pytest.approx(10.0), "as its search expected"


def test_what_a_plan_file_recomputes_is_part_of_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = auto_plan(tmp_path)
    plain = tmp_path / "plain.json"
    plan = Plan.from_json(path.read_text())
    plain.write_text(with_spans(plan, ((), ())).to_json())

    def identity(file: Path) -> str:
        named = f"parallel.plan.file={file}"
        config = composed(*MODEL, "data.batch_size=8", "parallel=gpipe", named)
        return run_directory(config, inventory(1e9)).run_id

    assert identity(path) != identity(plain)


def test_expected_times_with_other_recomputed_layers_are_left_out(tmp_path: Path) -> None:
    plan = Plan.from_json(auto_plan(tmp_path).read_text())
    assert with_spans(plan, ((range(1),), (range(3, 4),))).details == plan.details
    other = with_spans(plan, ((), (range(2, 4),))).details
    assert other["recomputed"] == [[2, 3]]
    assert not {"bottleneck_s", "bottleneck", "stage_times_s", "memory_bytes"} & other.keys()
    assert other["strategy"] == "hete_mp"


@pytest.mark.parametrize(
    ("parallel", "message", "remedy"),
    [
        (("parallel=gpipe", "parallel.strategy.recompute=all"), "(0-1, 2-3) than", "auto"),
        (
            ("parallel=gpipe", "parallel.strategy.recompute={layers: [0]}"),
            "the plan file recomputes (0, 3)",
            "leave out parallel.strategy.recompute",
        ),
        (("parallel=pipeline",), "only synchronous pipelines", "parallel=gpipe"),
    ],
)
def test_a_plan_file_is_not_contradicted(
    tmp_path: Path, parallel: tuple[str, ...], message: str, remedy: str
) -> None:
    config = composed(*MODEL, *parallel, f"parallel.plan.file={auto_plan(tmp_path)}")
    with pytest.raises(ConfigError) as refused:
        refuse_recompute(config, inventory(1e9), division_of(config))
    assert message in refused.value.message
    assert remedy in refused.value.remedy
