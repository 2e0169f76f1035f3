"""The profiles of an inventory's devices: finding, loading and checking their files."""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sparsepipe.cluster import Device, Inventory
from sparsepipe.config.compose import assets_dir
from sparsepipe.config.run_spec import RunSpec
from sparsepipe.data.dataloaders import default_workers
from sparsepipe.errors import ProfileError
from sparsepipe.profiling import Profile, graph_profile, read_graph
from sparsepipe.utils.files import expanded
from sparsepipe.utils.host import usable_cores

log = logging.getLogger(__name__)

_DTYPES = {"None": "float32", "32": "float32", "32-true": "float32", "64-true": "float64"}
_WORKLOAD = ("batch_size", "resolution", "point_ratio")


def load_profiles(
    inventory: Inventory,
    model: str,
    *,
    given: Mapping[str, str],
    settings: Mapping[str, Any] | None = None,
) -> dict[str, Profile]:
    """The profile of each device of an inventory, as far as there is one.

    Args:
        inventory: names a file for each device and model.
        model: its name.
        given: files by the names of devices, which count first.
        settings: of the model; None: not compared.

    Raises:
        ProfileError: a file is missing, broken, of another model or of one with other settings,
            or of no device that there is, or one device has two.
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
    return {
        name: _of_model(load_profile(path), model, settings or {}, path)
        for name, path in files.items()
    }


def _of_model(profile: Profile, model: str, settings: Mapping[str, Any], path: str) -> Profile:
    model_measured = profile.meta.get("model")  # a graph.txt has none
    if model_measured not in (None, model):
        raise ProfileError(
            f"{path} is a profile of another model: of {model_measured}, not of {model}",
            remedy=f"measure {model} with task=profile, or ask for model={model_measured}",
        )
    measured = profile.meta.get("model_settings") or {}
    if others := [
        name for name in settings if measured.get(name, settings[name]) != settings[name]
    ]:
        configured = ", ".join(f"{name}={settings[name]}" for name in others)
        raise ProfileError(
            f"{path} is a profile of {model} with "
            f"{', '.join(f'{name}={measured[name]}' for name in others)}, not with {configured}",
            remedy="measure the model as it is with task=profile, or set "
            + ", ".join(f"model.{name}={measured[name]}" for name in others),
        )
    return profile


def as_loaded(
    profiles: Mapping[str, Profile], spec: RunSpec, inventory: Inventory
) -> dict[str, Profile]:
    """Profiles of a training, with the time of reading a batch where its ranks read themselves.

    Loader workers read meanwhile, and what is emulated reads nothing.
    """
    workers = spec.data.get("num_workers")
    if workers is None:
        hosts = sum(any(device.count for device in host.devices) for host in inventory.hosts)
        workers = default_workers(-(-inventory.num_devices // max(1, hosts)))
    if workers or spec.emulation is not None:
        return {name: profile.without_loading() for name, profile in profiles.items()}
    return dict(profiles)


def workload(spec: RunSpec) -> dict[str, Any]:
    """Settings of the data on which the time of a step depends."""
    return {name: spec.data.get(name) for name in _WORKLOAD}


def other_workloads(profiles: Mapping[str, Profile], spec: RunSpec) -> list[str]:
    """Messages about profiles measured on other batches than those of a configuration."""
    found = []
    for device, profile in profiles.items():
        for name, configured in workload(spec).items():
            measured = profile.meta.get(name)
            if None not in (configured, measured) and measured != configured:
                found.append(f"{device} was measured with data.{name}={measured}, not {configured}")
    return found


def check_workload(profiles: Mapping[str, Profile], spec: RunSpec) -> None:
    """Refuses to train by profiles of another workload.

    Raises:
        ProfileError: batches were of another size, or of other shapes.
    """
    if found := other_workloads(profiles, spec):
        raise ProfileError(
            "the profiles are of another workload: " + "; ".join(found),
            remedy="train with the data as they were measured, or measure the model with these "
            "(task=profile, or no profiles at all: they are made before a training)",
        )


def check_batch_sizes(profiles: Mapping[str, Profile]) -> None:
    """Refuses profiles of batches of unlike size; profiles without a size are accepted.

    Raises:
        ProfileError: batches were of unlike sizes.
    """
    batch_sizes = {name: profile.meta.get("batch_size") for name, profile in profiles.items()}
    sizes = {name: size for name, size in batch_sizes.items() if size is not None}
    if unlike := [name for name in sizes if sizes[name] != next(iter(sizes.values()))]:
        first, other = next(iter(sizes)), unlike[0]
        raise ProfileError(
            f"the profile of {first} is of batches of {sizes[first]} samples, that of {other} of "
            f"{sizes[other]}",
            remedy="profile the model on all devices with one data.batch_size (task=profile)",
        )


def check_devices(profiles: Mapping[str, Profile], spec: RunSpec, inventory: Inventory) -> None:
    """Refuses to train by profiles of devices that compute otherwise.

    Differences that may well matter little are logged. What a profile lacks is taken to be right.

    Raises:
        ProfileError: a device was made slower than it is to be, or less so, or another backend
            computed.
    """
    synchronous = spec.parallel.synchronous
    refused: list[str] = []
    warnings: list[str] = []
    for device in {d.name: d for host in inventory.hosts for d in host.devices}.values():
        if (profile := profiles.get(device.name)) is None:
            continue
        meta = profile.meta
        for name, configured, found in (
            ("slowdown", f"{device.slowdown:g}", refused),
            ("backend", backend_name(spec), refused),
            ("device", device.name, warnings),
            ("dtype", dtype_of(spec), warnings),
            ("optimizer", optimizer_words(spec), warnings),
            ("threads", _threads(device, inventory), warnings),
            ("microbatches", str(1 if synchronous is None else synchronous.microbatches), warnings),
        ):
            measured = meta.get(name)
            if name == "slowdown" and isinstance(measured, (int, float)):
                measured = f"{measured:g}"
            if None not in (configured, measured) and str(measured) != configured:
                found.append(
                    f"that of {device.name} was measured with {name} {measured}, not {configured}"
                )
    for text in warnings:
        log.warning("the profiles were measured under other conditions: %s", text)
    if refused:
        raise ProfileError(
            "the profiles are of other devices: " + "; ".join(refused),
            remedy="measure the model on the devices as they are (task=profile, or no profiles at "
            "all: they are made before a training), or set hardware and backend as they were",
        )


def backend_name(spec: RunSpec) -> str | None:
    """The backend that computes sparse layers; None without such layers."""
    return spec.backend.name if spec.backend else None


def optimizer_words(spec: RunSpec) -> str:
    """The optimizer and the settings on which the time of an update depends."""
    optimizer = spec.optim.optimizer
    used = [k for k, v in optimizer.arguments.items() if v and k not in ("_partial_", "lr")]
    return " ".join([optimizer.path, *sorted(used)])


def dtype_of(spec: RunSpec) -> str:
    """Torch's name of the numbers that a configuration computes with; else its precision."""
    precision = str(spec.trainer.precision)
    return _DTYPES.get(precision, precision)


