"""How many batches a training takes, as far as its settings say."""

from __future__ import annotations

from sparsepipe.config.schema import TrainerArguments


def batches_of_training(trainer: TrainerArguments, loaded: int) -> int | None:
    """Batches of a whole training; None where its settings give it no end.

    Args:
        trainer: the arguments of Lightning's Trainer.
        loaded: batches of the training split.
    """
    epoch = _limited(loaded, trainer.overfit_batches or trainer.limit_train_batches)
    accumulated = int(trainer.accumulate_grad_batches)
    max_epochs, max_steps = trainer.max_epochs or -1, int(trainer.max_steps)
    ends = []
    if max_epochs >= 0:
        ends.append(max_epochs * epoch)
    if max_steps >= 0:
        # An epoch's last step takes what is left of it.
        epochs, steps = divmod(max_steps, max(1, -(-epoch // accumulated)))
        ends.append(epochs * epoch + steps * accumulated)
    return min(ends) if ends and min(ends) > 0 else None


def _limited(loaded: int, limit: float | None) -> int:
    """As Lightning counts: whole numbers are batches, fractions shares of the epoch."""
    if limit is None:
        return loaded
    return min(loaded, limit) if isinstance(limit, int) else int(loaded * limit)
