"""What a job that may use a part of a machine is told of the whole.

It would find out that part, and a run is named by all of it. The configuration stays as it was
asked for, which result files and trackers have: what is told goes beside it, from process to
process in an environment variable.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

import yaml

from sparsepipe.cluster import Inventory

_VARIABLE = "SPARSEPIPE_HARDWARE"
"""Environment variable: a node of the group ``hardware`` and what that is, as JSON."""


def telling(node: Mapping[str, Any], inventory: Inventory) -> dict[str, Any]:
    """What to tell: of plain values.

    Args:
        node: that builds the inventory.
        inventory: what it builds where all of the machine is seen.
    """
    return {"node": dict(node), "inventory": yaml.safe_load(inventory.to_yaml())}


def tell(told: Mapping[str, Any] | None) -> None:
    """Lets this process and those that it starts know; None: that there is nothing to know."""
    os.environ[_VARIABLE] = "" if told is None else json.dumps(told)


def told_of(node: Mapping[str, Any]) -> Inventory | None:
    """What a node is, where this process has been told so."""
    text = os.environ.get(_VARIABLE)
    told = json.loads(text) if text else None
    return Inventory.from_dict(told["inventory"]) if told and told["node"] == node else None
