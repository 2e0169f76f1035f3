"""Data of several domains: what is read by whom, how often, and how domains differ."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from sparsepipe.data import CloudShift, DomainDataModule, DrawnDigits, ImageDataModule, ImageShift
from sparsepipe.data.augment import SHIFTS as CLOUD_SHIFTS
from sparsepipe.data.dataloaders import TrainSampler
from sparsepipe.data.images.shifts import SHIFTS as IMAGE_SHIFTS
from sparsepipe.domains import Placement, Roles
from sparsepipe.errors import ConfigError, DataError

SIZES = {"clean": 30, "noisy": 12, "inverted": 20}


def module(name: str, **more: Any) -> Any:
    kind = "none" if name == "clean" else name
    source = partial(DrawnDigits, train_images=SIZES[name], test_images=10, seed=len(name))
    shift = ImageShift(kind=kind, channels=3)
    return partial(ImageDataModule, source=source, shift=shift, num_workers=0, **more)


def domains(cache: Path, **more: Any) -> DomainDataModule:
    common = {"cache_dir": cache, "batch_size": 8, **more}
    return DomainDataModule({name: module(name) for name in SIZES}, common=common)


def ready(cache: Path, placement: Placement | None = None, rank: int = 0) -> DomainDataModule:
    data = domains(cache, val_share=0.2)
    data.prepare_data()
    if placement is not None:
        replica, replicas = placement.replica(rank)
        strategy = SimpleNamespace(domains=placement.domains_of(rank), placement=placement)
        kwargs = {"num_replicas": replicas, "rank": replica}
        data.trainer = SimpleNamespace(strategy=strategy, distributed_sampler_kwargs=kwargs)  # type: ignore[assignment]
    data.setup()
    return data


def read(data: DomainDataModule) -> list[dict[str, Any]]:
    """As the strategy gives minibatches to the module: without domains that there is nothing of."""
    batches = (batch for batch, *_ in data.train_dataloader())
    return [{name: each for name, each in batch.items() if each} for batch in batches]


@pytest.mark.parametrize(("ranks", "roles"), [(2, "equal"), (3, "separate"), (4, "separate")])
def test_all_ranks_have_as_many_loaders(tmp_path: Path, ranks: int, roles: Roles) -> None:
    placement = Placement(tuple(SIZES), ranks, roles)
    loaders = [ready(tmp_path, placement, rank).train_dataloader() for rank in range(ranks)]
    assert len({len(each.flattened) for each in loaders}) == 1
    assert len({len(each) for loader in loaders for each in loader.flattened}) == 1
    for rank, loader in enumerate(loaders):  # no domain is replaced: its name would be a word
        assert all(" " in name for name in {*loader.iterables} - {*placement.domains_of(rank)})


def test_an_epoch_is_that_of_the_largest_domain(tmp_path: Path) -> None:
    data = ready(tmp_path)
    batches = read(data)
    assert [len(batch["clean"]["label"]) for batch in batches] == [8, 8, 4]
    for name in SIZES:
        seen = torch.cat([batch[name]["index"] for batch in batches]).tolist()
        size = data._domains[name].num_train
        assert len(seen) == data._domains["clean"].num_train == 20
        counts = [seen.count(index) for index in {*seen}]
        assert len(counts) == size
        assert max(counts) - min(counts) <= 1, "repetitions are spread evenly"
    assert batches[0]["clean"]["input"].shape == (8, 3, 28, 28)


def test_repetitions_have_other_orders() -> None:
    sampler = TrainSampler(range(10), seed=3, samples=25)
    sampler.set_epoch(4)
    read = list(sampler)
    assert len(read) == 25
    first, second = ([index for _, index in read[n : n + 10]] for n in (0, 10))
    assert sorted(first) == sorted(second) == list(range(10))
    assert first != second
    assert len({epoch for epoch, _ in read}) == 3, "augmentation differs as well"
    other = TrainSampler(range(10), seed=3, samples=25, stream=1)
    other.set_epoch(4)
    assert [index for _, index in other] != [index for _, index in read]


@pytest.mark.parametrize("ranks", [2, 3, 4, 5, 6])
def test_ranks_read_their_domains_in_step(tmp_path: Path, ranks: int) -> None:
    placement = Placement(tuple(SIZES), ranks)
    found = [read(ready(tmp_path, placement, rank)) for rank in range(ranks)]
    assert len({len(batches) for batches in found}) == 1, "all ranks make as many steps"
    for rank, batches in enumerate(found):
        assert all(tuple(batch) == placement.domains_of(rank) for batch in batches)
    for name in SIZES:
        rows = [
            torch.cat([batch[name]["index"] for batch in found[rank]]).tolist()
            for rank in placement.ranks_of(name)
        ]
        everything = {index for row in rows for index in row}
        assert len(everything) == ready(tmp_path)._domains[name].num_train, "nothing is left out"


def test_the_rank_of_the_losses_reads_nothing_as_often(tmp_path: Path) -> None:
    placement = Placement(tuple(SIZES), 4, "separate")
    others = read(ready(tmp_path, placement, 0))
    last = ready(tmp_path, placement, 3)
    assert read(last) == [{}] * len(others)
    assert list(last.val_dataloader()) == [{}]


def test_evaluations_name_the_domain_of_each_batch(tmp_path: Path) -> None:
    data = ready(tmp_path)
    names = [batch["domain"] for batch in data.test_dataloader()]
    assert names == [name for name in SIZES for _ in range(2)]
    assert len(data.test_dataloader()) == 6
    some = DomainDataModule(
        {name: module(name) for name in SIZES}, common={"cache_dir": tmp_path}, evaluated=["noisy"]
    )
    some.setup()
    assert {batch["domain"] for batch in some.test_dataloader()} == {"noisy"}
    assert some.val_dataloader() == []


def test_refusals(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="possible targets: none"):
        DomainDataModule({"clean": module("clean")}, common={"cache_dir": tmp_path})
    common = {"cache_dir": tmp_path}
    with pytest.raises(ConfigError, match="'moon'"):
        DomainDataModule({n: module(n) for n in SIZES}, common=common, evaluated=["moon"])
    with pytest.raises(ConfigError, match="builds a dict"):
        DomainDataModule({"a": dict, "b": dict})
    data = domains(tmp_path)
    data._domains["noisy"].classes = ("zero", "one")  # type: ignore[attr-defined]
    with pytest.raises(DataError, match="the domain noisy has the classes zero, one"):
        data.setup()
    empty = domains(tmp_path)
    split = empty._domains["noisy"]
    split.setup = lambda stage=None: None  # type: ignore[method-assign]
    with pytest.raises(DataError, match="the domain noisy has no training samples"):
        empty.setup()


@pytest.mark.parametrize("kind", IMAGE_SHIFTS)
def test_images_are_shifted_and_always_the_same(kind: str) -> None:
    image = np.zeros((1, 28, 28), np.float32)
    image[:, 7:18, 11:15] = 0.9
    shift = ImageShift(kind=kind, channels=3)
    found = shift(image, split=0, index=7)
    assert found.shape == (3, 28, 28)
    assert found.dtype == np.float32
    assert 0 <= found.min() <= found.max() <= 1
    assert np.array_equal(found, ImageShift(kind=kind, channels=3)(image, split=0, index=7))
    assert (np.abs(found - image).mean() > 0.01) == (kind != "none")
    drawn = kind in ("noisy", "blended", "coloured", "slanted")
    assert (not np.array_equal(found, shift(image, split=0, index=8))) == drawn


@pytest.mark.parametrize("kind", CLOUD_SHIFTS)
def test_clouds_are_shifted_and_always_the_same(kind: str) -> None:
    rng = np.random.default_rng(0)
    points = rng.standard_normal((4000, 3))
    sphere = (points / np.linalg.norm(points, axis=1, keepdims=True)).astype(np.float32)
    box = sphere * np.float32([1.0, 2.0, 3.0])
    found = CloudShift(kind=kind)(box, up_axis="z", key=(0, 3))
    assert found.dtype == np.float32
    assert np.array_equal(found, CloudShift(kind=kind)(box, up_axis="z", key=(0, 3)))
    share = len(found) / len(box)
    low, high = {
        "none": (1, 1),
        "partial": (0.3, 0.8),
        "noisy": (1.02, 1.04),
        "occluded": (0.5, 0.97),
        "density": (0.15, 0.6),
        "rotated": (1, 1),
    }[kind]
    assert low <= share <= high, share
    if kind == "rotated":
        mine, theirs = (np.linalg.norm(each, axis=1) for each in (found, box))
        assert np.allclose(mine, theirs, atol=1e-4), "distances stay"
        assert not np.allclose(found, box, atol=0.1)


def test_what_is_seen_from_one_side_is_the_near_side() -> None:
    """Of a sphere one half, and little of the other beside the rim."""
    rng = np.random.default_rng(1)
    points = rng.standard_normal((6000, 3))
    sphere = (points / np.linalg.norm(points, axis=1, keepdims=True)).astype(np.float32)
    seen = CloudShift(kind="partial")(sphere, up_axis="z", key=(1,))
    middle = seen.mean(0) / np.linalg.norm(seen.mean(0))
    assert (seen @ middle < -0.6).sum() < 0.02 * (sphere @ middle < -0.6).sum()
    assert (seen @ middle > 0.6).sum() > 0.95 * (sphere @ middle > 0.6).sum()


@pytest.mark.parametrize("make", [ImageShift, CloudShift])
def test_shifts_are_checked(make: Any) -> None:
    with pytest.raises(ConfigError, match="melted"):
        make(kind="melted")
