"""Steps on a device that is made slower than it is."""

from __future__ import annotations

from typing import Any

from pytorch_lightning.strategies import SingleDeviceStrategy
from pytorch_lightning.strategies.strategy import Strategy
from pytorch_lightning.utilities.types import STEP_OUTPUT
from torch import Tensor
from typing_extensions import override

from sparsepipe.runtime.throttle import Throttle


class SlowedSteps(Strategy):
    """Whatever a step computes takes longer; what it computes stays as it is.

    An optimizer's step calls the training step and the backward pass in a closure: blocks within
    blocks, each of which pauses for itself.

    Attributes:
        throttle: of this rank's device.
    """

    throttle: Throttle

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        with self.throttle.slowed():
            return super().training_step(*args, **kwargs)

    @override
    def backward(self, *args: Any, **kwargs: Any) -> Tensor:
        with self.throttle.slowed():
            return super().backward(*args, **kwargs)

    @override
    def optimizer_step(self, *args: Any, **kwargs: Any) -> Any:
        with self.throttle.slowed():
            return super().optimizer_step(*args, **kwargs)

    @override
    def validation_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        with self.throttle.slowed():
            return super().validation_step(*args, **kwargs)

    @override
    def test_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        with self.throttle.slowed():
            return super().test_step(*args, **kwargs)

    @override
    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        with self.throttle.slowed():
            return super().predict_step(*args, **kwargs)


class SlowedDeviceStrategy(SlowedSteps, SingleDeviceStrategy):
    """Lightning's strategy of one CPU, slower.

    Args:
        slowdown: how many times slower than it is.
    """

    def __init__(self, *, slowdown: float) -> None:
        super().__init__(device="cpu")
        self.throttle = Throttle(slowdown)
