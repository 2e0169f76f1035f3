"""How ranks share the shapes, and how validation is carved out."""

from __future__ import annotations

import numpy as np
import pytest

from sparsepipe.data.dataloaders import EvalSampler, TrainSampler, split_validation
from sparsepipe.errors import ConfigError


def epoch_of(sampler: TrainSampler, epoch: int) -> list[int]:
    sampler.set_epoch(epoch)
    accesses = list(sampler)
    assert {seen for seen, _ in accesses} <= {epoch}
    assert len(accesses) == len(sampler)
    return [index for _, index in accesses]


@pytest.mark.parametrize(("size", "ranks"), [(12, 1), (12, 3), (13, 3), (14, 3), (2, 5)])
def test_training_covers_all_shapes_with_equal_ranks(size: int, ranks: int) -> None:
    parts = [
        epoch_of(TrainSampler(range(size), num_replicas=ranks, rank=rank, seed=1), 4)
        for rank in range(ranks)
    ]
    assert len({len(part) for part in parts}) == 1
    seen = np.bincount(np.concatenate(parts), minlength=size)
    assert seen.min() >= 1
    assert seen.sum() - size < ranks
    if ranks <= size:
        assert seen.max() <= 2


def test_the_order_depends_on_seed_and_epoch_but_not_on_ranks() -> None:
    def order(ranks: int, seed: int, epoch: int) -> list[int]:
        parts = [
            epoch_of(TrainSampler(range(24), num_replicas=ranks, rank=rank, seed=seed), epoch)
            for rank in range(ranks)
        ]
        return [index for step in zip(*parts, strict=True) for index in step]

    assert order(1, 0, 0) == order(2, 0, 0) == order(4, 0, 0)
    assert sorted(order(1, 0, 0)) == list(range(24))
    assert len({tuple(order(1, seed, epoch)) for seed in (0, 1) for epoch in (0, 1)}) == 4


@pytest.mark.parametrize(("size", "ranks"), [(10, 1), (10, 3), (4, 4)])
def test_evaluation_reads_each_shape_once(size: int, ranks: int) -> None:
    samplers = [EvalSampler(range(size), num_replicas=ranks, rank=rank) for rank in range(ranks)]
    for sampler in samplers:
        sampler.set_epoch(9)
    accesses = [access for sampler in samplers for access in sampler]
    assert sorted(accesses) == [(0, index) for index in range(size)]
    assert sum(len(sampler) for sampler in samplers) == size


def test_evaluation_needs_a_shape_for_each_rank() -> None:
    for rank in range(4):
        with pytest.raises(ConfigError, match="has 3 for") as error:
            EvalSampler(range(3), num_replicas=4, rank=rank)
        assert "at most 3" in error.value.remedy
    assert len(EvalSampler(range(0), num_replicas=4, rank=3)) == 0


def test_validation_takes_its_share_of_every_class() -> None:
    labels = np.repeat([0, 1, 2, 3], [100, 50, 4, 1])
    training, validation = split_validation(labels, share=0.1, seed=0)
    assert np.bincount(labels[validation], minlength=4).tolist() == [10, 5, 1, 0]
    assert sorted([*training, *validation]) == list(range(155))
    again = split_validation(labels, share=0.1, seed=0)[1]
    np.testing.assert_array_equal(validation, again)
    assert set(validation) != set(split_validation(labels, share=0.1, seed=1)[1])


def test_no_share_leaves_everything_to_training_and_a_large_one_something() -> None:
    labels = np.repeat([0, 1], [5, 2])
    training, validation = split_validation(labels, share=0.0, seed=0)
    assert (len(training), len(validation)) == (7, 0)
    training, _ = split_validation(labels, share=0.99, seed=0)
    assert np.bincount(labels[training]).tolist() == [1, 1]
