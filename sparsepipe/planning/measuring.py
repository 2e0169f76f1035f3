"""Runs that measure the profiles and the bandwidth that a training lacks, before it begins.

Such a run's identity covers only what matters to its measurement, so that a later training of the
same model on the same hardware finds it finished, with any seed, learning rate or search.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from sparsepipe.config.compose import config_dir
from sparsepipe.config.run_spec import RunSpec
from sparsepipe.config.schema import Loss, Measuring
from sparsepipe.errors import SparsePipeError
from sparsepipe.planning.device_profiles import dtype_of
from sparsepipe.profiling import Profile
from sparsepipe.runs.rundir import RunDir
from sparsepipe.utils import reading
from sparsepipe.utils.files import read_mapping

log = logging.getLogger(__name__)

_MESSAGES = {"sizes_bytes": [2**20, 2**23], "repeats": 5, "warmups": 1, "most_s": 1.0}
"""Settings of ``task=bandwidth``: messages as large as activations, timed briefly."""
_WAIT_S = 7200.0
"""Longest wait, in seconds, for another process that measures the same; as for a data cache."""
RunJob = Callable[..., RunDir]
"""Runs a configuration's job; a function of ``launch/``, which this package may not import."""
_KEYS = {
    r"\btask\.(num_warmup|num_measured|num_batches)\b": r"parallel.search.measure.\1",
    r"\btask\.(layers|direct|microbatches)\b": r"parallel.strategy.\1",
}
"""Keys of the runs that measure, and the corresponding keys of a training."""


def measure_devices(
    names: Sequence[str], spec: RunSpec, how: Measuring, *, run_job: RunJob
) -> dict[str, tuple[Profile, Path]]:
    """Returns, by name, a profile of each device, and its file, from this or an earlier run."""
    found = {}
    if names and (dtype := dtype_of(spec)) != "float32":
        log.warning("layers are measured in float32, but trained in %s", dtype)
    for name in names:
        log.info("no profile of %s is given: measuring it, unless an earlier run has", name)
        run = _run_measurement(profile_spec(spec, name, how), run_job, what=name)
        path = run.path / "profile.json"
        log.info("profile of %s: %s", name, path)
        found[name] = (Profile.load(path), path)
    return found


def profile_spec(spec: RunSpec, device: str, how: Measuring) -> RunSpec:
    """Configures a run that measures ``device``, keeping only settings that affect the result.

    With microbatches, layers are measured on those that a single device would cut a batch into.
    """
    synchronous = spec.parallel.synchronous
    task = {
        **_group("task/profile"),
        **asdict(how),
        "microbatches": 1 if synchronous is None else synchronous.microbatches,
        "layers": spec.parallel.argument("layers"),
        "device": device,
        "for_plan": True,
    }
    return _measuring_run(spec, name="profiles").replace(
        {"trainer.precision": "32-true", "task": task},
        data=spec.data.replace(seed=0) if "seed" in spec.data.arguments else spec.data,
    )


def measure_link(spec: RunSpec, *, run_job: RunJob) -> tuple[float, Path]:
    """Returns the bandwidth between this machine's devices in bytes/s, and its file."""
    log.info("no bandwidth is given: measuring it, unless an earlier run has")
    path = _run_measurement(link_spec(spec), run_job, what="the link").path / "bandwidth.json"
    (link,) = read_mapping(path, hosts=reading.mapping)["hosts"].values()
    bytes_per_s = float(link["bytes_per_s"])
    log.info("bandwidth %.4g MB/s: %s", bytes_per_s / 1e6, path)
    return bytes_per_s, path


def link_spec(spec: RunSpec) -> RunSpec:
    """Configures a run that times messages between all devices; the same one for any model."""
    direct = spec.parallel.argument("direct", False)
    task = {**_group("task/bandwidth"), **_MESSAGES, "direct": direct}
    strategy = spec.parallel.strategy  # for its backend
    return (
        _measuring_run(spec, name="links")
        .replace({"parallel.strategy": strategy, "task": task, "representation": "sparse"})
        .without("model", "data", "backend", "optim", "trainer")
    )


def _measuring_run(spec: RunSpec, *, name: str) -> RunSpec:
    return spec.replace(
        name=name,
        seed=0,
        checkpoint=None,
        callbacks={},
        logger={},
        loss=Loss(),
        parallel=_group("parallel/single"),
    )


def _group(name: str) -> dict[str, Any]:
    value = OmegaConf.to_container(OmegaConf.load(config_dir() / f"{name}.yaml"))
    assert isinstance(value, dict)
    return {str(key): item for key, item in value.items()}


def _run_measurement(spec: RunSpec, run_job: RunJob, *, what: str) -> RunDir:
    try:
        return run_job(spec, fresh_processes=True, wait_s=_WAIT_S)
    except SparsePipeError as error:
        for inner, outer in _KEYS.items():
            error.message = re.sub(inner, outer, error.message)
            error.remedy = re.sub(inner, outer, error.remedy)
        # A message about any other exception begins with a traceback and ends with its text.
        trace, line, message = error.message.rpartition("\n")
        if not trace.startswith("Traceback"):
            trace, line, message = "", "", error.message
        error.message = f"{trace}{line}while measuring {what}: {message}"
        raise
