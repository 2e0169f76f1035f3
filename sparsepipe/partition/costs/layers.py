"""Costs of spans of layers, as differences of running sums.

Shape suffixes: K kinds of devices; I = L + 1 cut positions, where a stage may begin or end: before
the first layer and after each; in a branching graph, before the first state and at each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sparsepipe.errors import ProfileError
from sparsepipe.profiling import Profile, State

Floats = NDArray[np.float64]
Ints = NDArray[np.intp]
Bools = NDArray[np.bool_]


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Spans:
    """Running sums of costs over the layers before each cut position.

    Attributes:
        compute_s_KI: seconds of forward and backward passes on each kind of device; if all profiles
            have them, also of updates and, in the first layer, of loading a batch.
        parameter_bytes_I: bytes of parameters.
        stored_bytes_I: bytes that a minibatch in flight keeps for its backward pass.
        begin_bytes_I: bytes that a stage keeps in addition if it begins here; not a sum; None: 0.
        end_bytes_I: bytes that a stage keeps in addition if it ends here; not a sum; None: 0.
        cut_bytes_I: bytes that cross a cut at the position; not a sum.
        nested_II: whether a span may begin at the first position and end at the second; None: it
            may end at any later one, as in a chain of layers.
    """

    compute_s_KI: Floats
    parameter_bytes_I: Floats
    stored_bytes_I: Floats
    cut_bytes_I: Floats
    nested_II: NDArray[np.bool_] | None = None
    begin_bytes_I: Floats | None = None
    end_bytes_I: Floats | None = None

    @property
    def num_layers(self) -> int:
        """L, the number of layers of a chain, or of states of a branching graph."""
        return len(self.cut_bytes_I) - 1

    def parameter_bytes(self, first: int, end: int) -> float:
        """Bytes of the parameters between the cut positions ``first`` and ``end``."""
        return float(self.parameter_bytes_I[end] - self.parameter_bytes_I[first])

    def stored_bytes(self, first: int, end: int) -> float:
        """Bytes that a stage between these cut positions keeps for each minibatch in flight."""
        before_I, after_I = self.stored_between()
        return float(after_I[end] - before_I[first])

    def stored_between(self) -> tuple[Floats, Floats]:
        """Two arrays [I] of bytes: a stage keeps, for each minibatch in flight, the second array's
        value where it ends minus the first array's value where it begins.
        """
        begin_I = end_I = self.stored_bytes_I
        if self.begin_bytes_I is not None:
            begin_I = begin_I - self.begin_bytes_I
        if self.end_bytes_I is not None:
            end_I = end_I + self.end_bytes_I
        return begin_I, end_I


def spans_of(profiles: Sequence[Profile]) -> Spans:
    """Costs of a chain or a branching graph, from a profile for each kind of device."""
    if any(profile.states for profile in profiles):
        return state_spans([profile.states for profile in profiles])
    return chain_spans(profiles)


def chain_spans(profiles: Sequence[Profile]) -> Spans:
    """Costs of a chain of layers.

    Times are kept for each profile; each layer's byte counts are the largest of any profile. A
    layer without ``saved_bytes`` is assumed to save its input.
    """
    if len({profile.num_layers for profile in profiles}) != 1:
        raise ProfileError(
            f"the profiles have different numbers of layers: {[p.num_layers for p in profiles]}",
            remedy="measure the same model on all devices with task=profile",
        )
    updates = all(profile.update_s is not None for profile in profiles)
    compute_s_KL = [
        [layer.compute_s + (layer.update_s or 0.0) * updates for layer in p.layers]
        for p in profiles
    ]
    for own_s, load_s in zip(compute_s_KL, loads_s(profiles), strict=True):
        own_s[0] += load_s
    most = {
        name: _most([[getattr(layer, name) or 0.0 for layer in p.layers] for p in profiles])
        for name in ("parameter_bytes", "activation_bytes", "begin_bytes", "end_bytes")
    }
    stored_KL = []
    for own in profiles:
        inputs = [own.input_bytes, *(layer.activation_bytes for layer in own.layers[:-1])]
        stored_KL.append(
            [
                before if layer.saved_bytes is None else layer.saved_bytes
                for layer, before in zip(own.layers, inputs, strict=True)
            ]
        )
    return Spans(
        compute_s_KI=_sums(np.array(compute_s_KL)),
        parameter_bytes_I=_sums(most["parameter_bytes"]),
        stored_bytes_I=_sums(_most(stored_KL)),
        cut_bytes_I=np.array([0.0, *most["activation_bytes"][:-1], 0.0]),
        begin_bytes_I=np.array([*most["begin_bytes"], 0.0]),
        end_bytes_I=np.array([0.0, *most["end_bytes"]]),
    )


def loads_s(profiles: Sequence[Profile]) -> list[float]:
    """For each profile, the seconds of loading a batch; 0 for all if one profile lacks them."""
    known = [profile.load_s for profile in profiles if profile.load_s is not None]
    return known if len(known) == len(profiles) else [0.0] * len(profiles)


def state_spans(states: Sequence[Sequence[State]]) -> Spans:
    """Costs of a branching graph; ``states`` lists its states, with costs, by kind of device."""
    if len({tuple(state.layers for state in kind) for kind in states}) != 1:
        raise ProfileError(
            "the graphs have different layers or edges", remedy="profile one model on all devices"
        )
    places = [0, *(state.layers for state in states[0])]
    wide = np.array([[a & ~b == 0 for b in places] for a in places])
    most = {
        name: _most([[0.0, *(getattr(state, name) for state in kind)] for kind in states])
        for name in ("parameter_bytes", "input_bytes", "cut_bytes")
    }
    return Spans(
        compute_s_KI=np.array([[0.0, *(state.compute_s for state in kind)] for kind in states]),
        parameter_bytes_I=most["parameter_bytes"],
        stored_bytes_I=most["input_bytes"],
        cut_bytes_I=most["cut_bytes"],
        nested_II=wide & ~np.eye(len(places), dtype=np.bool_),
    )


def _most(rows: Sequence[Sequence[float]]) -> Floats:
    most: Floats = np.array(rows, dtype=np.float64).max(axis=0)
    return most


def _sums(values: Floats) -> Floats:
    zeros = np.zeros((*values.shape[:-1], 1))
    return np.concatenate([zeros, np.cumsum(values, axis=-1)], axis=-1)
