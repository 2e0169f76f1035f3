"""How the stages of a synchronous pipeline work, where they are still to be found."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from sparsepipe.partition.microbatches import Microbatches
from sparsepipe.partition.recompute.layers import OwnSpans, Setting, recomputed_spans
from sparsepipe.schedule import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class SynchronousStages:
    """Microbatches, and which layers a stage runs once more, wherever it begins and ends.

    Args:
        setting: that was checked; ``auto``: of each stage the layers that cost least time of those
            with which it fits its devices.
        microbatches: of a minibatch.
        batch_share: size of the batch over that of the profiles'; for asking what would fit.
    """

    setting: Setting
    microbatches: Microbatches
    batch_share: float = 1.0

    @property
    def recomputes(self) -> bool:
        """Whether some layers may run once more."""
        if isinstance(self.setting, Mapping):
            return any(self.setting.values())
        return self.setting != "none"

    @property
    def is_automatic(self) -> bool:
        """Whether the memory of the devices decides."""
        return self.setting == "auto"

    @property
    def stages_told(self) -> int:
        """How many of the first stages have to be told apart, since some are named."""
        return max(self._stages, default=-1) + 1

    def with_batch(self, share: int) -> SynchronousStages:
        """The same of a batch of so small a share of the size, for asking what would fit.

        Where its samples are known, one is left at least: none is cut.
        """
        size = self.microbatches.batch_size
        if size is None:
            return replace(self, batch_share=self.batch_share / share)
        fewer = max(1, size // share)
        smaller = replace(self.microbatches, batch_size=fewer)
        return replace(self, microbatches=smaller, batch_share=self.batch_share * fewer / size)

    def is_whole(self, stage: int) -> bool:
        """Whether a stage is one span by the setting.

        Args:
            stage: its number; one that is not told apart has any from :attr:`stages_told` on.
        """
        return self.setting == "all" or stage in self._stages

    def spans(self, num_layers: int) -> OwnSpans:
        """Of the layers that are named, whatever the stages; those are cut where these end.

        Args:
            num_layers: of the model.

        Raises:
            ConfigError: the model has no such layers.
        """
        if not isinstance(self.setting, Mapping):
            return ()
        whole = Plan.of(config="1", cuts=(), num_layers=num_layers)
        (spans,) = recomputed_spans({"layers": self.setting.get("layers", [])}, whole)
        return spans

    @property
    def _stages(self) -> frozenset[int]:
        named = self.setting.get("stages", []) if isinstance(self.setting, Mapping) else []
        return frozenset(named)
