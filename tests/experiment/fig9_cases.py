"""Results of a small sweep of experiment=fig9, by hand."""

from __future__ import annotations

from typing import Any

from sparsepipe.experiment.fig9_jobs import Job

DEVICES = {
    5: "1 x TITAN V, 4 x RTX 2080 Ti",
    6: "1 x TITAN V, 1 x TITAN Xp, 4 x RTX 2080 Ti",
    7: "1 x TITAN V, 2 x TITAN Xp, 4 x RTX 2080 Ti",
    8: "1 x TITAN V, 3 x TITAN Xp, 4 x RTX 2080 Ti",
}


def job(strategy: str, gpus: int, task: str, result: dict[str, Any] | None, run: str = "") -> Job:
    choices = {"parallel": strategy, "hardware": f"paper_{gpus}gpu", "task": f"fig9/{task}"}
    if result is None:
        return Job(choices=choices, run=None, result={})
    told = {"hardware_devices": DEVICES[gpus], **result}
    return Job(choices=choices, run=run or f"out/{task}/{gpus}/{strategy}", result=told)


def simulated(
    strategy: str, gpus: int, minibatch_s: float, *, dp_s: float, apart_s: float | None = None,
    link: float = 125e6, plan: tuple[str, list[int]] = ("4-1", [24]), run: str = "",
) -> Job:  # fmt: skip
    """As task=simulate leaves it; ``apart_s`` is of DP without overlap."""
    told = {
        "kind": "simulated",
        "minibatches_per_s": 1 / minibatch_s,
        "dp_minibatch_s": dp_s,
        "task.link_bytes_per_s": link,
        "hardware.value.link.bytes_per_s": 125e6,
        "plan_config": plan[0],
        "plan_cuts": plan[1],
    }
    if apart_s is not None:
        told["dp_without_overlap_minibatch_s"] = apart_s
    return job(strategy, gpus, f"simulated_{link / 1e6:g}", told, run)


def emulated(
    strategy: str, gpus: int, minibatch_s: float, *,
    network: str = "namespaces", time_scale: float = 2.5, steady_steps: int = 10,
) -> Job:  # fmt: skip
    """As task=emulate leaves it; data parallelism has no plan."""
    plan = {} if strategy == "dp" else {"plan_config": "4-1", "plan_cuts": [24]}
    told = {
        "kind": "emulated",
        "minibatches_per_s": 1 / minibatch_s,
        "network": network,
        "time_scale": time_scale,
        "steady_steps": steady_steps,
        "link_bytes_per_s": 125e6,
        **plan,
    }
    return job(strategy, gpus, "emulated", told)
