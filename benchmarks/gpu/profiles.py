"""SmartProfile on the device: what it costs, whether its layers sum up to a step, and repeat."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

import torch
from jobs import Jobs
from profile_repeatability import PLAN_GOAL, STEP_GOAL, TOTAL_GOAL, Taken, apart_of
from records import Row, Rows

from sparsepipe.profiling import Profile

COLUMNS: Mapping[str, str] = {
    "layers_s": "layers (s)",
    "step_s": "step (s)",
    "layers_share_of_step": "layers / step",
    "kernel_maps_s": "kernel maps (s)",
    "update_s": "update (s)",
    "profile_s": "cost of the profile (s)",
    "totals_apart": "totals apart",
    "plans_apart": "plans apart",
    "layers_off_step": "layers off the step",
}
_DEVICES, _BANDWIDTH_BYTES_PER_S = 4, 1.25e9
"""What plans are made for: as many like devices, and 10 Gb/s between them."""


def measure(rows: Rows, *, device: torch.device, work: Path) -> None:
    """Two profiles of sparse VGG16-BN at 50³, as of the paper's Fig. 7, and how far they are apart.

    Args:
        rows: of the record.
        device: a CUDA device; on a CPU the network is small, and so is the effort.
        work: directory for data and runs.
    """
    jobs = Jobs(work)
    size = ("scale=paper",) if device.type == "cuda" else ("scale=smoke", "data.resolution=50")
    first = rows.measure("profile 1", partial(_profile, jobs, *size, "name=fig7"))
    second = rows.measure("profile 2", partial(_profile, jobs, *size, "name=fig7_again"))
    if first is not None and second is not None:
        rows.measure("repeatability", partial(_apart, [first, second]))
    rows.measure(
        "profile of native", partial(_profile, jobs, *size, "name=fig7_native", "backend=native")
    )


def _profile(jobs: Jobs, *overrides: str) -> Row:
    result, path = jobs.run("experiment=fig7", *overrides)
    profile = Profile.load(path / "profile.json")
    shown = {key: result[key] for key in COLUMNS if key in result}
    # The second one is the same run under another name, of which a ledger has no use.
    kept = {"result": result} if result["name"] == "fig7" else {}
    return {**shown, **kept, "profile": json.loads(profile.to_json())}


def _apart(found: Sequence[Row]) -> Row:
    """How far two profiles are apart, and what each one's plan costs by the other."""
    profiles = [Profile.from_json(json.dumps(row["profile"])) for row in found]
    taken = [
        Taken.of(profile, devices=_DEVICES, bandwidth_bytes_per_s=_BANDWIDTH_BYTES_PER_S)
        for profile in profiles
    ]
    apart = apart_of(taken)
    return {
        "totals_apart": apart.totals,
        "plans_apart": apart.plans,
        "layers_off_step": apart.layers_off_step,
        "goals": {"totals": TOTAL_GOAL, "plans": PLAN_GOAL, "layers_off_step": STEP_GOAL},
        "plans": [one.plan for one in taken],
    }
