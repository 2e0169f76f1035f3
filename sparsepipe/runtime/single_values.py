"""What is said of a batch norm that is given nothing to take a variance of."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from sparsepipe.errors import ConfigError


@contextmanager
def naming_single_values(samples: int, *, parts: int) -> Iterator[None]:
    """Says of a batch norm that has nothing to normalise by which microbatch is too small.

    Args:
        samples: of the microbatch.
        parts: of its minibatch.

    Raises:
        ConfigError: a norm of torch's own was given a single value of each channel.
    """
    try:
        yield
    except ValueError as error:
        if "more than 1 value per channel" not in str(error):
            raise
        has = "has 1 sample" if samples == 1 else f"has {samples} samples"
        fewer = f"fewer microbatches than {parts}, or " if parts > 1 else ""
        raise ConfigError(
            f"a batch norm is to normalise a microbatch that {has}, and sees a single value of "
            f"each channel in it, which has no variance ({error})",
            remedy=f"take {fewer}larger batches, so that each microbatch has more samples; where "
            "it is the epoch's last batch that is too small, leave it out (drop_last=True of the "
            "loader, or trainer.limit_train_batches); or set batch_norm=running, which ties no "
            "samples together",
        ) from error
