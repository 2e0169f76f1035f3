"""What is said of a batch norm that is given nothing to take a variance of."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager

from torch.nn.modules.batchnorm import _BatchNorm

from sparsepipe.errors import ConfigError


@contextmanager
def naming_single_values(
    samples: int, *, parts: int, before_layers: bool = False
) -> Iterator[None]:
    """Says of a batch norm that has nothing to normalise by which microbatch is too small.

    Args:
        samples: of the microbatch.
        parts: of its minibatch.
        before_layers: what runs is a step up to its call of the layers, on the first stage of
            several, where batch norms go by microbatches alone.

    Raises:
        ConfigError: a norm of torch's own was given a single value of each channel.
    """
    try:
        yield
    except ValueError as error:
        if "more than 1 value per channel" not in str(error) or not _of_a_batch_norm(error):
            raise
        has = "has 1 sample" if samples == 1 else f"has {samples} samples"
        fewer = f"fewer microbatches than {parts}, or " if parts > 1 else ""
        there = "make it the first entry of the Sequential and " if before_layers else ""
        raise ConfigError(
            f"a batch norm is to normalise a microbatch that {has}, and sees a single value of "
            f"each channel in it, which has no variance ({error})",
            remedy=f"take {fewer}larger batches, so that each microbatch has more samples; where "
            "it is the epoch's last batch that is too small, leave it out (drop_last=True of the "
            f"loader, or trainer.limit_train_batches); or {there}set batch_norm=running, which "
            "ties no samples together",
        ) from error


def _of_a_batch_norm(error: BaseException) -> bool:
    """Whether it comes from a batch norm: torch says the same of group norms."""
    frames = traceback.walk_tb(error.__traceback__)
    return any(isinstance(frame.f_locals.get("self"), _BatchNorm) for frame, _ in frames)
