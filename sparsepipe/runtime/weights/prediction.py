"""SpecTrain's prediction of weights from the momentum of SGD.

After the idea of Chen, Yang and Cheng, "Efficient and Robust Parallel DNN Training through Model
Parallelism on Multi-GPU Platform": w - s * lr * v, where v is the smoothed gradient and s the
number of updates to look ahead. lr is the learning rate at the time of the prediction, which in a
forward is that of the step that brings the minibatch.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from sparsepipe.errors import ConfigError

_REMEDY = (
    "train with torch.optim.SGD and a momentum above 0, or choose weight stashing, which "
    "works with every optimizer"
)


class Predictor:
    """Looks some updates ahead.

    v is SGD's momentum buffer. If gradients stayed as they are, every later step would be
    lr * v, whatever ``dampening``, ``nesterov``, ``weight_decay`` and ``maximize`` are, so
    these may be anything. The prediction takes v to stay as it is.

    Raises:
        ConfigError: an optimizer other than SGD with momentum.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], optimizer: Optimizer | None) -> None:
        self._parameters = dict(parameters)
        if optimizer is not None:
            _check(optimizer)
        else:
            learns = any(parameter.requires_grad for parameter in self._parameters.values())
            assert not learns, "parameters that learn have an optimizer"
        self._optimizer = optimizer

    @torch.no_grad()
    def into(self, buffers: Mapping[str, Tensor], *, updates: int) -> None:
        """Writes the weights expected after ``updates`` more updates to ``buffers``.

        They are the present weights, bit for bit, where nothing is known of the next steps:
        before the first one, or for ``updates`` = 0. Each element is rounded as SGD's own
        step is: ``torch.add(w, v, alpha=-updates * lr)``.
        """
        assert updates >= 0, updates
        groups = [] if self._optimizer is None else self._optimizer.param_groups
        rates = {id(p): float(group["lr"]) for group in groups for p in group["params"]}
        for name, buffer in buffers.items():
            parameter = self._parameters[name]
            velocity = self._velocity(parameter)
            if velocity is None or updates == 0:
                buffer.copy_(parameter.data)
            else:
                alpha = -updates * rates[id(parameter)]
                torch.add(parameter.data, velocity, alpha=alpha, out=buffer)

    def _velocity(self, parameter: nn.Parameter) -> Tensor | None:
        if self._optimizer is None:
            return None
        # Not by index: the state is a defaultdict, which would make an entry.
        state = self._optimizer.state.get(parameter, {})
        velocity: Tensor | None = state.get("momentum_buffer")
        return velocity


def _check(optimizer: Optimizer) -> None:
    # A class derived from SGD may take other steps.
    if type(optimizer) is not SGD:
        raise ConfigError(
            f"SpecTrain predicts the steps of SGD with momentum, not of {type(optimizer).__name__}",
            remedy=_REMEDY,
        )
    for number, group in enumerate(optimizer.param_groups):
        if not group["momentum"] > 0:
            raise ConfigError(
                f"SpecTrain predicts from the momentum, which is {group['momentum']} in the "
                f"optimizer's group {number}",
                remedy=_REMEDY,
            )
