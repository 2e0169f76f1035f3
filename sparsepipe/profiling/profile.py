"""Profiles, which hold the costs of each layer of a model on one device, and their files."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Self

from sparsepipe.errors import ProfileError
from sparsepipe.utils import reading
from sparsepipe.utils.files import write_text_atomic

_REMEASURE = "measure the model again with task=profile"


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerProfile:
    """Costs of one layer for a batch of the profile's ``batch_size``; None: not measured.

    Args:
        index: position in the model, from 0, not counting the input.
        name: the layer's name in the model, or in a ``graph.txt`` the text that describes it.
        kind: name of the layer's class.
        forward_s: seconds of the forward pass.
        backward_s: seconds of the backward pass.
        activation_bytes: bytes sent if the model is cut after this layer: features and coordinates,
            not the 4-KiB header that describes them.
        parameter_bytes: bytes of the parameters.
        saved_bytes: bytes that the forward pass saves for the backward pass, kernel maps included,
            for the batch that needs most.
        begin_bytes: bytes that a stage beginning with this layer keeps in addition to the
            ``saved_bytes`` of its layers: the received input, and kernel maps built anew.
        end_bytes: bytes that a stage ending with it keeps in addition: the output, if not saved.
        forward_spread_s: interquartile range of the measured forward times, in seconds.
        backward_spread_s: interquartile range of the measured backward times, in seconds.
        kernel_map_s: seconds of the forward pass in which kernel maps are built.
        peak_bytes: most bytes in use during the forward or the backward, beyond those in use before
            the forward: by CUDA's allocator, or on a CPU the bytes of tensors. They include the
            gradients that the layer computes, but not the one that it receives.
        update_s: the layer's share of the seconds of an optimizer's update of all parameters.
        copy_s: the layer's share of the seconds of copying all trained parameters within the
            device's memory, as a pipeline does when it stashes weights.
    """

    index: int
    name: str
    kind: str
    forward_s: float
    backward_s: float
    activation_bytes: float
    parameter_bytes: float
    saved_bytes: float | None = None
    begin_bytes: float | None = None
    end_bytes: float | None = None
    forward_spread_s: float | None = None
    backward_spread_s: float | None = None
    kernel_map_s: float | None = None
    peak_bytes: float | None = None
    update_s: float | None = None
    copy_s: float | None = None

    @property
    def compute_s(self) -> float:
        """Seconds of the forward and backward passes together."""
        return self.forward_s + self.backward_s


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """Layers of a branching graph that are done when a stage ends (see ``antichain_states``).

    Args:
        layers: bit mask of the state's layers; bit i stands for the graph's i-th node.
        antichain: names of the layers that no other layer of the state follows.
        compute_s: seconds of the forward and backward of all layers of the state.
        parameter_bytes: bytes of the parameters of all layers of the state.
        input_bytes: bytes that all layers of the state read: outputs of their predecessors, and
            inputs of the graph.
        cut_bytes: bytes sent if the graph is cut here: the outputs that layers outside the state
            read.
    """

    layers: int
    antichain: tuple[str, ...]
    compute_s: float
    parameter_bytes: float
    input_bytes: float
    cut_bytes: float

    def within(self, other: State) -> bool:
        """Whether the state ``other`` includes all layers of this one."""
        return self.layers & ~other.layers == 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """The costs of the layers of one model on one device.

    Args:
        layers: the layers' profiles, in the model's order.
        meta: facts about the measurement: ``model``, ``batch_size``, ``resolution``,
            ``point_ratio``, ``device``, ``dtype``, ``backend``, ``num_warmup``, ``num_measured``,
            ``versions``, ``source``, ``input_bytes``, ``load_s`` and others.
        states: states of a branching graph whose nodes are ``layers``, the last state with all of
            them; empty for a chain. The profile file does not contain them.
    """

    layers: tuple[LayerProfile, ...]
    meta: Mapping[str, Any] = field(default_factory=dict)
    states: tuple[State, ...] = ()

    def __post_init__(self) -> None:
        if not self.layers:
            raise ProfileError("the profile has no layers", remedy=_REMEASURE)
        for place, layer in enumerate(self.layers):
            if layer.index != place:
                raise ProfileError(
                    f"layer {place} of the profile has index {layer.index}",
                    remedy="number the layers from 0 without gaps",
                )
            for name in _AMOUNTS:
                value = getattr(layer, name)
                if not reading.is_amount(value) and (value is not None or name not in _OPTIONAL):
                    raise ProfileError(
                        f"layer {place} of the profile has {name}={value}, which is not a valid "
                        "time or size",
                        remedy=f"give numbers from 0 to {reading.LARGEST:g}, or {_REMEASURE}",
                    )
        for name in ("input_bytes", "load_s"):
            value = self.meta.get(name, 0.0)
            if not reading.is_amount(value):
                raise ProfileError(
                    f"the profile's meta has {name}={reading.shown(value)}, which is not a valid"
                    " value",
                    remedy=f"give a number of at least 0, leave it out, or {_REMEASURE}",
                )

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def compute_s(self) -> float:
        """Seconds of the forward and backward of all layers."""
        return sum(layer.compute_s for layer in self.layers)

    @property
    def update_s(self) -> float | None:
        """Seconds of the optimizer's update of all layers; None if not measured for each layer."""
        return _sum([layer.update_s for layer in self.layers])

    @property
    def copy_s(self) -> float | None:
        """Seconds of copying the weights of all layers; None if not measured for each layer."""
        return _sum([layer.copy_s for layer in self.layers])

    @property
    def parameter_bytes(self) -> float:
        """Bytes of the parameters of all layers."""
        return sum(layer.parameter_bytes for layer in self.layers)

    @property
    def input_bytes(self) -> float:
        """Bytes of the model's input; 0: not measured."""
        return float(self.meta.get("input_bytes", 0.0))

    @property
    def load_s(self) -> float | None:
        """Seconds in which one process reads and collates a batch; None if not measured."""
        return float(self.meta["load_s"]) if "load_s" in self.meta else None

    def to_json(self) -> str:
        """The profile file's text; :meth:`from_json` reads it back."""
        layers = [
            {key: value for key, value in asdict(layer).items() if value is not None}
            for layer in self.layers
        ]
        return json.dumps({"meta": dict(self.meta), "layers": layers}, indent=1) + "\n"

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Writes the profile file atomically, and returns its path."""
        return write_text_atomic(path, self.to_json())

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Parses a profile file's text; raises a ProfileError if it is not valid."""
        try:
            value = reading.mapping(reading.parse_json(text), "its content")
            layers = []
            for place, entry in enumerate(reading.listing(value.get("layers"), "layers")):
                layer: dict[str, Any] = dict(reading.mapping(entry, f"layers[{place}]"))
                reading.name(layer.get("name"), f"layers[{place}].name")
                for name in _AMOUNTS:
                    if layer.get(name) is not None:
                        layer[name] = reading.amount(layer[name], f"layers[{place}].{name}")
                layers.append(LayerProfile(**layer))
            meta = dict(reading.mapping(value.get("meta"), "meta"))
            if meta.get("batch_size") is not None and not reading.whole(
                meta["batch_size"], "meta.batch_size"
            ):
                raise ValueError("meta.batch_size is 0")
            return cls(layers=tuple(layers), meta=meta)
        except ProfileError:
            raise
        except (ValueError, TypeError) as error:  # a layer with other keys
            raise ProfileError(
                f"this is not a valid profile: {error}",
                remedy='write {"meta": {...}, "layers": [{"index": 0, ...}, ...]}, or make the '
                "file with task=profile",
            ) from error

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Reads a profile file; raises a ProfileError if it is missing or not valid."""
        remedy = "correct its path, or measure the device with task=profile"
        with reading.explained(Path(path), "profile", error=ProfileError, remedy=remedy):
            return cls.from_json(reading.read_text(path))


def _sum(times_s: Sequence[float | None]) -> float | None:
    """The sum of all times; None if one is missing."""
    known_s = [time_s for time_s in times_s if time_s is not None]
    return sum(known_s) if len(known_s) == len(times_s) else None


_AMOUNTS = tuple(f.name for f in fields(LayerProfile) if f.name not in ("index", "name", "kind"))
_OPTIONAL = tuple(f.name for f in fields(LayerProfile) if f.default is None)

ACTIVATION_TOLERANCE = 0.2
"""Fraction by which the bytes of an activation may differ between devices: points are drawn at
random, and the profiles of the paper's authors differ by 18 %."""

