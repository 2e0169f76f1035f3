"""The profiles of an inventory's devices: finding, loading, checking and drawing their files."""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from sparsepipe.cluster import Inventory
from sparsepipe.config.run_spec import RunSpec
from sparsepipe.data.dataloaders import default_workers
from sparsepipe.errors import ProfileError
from sparsepipe.planning.division import Division, own_or_shipped, read_plan_file
from sparsepipe.plots import style
from sparsepipe.plots.shares import LayerShares, accumulated_shares_figure, share_rows
from sparsepipe.profiling import Profile, check_agreement, graph_profile, read_graph
from sparsepipe.utils.files import expanded, write_csv
from sparsepipe.utils.host import usable_cores
from sparsepipe.utils.process import matmul_precision_on

log = logging.getLogger(__name__)

_DTYPES = {"None": "float32", "32": "float32", "32-true": "float32", "64-true": "float64"}
_WORKLOAD = ("batch_size", "resolution", "point_ratio")


def load_profile(name: str) -> Profile:
    """Loads a profile file or, if its suffix is ``.txt``, a ``graph.txt`` of PipeDream's profiler.

    Args:
        name: path of the file; a relative path that does not exist is looked up among the shipped
            files.

    Raises:
        ProfileError: the file is missing, or is neither a profile nor a ``graph.txt``.
    """
    path = own_or_shipped(name)
    if path.suffix == ".txt":
        return graph_profile(read_graph(path), meta={"source": str(path)})
    return Profile.load(path)


def load_profiles(
    inventory: Inventory,
    model: str,
    *,
    given: Mapping[str, str],
    settings: Mapping[str, Any] | None = None,
) -> dict[str, Profile]:
    """Loads the profiles, by device name, of an inventory's devices for which a file is named.

    Args:
        inventory: the hardware, whose devices may name a profile file for each model.
        model: name of the model.
        given: files by device name, which take precedence over the inventory's.
        settings: the model's settings, which a profile must match; None: not compared.

    Raises:
        ProfileError: a file is missing or broken, or has measurements of another model or other
            settings; ``given`` names an unknown device; the inventory names two files for a device.
    """
    devices = [device for host in inventory.hosts for device in host.devices]
    names = list(dict.fromkeys(device.name for device in devices))
    if unknown := [name for name in given if name not in names]:
        raise ProfileError(
            f"profiles are given for {', '.join(unknown)}, but the inventory has no such device",
            remedy=f"name devices of the hardware inventory: {', '.join(names)}",
        )
    files: dict[str, str] = {**given}
    for device in devices:
        if device.name in given or model not in device.profile:
            continue
        path = device.profile[model]
        if files.setdefault(device.name, path) != path:
            raise ProfileError(
                f"the inventory names two profiles of {model} for {device.name}: "
                f"{files[device.name]} and {path}",
                remedy="name the same file on all hosts, or give the devices different names",
            )
    found = {name: load_profile(path) for name, path in files.items()}
    for name, profile in found.items():
        of = profile.meta.get("model")  # a graph.txt has none
        if of not in (None, model):
            raise ProfileError(
                f"{files[name]} is a profile of another model: {of}, not {model}",
                remedy=f"measure {model} with task=profile, or choose model={of}",
            )
        measured, wanted = profile.meta.get("model_settings") or {}, settings or {}
        if others := [key for key in wanted if measured.get(key, wanted[key]) != wanted[key]]:
            raise ProfileError(
                f"{files[name]} is a profile of {model} with "
                f"{', '.join(f'{key}={measured[key]}' for key in others)}, not with "
                f"{', '.join(f'{key}={wanted[key]}' for key in others)}",
                remedy="measure the model with its present settings (task=profile), or set "
                + ", ".join(f"model.{key}={measured[key]}" for key in others),
            )
    return found


