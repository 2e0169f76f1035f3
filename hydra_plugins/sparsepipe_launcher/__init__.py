"""Registers the launcher of SparsePipe's sweeps with Hydra: ``hydra/launcher=sparsepipe``.

Hydra imports this at the start of every program in the environment, so it imports little itself.
It does so before the module is in ``sys.modules``, where dataclasses would look up annotations that
are text: there is no ``from __future__ import annotations`` here.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from hydra.core.config_store import ConfigStore
from hydra.core.utils import JobReturn
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig


@dataclass
class SparsePipeLauncherConf:
    """``hydra.launcher``."""

    _target_: str = "hydra_plugins.sparsepipe_launcher.SparsePipeLauncher"
    max_jobs: int | None = None
    cores_per_rank: int | None = None
    job_limit_s: float | None = None
    wait_limit_s: float | None = 86_400.0


class SparsePipeLauncher(Launcher):
    """Runs each job in processes of its own, several at a time if they fit on the machine.

    Args:
        max_jobs: most jobs at a time; None: as many as there are cores and GPUs for.
        cores_per_rank: cores for each process of a job; None: a job without GPUs takes all cores.
        job_limit_s: longest time of a job in seconds, waits included; None: no limit.
        wait_limit_s: longest wait of a job, in seconds, for another process that works on the same
            run; None: no limit.
    """

    def __init__(
        self,
        max_jobs: int | None = None,
        cores_per_rank: int | None = None,
        job_limit_s: float | None = None,
        wait_limit_s: float | None = 86_400.0,
    ) -> None:
        super().__init__()
        self._settings = {
            "max_jobs": max_jobs,
            "cores_per_rank": cores_per_rank,
            "job_limit_s": job_limit_s,
            "wait_limit_s": wait_limit_s,
        }
        self._config: DictConfig | None = None
        self._context: HydraContext | None = None

    def setup(
        self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig
    ) -> None:
        """Keeps the configuration and context; jobs run the configuration's task themselves."""
        del task_function
        self._config, self._context = config, hydra_context

    def launch(
        self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int
    ) -> Sequence[JobReturn]:
        """Runs jobs and waits for all of them."""
        from sparsepipe.sweep.launch import launch
        from sparsepipe.sweep.slots import Settings

        assert self._config is not None
        assert self._context is not None
        settings = Settings(**self._settings)  # type: ignore[arg-type]
        return launch(
            self._config, self._context, job_overrides, first=initial_job_idx, settings=settings
        )


ConfigStore.instance().store(
    group="hydra/launcher",
    name="sparsepipe",
    node=SparsePipeLauncherConf,
    provider="sparsepipe_launcher",
)