_TOLERANCES = {"activation_bytes": ACTIVATION_TOLERANCE, "parameter_bytes": 0.001}
_SAME_RUN = ("model", "batch_size", "resolution", "point_ratio", "dtype")


def check_there(devices: Iterable[str], profiles: Mapping[str, Profile]) -> None:
    """Raises a ProfileError that names those of ``devices`` without a profile, if any."""
    if missing := [name for name in dict.fromkeys(devices) if name not in profiles]:
        known = ", ".join(profiles) or "none"
        raise ProfileError(
            f"there is no profile of {', '.join(missing)} (profiled: {known})",
            remedy="run task=profile on each such device, and name its profile.json in "
            "task.profiles, parallel.search.profiles or under 'profile' of the device in the "
            "hardware inventory",
        )


def check_agreement(profiles: Mapping[str, Profile]) -> None:
    """Raises a ProfileError if profiles of several devices differ in their model or batch."""
    (first, reference), *others = profiles.items()
    for device, profile in others:
        problems = [
            f"{device} was measured with {name}={b}, but {first} with {name}={a}"
            for name in _SAME_RUN
            for a, b in ((reference.meta.get(name), profile.meta.get(name)),)
            if None not in (a, b) and a != b
        ]
        if profile.num_layers != reference.num_layers:
            problems.append(
                f"{device} has {profile.num_layers} layers, but {first} has {reference.num_layers}"
            )
        for one, other in zip(reference.layers, profile.layers, strict=False):
            layer = f"layer {one.index} ({one.kind})"
            if one.kind != other.kind:
                problems.append(f"{layer} on {first} is {other.kind} on {device}")
            for name, tolerance in _TOLERANCES.items():
                x, y = getattr(one, name), getattr(other, name)
                if abs(x - y) > tolerance * max(x, y):
                    problems.append(
                        f"{layer} has {name}={y:.0f} on {device} and {x:.0f} on {first}: more than "
                        f"{tolerance:.1%} apart"
                    )
        if problems:
            raise ProfileError(
                f"the profiles are not of the same model and batch: {problems[0]}",
                remedy="profile the same model with the same data on every device (task=profile)",
            )
