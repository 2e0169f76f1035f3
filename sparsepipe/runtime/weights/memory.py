"""The sets of weights in memory: what the parameters hold, and copies beside it."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn


class Memory:
    """Makes copies of the weights, counts them and uses their memory again.

    Only parameters that require a gradient are copied: nobody updates the others.

    Args:
        parameters: by name, each once.

    Attributes:
        parameters: the same.
        copies: sets in use beside the one that the parameters hold.
        peak_versions: most sets that were in use at a time, the parameters' own included.
        segment_peak: the same since :meth:`restart`.
        peak_bytes: most bytes that were; as what is freed is used again, it is also all that
            was ever taken.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter]) -> None:
        self.parameters = dict(parameters)
        distinct = {id(parameter) for parameter in self.parameters.values()}
        assert len(distinct) == len(self.parameters), "a parameter goes by one name"
        self.copies = 0
        self.peak_versions = self.segment_peak = 1
        self._bytes = self.peak_bytes = sum(p.nbytes for p in self.parameters.values())
        self._free: dict[str, list[Tensor]] = {name: [] for name in self.parameters}

    def take(self) -> dict[str, Tensor]:
        """Memory for one more set; its values are undefined."""
        taken = {}
        for name, parameter in self.parameters.items():
            if parameter.requires_grad:
                free = self._free[name]
                taken[name] = free.pop() if free else torch.empty_like(parameter.data)
        self.copies += 1
        self._bytes += _bytes_of(taken)
        self.segment_peak = max(self.segment_peak, 1 + self.copies)
        self.peak_versions = max(self.peak_versions, self.segment_peak)
        self.peak_bytes = max(self.peak_bytes, self._bytes)
        return taken

    def move(self) -> dict[str, Tensor]:
        """Lets the parameters go on in other memory; what they leave behind keeps its values.

        It is the parameters that move, since graphs hold views of the old memory that could
        not be moved.
        """
        left = {}
        for name, buffer in self.take().items():
            parameter = self.parameters[name]
            left[name] = parameter.data
            buffer.copy_(parameter.data)
            parameter.data = buffer
        return left

    def give_back(self, tensors: Mapping[str, Tensor]) -> None:
        """Frees a set from :meth:`take` or :meth:`move` for the next one."""
        assert self.copies > 0
        self.copies -= 1
        self._bytes -= _bytes_of(tensors)
        for name, tensor in tensors.items():
            self._free[name].append(tensor)

    def restart(self) -> None:
        """Counts the sets of a new segment."""
        self.segment_peak = 1 + self.copies


def _bytes_of(tensors: Mapping[str, Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors.values())