def as_loaded(
    profiles: Mapping[str, Profile], spec: RunSpec, inventory: Inventory
) -> dict[str, Profile]:
    """The profiles as they count in a training: without ``load_s``, the time of reading a batch, if
    loader workers read batches or the hardware is emulated.
    """
    workers = spec.data.get("num_workers")
    if workers is None:
        hosts = sum(any(device.count for device in host.devices) for host in inventory.hosts)
        workers = default_workers(-(-inventory.num_devices // max(1, hosts)))
    if not workers and spec.emulation is None:
        return dict(profiles)
    return {
        name: replace(profile, meta={k: v for k, v in profile.meta.items() if k != "load_s"})
        for name, profile in profiles.items()
    }


def workload(spec: RunSpec) -> dict[str, Any]:
    """The data settings, by name, on which the time of a step depends."""
    return {name: spec.data.get(name) for name in _WORKLOAD}


def other_workloads(profiles: Mapping[str, Profile], spec: RunSpec) -> list[str]:
    """A message for each data setting in which a profile differs from the configuration."""
    found = []
    for device, profile in profiles.items():
        for name, configured in workload(spec).items():
            measured = profile.meta.get(name)
            if None not in (configured, measured) and measured != configured:
                found.append(f"{device} was measured with data.{name}={measured}, not {configured}")
    return found


def check_batch_sizes(profiles: Mapping[str, Profile]) -> None:
    """Raises a ProfileError unless all profiles with a batch size have the same one."""
    batch_sizes = {name: profile.meta.get("batch_size") for name, profile in profiles.items()}
    sizes = {name: size for name, size in batch_sizes.items() if size is not None}
    first = next(iter(sizes), "")
    if unlike := [name for name in sizes if sizes[name] != sizes[first]]:
        raise ProfileError(
            f"{first} was profiled with data.batch_size={sizes[first]}, but {unlike[0]} with "
            f"{sizes[unlike[0]]}",
            remedy="profile the model on all devices with the same data.batch_size (task=profile)",
        )


def check_measured(profiles: Mapping[str, Profile], spec: RunSpec, inventory: Inventory) -> None:
    """Refuses profiles that do not match the training: measured on another workload, at another
    slowdown or with another backend; warns of other differences, since they may matter little.

    Raises:
        ProfileError: a profile does not match in the batch size, the resolution, the point ratio,
            the slowdown or the backend.
    """
    others = other_workloads(profiles, spec)
    for name, text in _differences(profiles, spec, inventory):
        if name in _REFUSED:
            others.append(text)
        else:
            log.warning(_OTHERWISE, text)
    if others:
        raise ProfileError(
            "the profiles do not match the training: " + "; ".join(others),
            remedy="measure the model on these data, devices and backend with task=profile, leave "
            "the profiles out, so that they are measured before the training, or set data, "
            "hardware and backend as they were when the profiles were measured",
        )


_REFUSED = ("slowdown", "backend")
_OTHERWISE = "a profile was measured under other conditions: %s"


def log_differences(profiles: Mapping[str, Profile], spec: RunSpec, inventory: Inventory) -> None:
    """Logs in what profiles differ from a configuration that is planned for or simulated; leaves
    out conditions that depend on the machine at hand.
    """
    for text in other_workloads(profiles, spec):
        log.info("%s: the results are for what was measured", text)
    for name, text in _differences(profiles, spec, inventory):
        if name not in (*_REFUSED, "threads"):
            log.warning(_OTHERWISE, text)


def _differences(
    profiles: Mapping[str, Profile], spec: RunSpec, inventory: Inventory
) -> Iterator[tuple[str, str]]:
    """Yields names of conditions, with messages; what a profile does not record matches."""
    synchronous = spec.parallel.synchronous
    for device in {d.name: d for host in inventory.hosts for d in host.devices}.values():
        if (profile := profiles.get(device.name)) is None:
            continue
        threads = None  # unknown on several hosts
        if device.accelerator == "cpu" and len(inventory.hosts) == 1:
            share = max(1, usable_cores() // inventory.num_devices)
            threads = os.environ.get("OMP_NUM_THREADS", str(share))
        conditions = {
            "slowdown": device.slowdown,
            "backend": backend_name(spec, device.accelerator),
            "device": device.name,
            "dtype": dtype_of(spec),
            "matmul_precision": matmul_precision_on(
                device.accelerator, spec.trainer.matmul_precision
            ),
            "optimizer": optimizer_words(spec),
            "threads": threads,
            "microbatches": 1 if synchronous is None else synchronous.microbatches,
        }
        for name, configured in conditions.items():
            measured = profile.meta.get(name)
            was, wanted = (
                f"{value:g}" if isinstance(value, float) else str(value)
                for value in (measured, configured)
            )
            if None not in (configured, measured) and was != wanted:
                yield name, f"{device.name} was measured with {name} {was}, not {wanted}"


def backend_name(spec: RunSpec, accelerator: str) -> str | None:
    """Name of the backend that computes sparse layers; None for a model without such layers, and
    for ``auto`` on a GPU.
    """
    name = spec.backend.name if spec.backend else None
    return name if name != "AutoBackend" else "NativeBackend" if accelerator == "cpu" else None


def optimizer_words(spec: RunSpec) -> str:
    """The optimizer and the names of its settings, except the learning rate, that are not zero or
    false, as text to compare: the time of an update depends on them.
    """
    optimizer = spec.optim.optimizer
    used = [k for k, v in optimizer.arguments.items() if v and k not in ("_partial_", "lr")]
    return " ".join([optimizer.path, *sorted(used)])


def dtype_of(spec: RunSpec) -> str:
    """Torch's name for the data type of ``trainer.precision``; the precision if it mixes types."""
    precision = str(spec.trainer.precision)
    return _DTYPES.get(precision, precision)


def fingerprint_of(
    inventory: Inventory, model: str, *, given: Mapping[str, str], spec: RunSpec | None = None
) -> str:
    """Fingerprint of an inventory and its profiles (:func:`load_profiles`), as they count in a
    training of the configuration ``spec`` (:func:`as_loaded`); None: as in their files.
    """
    profiles = load_profiles(inventory, model, given=given)
    if spec is not None:
        profiles = as_loaded(profiles, spec, inventory)
    return fingerprint_of_text(inventory.to_yaml() + _all_json(profiles))


def fingerprint_of_profiles(profiles: Mapping[str, Profile]) -> str:
    """Fingerprint of the content of profiles, regardless of the paths of their files."""
    return fingerprint_of_text(_all_json(profiles))


def _all_json(profiles: Mapping[str, Profile]) -> str:
    return "".join(f"{name}\n{profiles[name].to_json()}" for name in sorted(profiles))


def fingerprint_of_text(text: str) -> str:
    """The first 16 hexadecimal digits of a text's SHA-256."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def layer_shares(profile: Profile) -> LayerShares:
    """A device's costs by layer, for the picture of accumulated shares (the paper's Fig. 7)."""
    return LayerShares(
        compute_s=[layer.compute_s for layer in profile.layers],
        activation_bytes=[layer.activation_bytes for layer in profile.layers],
        parameter_bytes=[layer.parameter_bytes for layer in profile.layers],
    )


def draw_shares(profiles: Mapping[str, Profile], path: Path, *, cuts: Sequence[int] = ()) -> None:
    """Draws each device's accumulated shares of compute time, activations and parameters, and marks
    the ``cuts`` of a plan unless a profile's graph branches.

    Raises:
        DataError: the picture cannot be written.
    """
    branches = any(profile.states for profile in profiles.values())
    shares = {device: layer_shares(profile) for device, profile in profiles.items()}
    style.save_png(accumulated_shares_figure(shares, cuts=() if branches else cuts), path)


@dataclass(frozen=True, slots=True, kw_only=True)
class OtherProfiles:
    """Other profiles, and the cuts of a plan, for the picture of a device's profile.

    Attributes:
        plan: the plan whose cuts are marked; None: no cuts are marked.
        profiles: with a plan, the profiles that the inventory names for its devices.
        others: further profiles, by name in the picture. They need as many layers as the device's
            profile, but may differ in width and batch, since only shares are shown.
    """

    plan: Division | None = None
    profiles: Mapping[str, Profile] = field(default_factory=dict)
    others: Mapping[str, Profile] = field(default_factory=dict)

    @classmethod
    def of(
        cls, file: str | None, spec: RunSpec, inventory: Inventory, *, others: Mapping[str, str]
    ) -> OtherProfiles:
        """Loads the plan ``file`` (``task.plan``) and the profiles ``others`` (``task.beside``).

        Raises:
            PlanError: the plan file is missing or is not a valid plan.
            ProfileError: a profile is missing or broken, or one of the inventory's is of another
                model.
        """
        loaded = {name: load_profile(path) for name, path in others.items()}
        if file is None:
            return cls(others=loaded)
        plan, model = read_plan_file(expanded(file), key="task.plan"), spec.model
        found = load_profiles(inventory, model.name, given={}, settings=model.settings)
        return cls(plan=plan, profiles=found, others=loaded)

    @property
    def words(self) -> list[str]:
        """Texts on which the picture depends, for the run's identity."""
        of_plan = []
        if self.plan is not None:
            of_plan = [f"cuts {self.plan.cuts}", fingerprint_of_profiles(self.profiles)]
        return [*of_plan, *([fingerprint_of_profiles(self.others)] if self.others else [])]

    def check(self, *, num_layers: int) -> None:
        """Refuses a plan (PlanError) or a profile of ``others`` (ProfileError) that does not have
        ``num_layers`` layers.
        """
        if self.plan is not None:
            self.plan.check(num_layers=num_layers)
        for name, profile in self.others.items():
            if profile.num_layers != num_layers:
                raise ProfileError(
                    f"{name} has {profile.num_layers} layers, but the network has {num_layers}",
                    remedy="leave it out, or give a profile with as many layers as the network",
                )

    def draw(self, device: str, profile: Profile, path: Path) -> None:
        """Draws the shares of a device and of the others to ``path``, and to a CSV file beside it.

        Raises:
            ProfileError: the inventory's profiles have other layers than the device's.
            DataError: a file cannot be written.
        """
        check_agreement({**self.profiles, device: profile})
        shown = {**self.others, **self.profiles, device: profile}
        draw_shares(shown, path, cuts=(self.plan and self.plan.cuts) or ())
        rows = share_rows({name: layer_shares(each) for name, each in shown.items()})
        write_csv(path.with_suffix(".csv"), rows)


def by_layer(profile: Profile) -> dict[str, list[float]]:
    """Entries of ``result.json`` with a value for each layer, such as ``layers_compute_s``."""
    shares = asdict(layer_shares(profile))
    return {f"layers_{name}": list(values) for name, values in shares.items()}
