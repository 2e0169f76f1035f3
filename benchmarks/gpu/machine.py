"""What the figures of the GPU kit were taken on."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from collections.abc import Mapping
from importlib import metadata
from typing import Any

import torch

from sparsepipe.utils.host import git_commit

_IDENTITY = ("device", "driver", "torch", "cuda", "triton", "commit")
"""Figures of machines that differ in one of these are not set beside each other as one record."""


def at_hand() -> dict[str, Any]:
    """Device and versions; ``device`` is None where there is no CUDA device."""
    found: dict[str, Any] = {"device": None}
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        found = {
            "device": properties.name,
            "driver": _driver_version(),
            "devices": torch.cuda.device_count(),
            "capability": f"{properties.major}.{properties.minor}",
            "memory_bytes": properties.total_memory,
            "multiprocessors": properties.multi_processor_count,
        }
    return {
        **found,
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "triton": _version_of("triton"),
        "system": f"{platform.system()} {platform.machine()}",
        "commit": git_commit(),
    }


def _driver_version() -> str | None:
    """Of the NVIDIA driver; None where ``nvidia-smi`` does not tell it."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        ran = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return ran.stdout.split("\n", maxsplit=1)[0].strip() or None


def unlike(one: Mapping[str, Any], other: Mapping[str, Any]) -> str:
    """The first thing in which two machines differ that matters; empty where none does."""
    return next((key for key in _IDENTITY if one.get(key) != other.get(key)), "")


def _version_of(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


if __name__ == "__main__":
    print(json.dumps(at_hand()))
