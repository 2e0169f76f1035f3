"""Which report a sweep ends in."""

from __future__ import annotations

from omegaconf import DictConfig, OmegaConf


def exhibit_of(config: DictConfig) -> str | None:
    """The experiment of a sweep that ends in a report, which is one of the paper's; else None."""
    experiment = OmegaConf.select(config, "hydra.runtime.choices.experiment")
    if experiment is None:
        return None
    from sparsepipe.results.report.exhibits import EXHIBITS

    return str(experiment) if experiment in EXHIBITS else None
