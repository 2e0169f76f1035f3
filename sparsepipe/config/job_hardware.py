"""The hardware of the whole machine, passed to a sweep's job that may use a part of it.

The job would find that part only, and a run is named by all of it. The configuration stays as the
user gave it; the message goes from process to process in an environment variable.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

import yaml

from sparsepipe.cluster import Inventory
from sparsepipe.config.target import Target

_VARIABLE = "SPARSEPIPE_HARDWARE"
"""Environment variable: a node of the group ``hardware`` and what that is, as JSON."""


def hardware_message(target: Target, inventory: Inventory) -> dict[str, Any]:
    """The whole machine's hardware as plain values, for :func:`announce_hardware` in a job.

    Args:
        target: what builds the inventory.
        inventory: what it builds where all of the machine is seen.
    """
    return {"node": target.to_dict(), "inventory": yaml.safe_load(inventory.to_yaml())}


def announce_hardware(message: Mapping[str, Any] | None) -> None:
    """Passes a message to this process and those that it starts; None: there is none."""
    os.environ[_VARIABLE] = "" if message is None else json.dumps(message)


def inventory_seen_by_sweep(target: Target) -> Inventory | None:
    """What a target builds on the whole machine, where the sweep has announced that."""
    text = os.environ.get(_VARIABLE)
    message = json.loads(text) if text else None
    if not message or message["node"] != target.to_dict():
        return None
    return Inventory.from_dict(message["inventory"])
