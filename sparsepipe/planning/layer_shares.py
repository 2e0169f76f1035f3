"""The picture of where a model's costs lie, device by device (the paper's Fig. 7)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from sparsepipe.cluster import Inventory
from sparsepipe.config.run_spec import RunSpec
from sparsepipe.errors import ProfileError
from sparsepipe.planning.device_profiles import (
    fingerprint_of_profiles,
    load_profile,
    load_profiles,
)
from sparsepipe.planning.division import Division, read_plan_file
from sparsepipe.plots import style
from sparsepipe.plots.shares import LayerShares, accumulated_shares_figure, share_rows
from sparsepipe.profiling import Profile, check_agreement
from sparsepipe.utils.files import expanded
from sparsepipe.utils.tables import write_csv


def draw_shares(profiles: Mapping[str, Profile], path: Path, *, cuts: Sequence[int] = ()) -> None:
    """Draws accumulated shares of compute time, activations and parameters.

    Raises:
        DataError: the picture cannot be written.
    """
    branches = any(profile.states for profile in profiles.values())
    costs = {device: _costs(profile) for device, profile in profiles.items()}
    style.save_png(accumulated_shares_figure(costs, cuts=() if branches else cuts), path)


@dataclass(frozen=True, slots=True, kw_only=True)
class OtherProfiles:
    """Other profiles and cuts that the picture of a device's profile shows beside it.

    Attributes:
        plan: whose cuts are marked; None: no plan is drawn.
        profiles: with a plan, of the inventory's devices, as far as it names files.
        others: further ones by what they are called; of as many layers, whatever the width and the
            batch that they were measured with, since only shares are shown.
    """

    plan: Division | None = None
    profiles: Mapping[str, Profile] = field(default_factory=dict)
    others: Mapping[str, Profile] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        file: str | None,
        spec: RunSpec,
        inventory: Inventory,
        *,
        others: Mapping[str, str] | None = None,
    ) -> OtherProfiles:
        """From ``task.plan`` and ``task.beside``.

        Raises:
            PlanError: the plan file is missing or is none.
            ProfileError: a profile is missing or broken, or the inventory's is of another model.
        """
        loaded = {name: load_profile(path) for name, path in (others or {}).items()}
        if file is None:
            return cls(others=loaded)
        plan = read_plan_file(expanded(file), key="task.plan")
        settings = spec.model.settings
        found = load_profiles(inventory, spec.model.name, given={}, settings=settings)
        return cls(plan=plan, profiles=found, others=loaded)

    @property
    def words(self) -> list[str]:
        """Parts of the fingerprint of the picture."""
        of_plan = []
        if self.plan is not None:
            of_plan = [f"cuts {self.plan.cuts}", fingerprint_of_profiles(self.profiles)]
        return [*of_plan, *([fingerprint_of_profiles(self.others)] if self.others else [])]

    def check(self, *, num_layers: int) -> None:
        """Refuses a plan for another number of layers, and profiles of another one.

        Raises:
            PlanError: the plan is that.
            ProfileError: one of the others is.
        """
        if self.plan is not None:
            self.plan.check(num_layers=num_layers)
        for name, profile in self.others.items():
            if profile.num_layers != num_layers:
                raise ProfileError(
                    f"{name} has {profile.num_layers} layers, the network has {num_layers}",
                    remedy="leave it out of task.beside, or profile that network",
                )

    def draw(self, device: str, profile: Profile, path: Path) -> None:
        """Draws a device's shares amid those of the others, and tabulates them beside the picture.

        Raises:
            ProfileError: those of the inventory are of other layers.
            DataError: a file cannot be written.
        """
        check_agreement({**self.profiles, device: profile})
        cuts = () if self.plan is None else self.plan.cuts or ()
        shown = {**self.others, **self.profiles, device: profile}
        draw_shares(shown, path, cuts=cuts)
        costs = {name: _costs(each) for name, each in shown.items()}
        write_csv(path.with_suffix(".csv"), share_rows(costs))


def by_layer(profile: Profile) -> dict[str, list[float]]:
    """Entries of ``result.json`` for a profile's layers, a list each: ``layers_compute_s``, ..."""
    return {f"layers_{name}": list(values) for name, values in asdict(_costs(profile)).items()}


def _costs(profile: Profile) -> LayerShares:
    return LayerShares(
        compute_s=[layer.compute_s for layer in profile.layers],
        activation_bytes=[layer.activation_bytes for layer in profile.layers],
        parameter_bytes=[layer.parameter_bytes for layer in profile.layers],
    )
