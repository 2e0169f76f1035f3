"""Minibatches cut into microbatches: what each part holds, and what cannot be cut."""

from __future__ import annotations

import collections
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from sparsepipe.errors import ConfigError
from sparsepipe.runtime.microbatches import split
from sparsepipe.sparse import sparse_collate

Pair = collections.namedtuple("Pair", ["image", "label"])


def sites(samples: int, *, seed: int = 0) -> list[tuple[Tensor, Tensor]]:
    """Some sites for each sample, none for every third."""
    draw = torch.Generator().manual_seed(seed)
    found = []
    for number in range(samples):
        count = 0 if number % 3 == 2 else 2 + number
        coords = torch.unique(torch.randint(6, (count, 3), generator=draw), dim=0)
        found.append((coords, torch.randn(len(coords), 2, generator=draw)))
    return found


@pytest.mark.parametrize("samples", [1, 2, 7, 8, 17])
@pytest.mark.parametrize("parts", [2, 3, 4, 8])
def test_parts_are_those_of_tensor_split(samples: int, parts: int) -> None:
    x, y = torch.randn(samples, 3), torch.arange(samples)
    found = split({"x": x, "more": [y]}, parts)
    expected = torch.tensor_split(torch.arange(samples), parts)
    assert [part.samples for part in found] == [len(rows) for rows in expected]
    for part, rows in zip(found, expected, strict=True):
        if not len(rows):
            assert part.batch is None
            continue
        assert torch.equal(part.batch["x"], x[rows])
        assert torch.equal(part.batch["more"][0], y[rows])


@pytest.mark.parametrize("parts", [2, 3, 5, 9])
def test_sparse_tensors_are_cut_by_sample_and_not_by_row(parts: int) -> None:
    samples = sites(7)
    labels = torch.arange(7)
    whole = sparse_collate(samples, spatial_shape=(6, 6, 6))
    found = split((whole, labels), parts)
    for part, numbers in zip(found, torch.tensor_split(labels, parts), strict=True):
        assert part.samples == len(numbers)
        if not part.samples:
            assert part.batch is None
            continue
        x, y = part.batch
        alone = sparse_collate([samples[i] for i in numbers.tolist()], spatial_shape=(6, 6, 6))
        assert torch.equal(y, numbers)
        assert torch.equal(x.coords, alone.coords)
        assert torch.equal(x.feats, alone.feats)
        assert (x.batch_size, x.spatial_shape, x.stride) == (
            (alone.batch_size, alone.spatial_shape, alone.stride)
        )
        x.check()


def test_values_without_samples_are_in_every_part() -> None:
    batch = Pair(
        image={"x": torch.arange(12.0).view(4, 3), "scale": torch.tensor(3.0), "names": [*"abcd"]},
        label=[np.arange(4), ("e", "f", "g", "h"), "text", None, 7, ["a", "b"]],
    )
    first, second = split(batch, 2)
    assert isinstance(second.batch, Pair)
    assert torch.equal(second.batch.image["x"], batch.image["x"][2:])
    assert second.batch.image["scale"] is batch.image["scale"]
    assert (first.batch.image["names"], second.batch.image["names"]) == ([*"ab"], [*"cd"])
    numbers, letters, text, none, seven, pair = second.batch.label
    assert numbers.tolist() == [2, 3]
    assert (letters, text, none, seven, pair) == (("g", "h"), "text", None, 7, ["a", "b"])


def test_a_step_may_write_to_its_part() -> None:
    """Without a word from autograd on what another part has saved."""
    first, second = split(torch.ones(4, 2), 2)
    weight = torch.ones(2, requires_grad=True)
    loss = (first.batch * weight).sum()
    second.batch.add_(1)
    loss.backward()
    assert torch.equal(weight.grad, torch.full((2,), 2.0))


@pytest.mark.parametrize(
    ("batch", "samples"),
    [(object(), 1), ((torch.zeros(3, 1), torch.zeros(2)), 1), (torch.zeros(5), 5)],
)
def test_a_single_part_is_the_batch_as_it_is(batch: Any, samples: int) -> None:
    (part,) = split(batch, 1)
    assert part.batch is batch
    assert part.samples == samples


@dataclass
class Unknown:
    x: Tensor


@pytest.mark.parametrize(
    ("batch", "named"),
    [
        ((torch.zeros(4, 2), torch.zeros(3)), [r"tensor \[0\] has 4", r"tensor \[1\] has 3"]),
        (
            {"x": sparse_collate(sites(3), spatial_shape=None), "y": torch.zeros(8)},
            [r"SparseTensor \['x'\] has 3", "has 8"],
        ),
        ([torch.tensor(1.0), "text"], ["no tensor"]),
        (torch.zeros(0, 3), ["no tensor"]),
        ((torch.zeros(4), Unknown(torch.zeros(4))), ["Unknown", "register_pytree_node"]),
    ],
)
def test_batches_that_cannot_be_cut_are_refused(batch: Any, named: list[str]) -> None:
    with pytest.raises(ConfigError) as refused:
        split(batch, 2)
    for words in named:
        refused.match(words)
    assert "collate" in refused.value.remedy
