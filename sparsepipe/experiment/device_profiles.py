"""The profiles of an inventory's devices: which files they are, and if they are of the model."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sparsepipe.cluster import Inventory
from sparsepipe.errors import ProfileError
from sparsepipe.experiment.compose import config_dir
from sparsepipe.experiment.outputs import expanded
from sparsepipe.profiling import Profile, chain_profile, read_graph


def load_profiles(
    inventory: Inventory, model: str, *, given: Mapping[str, str]
) -> dict[str, Profile]:
    """The profile of each device of an inventory, as far as there is one.

    Args:
        inventory: names a file for each device and model.
        model: its name.
        given: files by the names of devices, which count first.

    Raises:
        ProfileError: a file is missing, broken, of another model or of no device that there is,
            or one device has two.
    """
    devices = [device for host in inventory.hosts for device in host.devices]
    there = list(dict.fromkeys(device.name for device in devices))
    if unknown := [name for name in given if name not in there]:
        raise ProfileError(
            f"profiles are given of {', '.join(unknown)}, which the inventory does not have",
            remedy=f"name devices of the hardware inventory: {', '.join(there)}",
        )
    files: dict[str, str] = {**given}
    for device in devices:
        if device.name in given or model not in device.profile:
            continue
        path = device.profile[model]
        if files.setdefault(device.name, path) != path:
            raise ProfileError(
                f"the inventory names two profiles of {model} on {device.name}: "
                f"{files[device.name]} and {path}",
                remedy="name the same file on all hosts, or call the devices by different names",
            )
    return {name: _of_model(load_profile(path), model, path) for name, path in files.items()}


def _of_model(profile: Profile, model: str, path: str) -> Profile:
    measured = profile.meta.get("model")  # a graph.txt does not tell
    if measured not in (None, model):
        raise ProfileError(
            f"{path} is a profile of another model: of {measured}, not of {model}",
            remedy=f"measure {model} with task=profile, or ask for model={measured}",
        )
    return profile


def fingerprint_of(inventory: Inventory, model: str, *, given: Mapping[str, str]) -> str:
    """Of an inventory and its profiles of a model; see :func:`load_profiles`."""
    profiles = load_profiles(inventory, model, given=given)
    return _digest(inventory.to_yaml() + _text_of(profiles))


def fingerprint_of_profiles(profiles: Mapping[str, Profile]) -> str:
    """Of what profiles hold, wherever they lie."""
    return _digest(_text_of(profiles))


def _text_of(profiles: Mapping[str, Profile]) -> str:
    return "".join(f"{name}\n{profiles[name].to_json()}" for name in sorted(profiles))


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def load_profile(name: str) -> Profile:
    """A profile file, or a ``graph.txt`` of PipeDream's profiler.

    Args:
        name: a path; a relative one that leads nowhere is looked for among those we ship.

    Raises:
        ProfileError: it is missing, or neither.
    """
    path = expanded(name)
    shipped = config_dir() / name
    found: Path = shipped if not path.exists() and shipped.exists() else path
    if found.suffix == ".txt":
        return chain_profile(read_graph(found), meta={"source": str(found)})
    return Profile.load(found)


def origin_of(profile: Profile) -> dict[str, Any]:
    """What a plan file tells of a profile that it was computed from."""
    return {"fingerprint": _digest(profile.to_json()), "source": profile.meta.get("source")}
