"""Whether profiles of several devices are of one model, run in the same way."""

from __future__ import annotations

from collections.abc import Mapping

from sparsepipe.errors import ProfileError
from sparsepipe.profiling.profile import LayerProfile, Profile

ACTIVATION_TOLERANCE = 0.2
"""Share by which the bytes of an activation may differ: points are drawn at random, and the
profiles of the paper's authors differ by 18 %."""
PARAMETER_TOLERANCE = 0.001
_SAME_RUN = ("model", "batch_size", "resolution", "point_ratio", "dtype")


def check_agreement(profiles: Mapping[str, Profile]) -> None:
    """Refuses profiles that no one model could have on several devices.

    Args:
        profiles: by device.

    Raises:
        ProfileError: layers, their kinds or their sizes differ, or what the profiles say of the
            model, the batch or the type of numbers; the message names both devices.
    """
    (first, reference), *others = profiles.items()
    for device, profile in others:
        _check_meta(first, reference, device, profile)
        if profile.num_layers != reference.num_layers:
            raise _differ(
                f"{device} has {profile.num_layers} layers, {first} has {reference.num_layers}"
            )
        for a, b in zip(reference.layers, profile.layers, strict=True):
            _check_layer(first, a, device, b)


def _check_meta(first: str, reference: Profile, device: str, profile: Profile) -> None:
    for name in _SAME_RUN:
        a, b = reference.meta.get(name), profile.meta.get(name)
        if None not in (a, b) and a != b:
            raise _differ(f"{device} was measured with {name}={b}, {first} with {name}={a}")


def _check_layer(first: str, a: LayerProfile, device: str, b: LayerProfile) -> None:
    if a.kind != b.kind:
        raise _differ(f"layer {a.index} is {b.kind} on {device} and {a.kind} on {first}")
    for name, tolerance in (
        ("activation_bytes", ACTIVATION_TOLERANCE),
        ("parameter_bytes", PARAMETER_TOLERANCE),
    ):
        x, y = getattr(a, name), getattr(b, name)
        if abs(x - y) > tolerance * max(x, y):
            raise _differ(
                f"layer {a.index} ({a.kind}) has {name}={y:.0f} on {device} and {x:.0f} on "
                f"{first}: more than {tolerance:.1%} apart"
            )


def _differ(what: str) -> ProfileError:
    return ProfileError(
        f"the profiles are not of one model and batch: {what}",
        remedy="profile the same model with the same data on every device (task=profile)",
    )
