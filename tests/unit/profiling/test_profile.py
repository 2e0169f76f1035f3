"""Profile files, and profiles of several devices beside each other."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from sparsepipe.errors import ProfileError
from sparsepipe.profiling import Profile, check_agreement
from tests.support.instances import profile_of

PROFILES = Path(__file__).parents[3] / "sparsepipe" / "assets" / "profiles" / "paper"


def profile(num_layers: int = 3, **meta: object) -> Profile:
    each = {"kind": "Conv3d", "forward_s": 0.1, "backward_s": 0.25, "parameter_bytes": 8.0}
    costs = [
        {**each, "activation_bytes": 100.0 + i, "saved_bytes": None if i else 12.0}
        for i in range(num_layers)
    ]
    return profile_of(costs, **{"model": "net", **meta})


def changed(found: Profile, place: int, **changes: object) -> Profile:
    layers = list(found.layers)
    layers[place] = replace(layers[place], **changes)  # type: ignore[arg-type]
    return replace(found, layers=tuple(layers))


def test_written_and_read_back(tmp_path: Path) -> None:
    path = profile(device="cpu", input_bytes=64).save(tmp_path / "cpu.json")
    found = Profile.load(path)
    assert found == profile(device="cpu", input_bytes=64)
    assert (found.input_bytes, found.num_layers) == (64.0, 3)
    assert found.compute_s == pytest.approx(3 * 0.35)
    assert "saved_bytes" not in json.loads(path.read_text())["layers"][1]


@pytest.mark.parametrize(
    "text",
    [
        "{",
        '{"meta": {}, "layers": [{"index": 0, "seconds": 1}]}',
        '{"meta": {}, "layers": [{"index": 0, "name": "a", "kind": "b", "forward_s": true}]}',
    ],
)
def test_files_that_are_no_profiles_are_refused(text: str) -> None:
    with pytest.raises(ProfileError, match="profile") as caught:
        Profile.from_json(text)
    assert caught.value.remedy


@pytest.mark.parametrize("changes", [{"forward_s": -1.0}, {"forward_s": None}, {"index": 7}])
def test_impossible_values_are_refused(changes: dict[str, float]) -> None:
    with pytest.raises(ProfileError, match=str(next(iter(changes.values())))):
        changed(profile(), 1, **changes)


def test_an_input_that_has_no_size_is_refused() -> None:
    with pytest.raises(ProfileError, match="input_bytes=") as caught:
        profile(input_bytes=-1)
    assert "leave it out" in caught.value.remedy


def test_a_missing_file_is_named_with_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(ProfileError, match=r"gpu\.json") as caught:
        Profile.load(tmp_path / "gpu.json")
    assert "task=profile" in caught.value.remedy


def test_the_authors_profiles_agree() -> None:
    check_agreement({path.stem: Profile.load(path) for path in PROFILES.glob("*.json")})


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (profile(4), "4 layers"),
        (profile(model="another"), "model=another"),
        (changed(profile(), 1, kind="Linear"), r"layer 1 \(Conv3d\) on a is Linear on b"),
        (changed(profile(), 2, parameter_bytes=9.0), "parameter_bytes=9 on b and 8 on a"),
        (changed(profile(), 0, activation_bytes=130.0), "activation_bytes=130 on b"),
    ],
)
def test_profiles_of_different_models_are_refused(other: Profile, message: str) -> None:
    with pytest.raises(ProfileError, match=message):
        check_agreement({"a": profile(), "b": other})


def test_sizes_may_differ_a_little() -> None:
    check_agreement({"a": profile(), "b": changed(profile(), 0, activation_bytes=110.0)})