def _threads(device: Device, inventory: Inventory) -> str | None:
    """Threads of a rank on a processor; None on several hosts, whose cores are not known here."""
    if device.accelerator != "cpu" or len(inventory.hosts) > 1:
        return None
    share = max(1, usable_cores() // inventory.num_devices)
    return os.environ.get("OMP_NUM_THREADS", str(share))


def fingerprint_of(
    inventory: Inventory, model: str, *, given: Mapping[str, str], spec: RunSpec | None = None
) -> str:
    """Fingerprint of the profiles of an inventory (see :func:`load_profiles`), as far as they count
    in a training of this configuration (see :func:`as_loaded`).
    """
    profiles = load_profiles(inventory, model, given=given)
    if spec is not None:
        profiles = as_loaded(profiles, spec, inventory)
    return _digest(inventory.to_yaml() + _all_json(profiles))


def fingerprint_of_profiles(profiles: Mapping[str, Profile]) -> str:
    """Fingerprint of the content of profiles, wherever the files are."""
    return _digest(_all_json(profiles))


def _all_json(profiles: Mapping[str, Profile]) -> str:
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
    shipped = assets_dir() / name
    found: Path = shipped if not path.exists() and shipped.exists() else path
    if found.suffix == ".txt":
        return graph_profile(read_graph(found), meta={"source": str(found)})
    return Profile.load(found)


def origin_of(profile: Profile) -> dict[str, Any]:
    """The entries of a plan file about a profile that it was computed from."""
    return {"fingerprint": _digest(profile.to_json()), "source": profile.meta.get("source")}
