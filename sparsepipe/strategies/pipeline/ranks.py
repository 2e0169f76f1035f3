"""Ranks in stages, as Lightning sees them: which of them read batches, and how they evaluate."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytorch_lightning as pl
from lightning_fabric.plugins.environments.cluster_environment import ClusterEnvironment
from pytorch_lightning.utilities.types import STEP_OUTPUT
from typing_extensions import override

from sparsepipe.errors import ConfigError
from sparsepipe.runtime.collectives import process_group
from sparsepipe.runtime.failures.missing_ranks import set_rank_names
from sparsepipe.schedule.plan import devices_of
from sparsepipe.strategies import trainer_internals as internals
from sparsepipe.strategies.distributed import RankedStrategy, RankEnvironment
from sparsepipe.strategies.pipeline.dataloaders import Lengths, is_elsewhere, repeat_nothing
from sparsepipe.strategies.pipeline.pipeline import Pipeline
from sparsepipe.strategies.pipeline.stage_plan import Grids, parse_config


class EvaluationProgress:
    """Counts the batches of an evaluation, loader after loader."""

    def __init__(self) -> None:
        self._loader = 0
        self._batch = 0

    def begin(self) -> None:
        self._loader = self._batch = 0

    def place(self, loop: Any) -> tuple[list[Any], int]:
        """Loaders of the running batch, and its number in them."""
        loaders = internals.loaders_of(loop)
        if not internals.reads_in_turn(loop):
            return loaders, self._batch
        while loop.max_batches[self._loader] == 0:
            self._loader += 1
        return [loaders[self._loader]], self._batch

    def advance(self, loop: Any) -> bool:
        """Counts a batch; whether it was the last of its loader."""
        self._batch += 1
        last = internals.has_read_all(loop)
        if internals.reads_in_turn(loop) and self._batch >= loop.max_batches[self._loader]:
            self._loader, self._batch, last = self._loader + 1, 0, True
        return last


class StagedRanks(RankedStrategy):
    """A strategy whose first ranks read batches."""

    def __init__(
        self,
        *,
        config: str | None,
        grids: Grids | None,
        timeout_s: float,
        process_group_backend: str | None,
        slowdown: float,
        cluster_environment: ClusterEnvironment | None,
    ) -> None:
        super().__init__(
            slowdown=slowdown,
            cluster_environment=cluster_environment or RankEnvironment(),
            process_group_backend=process_group_backend or "gloo",
            timeout_s=timeout_s,
        )
        self._config, self._grids = config, grids
        self._lengths: Lengths | None = None
        self._adapted: pl.Trainer | None = None

    @property
    def replicas(self) -> tuple[int, ...]:
        return parse_config(self._config, ranks=self.world_size, grids=self._grids)

    @property
    def reader(self) -> int | None:
        """Which replica of stage 0 this rank is; None elsewhere."""
        return self.global_rank if self.global_rank < self.replicas[0] else None

    @property
    @override
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        return {"num_replicas": self.replicas[0], "rank": self.reader or 0}

    @override
    def setup_distributed(self) -> None:
        # Unlike DDP, no seed is set again: draws go on where the script left them, as on
        # one device.
        self.set_world_ranks()
        if self.world_size > 1:  # a single rank has no group to join
            self.join()
        if process_group.world_size() != self.world_size:
            raise ConfigError(
                f"{self.world_size} devices are configured, {process_group.world_size()} ranks run",
                remedy="start as many ranks as the Trainer has devices",
            )
        sizes = devices_of(self.replicas, self._grids)
        stages = [stage for stage, size in enumerate(sizes) for _ in range(size)]
        set_rank_names(lambda rank: f"rank {rank} (stage {stages[rank]})")

    def begin_reading(self) -> None:
        self._lengths = Lengths(readers=self.replicas[0], reader=self.reader)
        if self.replicas[0] > 1:
            assert self.lightning_module is not None
            self._adapted = self.lightning_module.trainer
            internals.adapt_evaluation_samplers(self._adapted, repeat_nothing)

    def end_reading(self) -> None:
        self._lengths = None
        if self._adapted is not None:
            internals.restore_evaluation_samplers(self._adapted)
            self._adapted = None

    @override
    def process_dataloader(self, dataloader: object) -> object:
        assert self._lengths is not None
        return self._lengths.adapt(dataloader) if self.world_size > 1 else dataloader

    def count_minibatches(self, loaders: Sequence[Any], batch_idx: int, batch: Any) -> int:
        """Minibatches of a step's round.

        Raises:
            ConfigError: a loader yields fewer batches than its length.
        """
        assert self._lengths is not None
        if self.world_size == 1:
            return 1
        count = self._lengths.count(loaders, batch_idx)
        if self.reader is not None and self.reader < count and is_elsewhere(batch):
            raise ConfigError(
                f"the loader ended before batch {batch_idx + 1}, which its length promises",
                remedy="correct the length of the data set or of its sampler",
            )
        return count


class PipelinedEvaluation(StagedRanks):
    """Batches stream through the stages; what they logged is known after a loader's last.

    Predictions do not stream: a rank that reads has the answer to each batch before it begins
    its next one, so that there are no more on their way than ranks that read.

    Where there is no pipeline, a single rank evaluates as a plain Trainer.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._pipeline: Pipeline | None = None
        self._progress = EvaluationProgress()

    @property
    def pipeline(self) -> Pipeline | None:
        """This rank's pipeline; None where a single rank trains as a plain Trainer."""
        return self._pipeline

    @property
    def _trainer(self) -> pl.Trainer:
        assert self.lightning_module is not None
        return self.lightning_module.trainer

    @override
    def on_validation_start(self) -> None:
        self._progress.begin()

    @override
    def on_test_start(self) -> None:
        self._progress.begin()

    @override
    def on_predict_start(self) -> None:
        self._progress.begin()

    @override
    def validation_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        return self._evaluation_step("validation_step", *args, **kwargs)

    @override
    def test_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        return self._evaluation_step("test_step", *args, **kwargs)

    def _evaluation_step(self, hook: str, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        pipeline = self._pipeline
        if pipeline is None:
            return getattr(super(), hook)(*args, **kwargs)  # type: ignore[no-any-return]
        batch, *arguments = (*args, *kwargs.values())
        loop = internals.evaluation_loop(self._trainer)
        count = self.count_minibatches(*self._progress.place(loop), batch)
        pipeline.evaluate(hook, batch, tuple(arguments), count=count)
        if self._progress.advance(loop):
            pipeline.end_evaluation(hook)
        return None

    @override
    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        pipeline = self._pipeline
        if pipeline is None:
            return super().predict_step(*args, **kwargs)
        batch, *arguments = (*args, *kwargs.values())
        loop = self._trainer.predict_loop
        count = self.count_minibatches(*self._progress.place(loop), batch)
        result = pipeline.predict("predict_step", batch, tuple(arguments), count=count)
        if self._progress.advance(loop):
            pipeline.worker.end_evaluation()
        return result
