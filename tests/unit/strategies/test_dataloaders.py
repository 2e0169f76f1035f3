"""Every rank walks through as many steps, and readers together evaluate each sample once."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from pytorch_lightning.utilities.data import extract_batch_size
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    SequentialSampler,
    SubsetRandomSampler,
)
from torchmetrics import CatMetric
from torchmetrics.classification import MulticlassAccuracy

from sparsepipe.errors import ConfigError
from sparsepipe.runtime.collectives import process_group
from sparsepipe.strategies.pipeline.dataloaders import (
    REMOTE_BATCH,
    Padded,
    RemoteBatch,
    adapt_loader,
    count_minibatches,
    is_remote,
)
from tests.support.pipeline_cases import BATCH, CLASSES, Net, pipeline_trainer, plain_trainer
from tests.support.processes import run


class Promises:
    """Says how long it is, and may be wrong."""

    def __init__(self, length: int, *, really: int | None = None) -> None:
        self.length, self.really = length, length if really is None else really

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.really))


def adapted(
    monkeypatch: pytest.MonkeyPatch, lengths: list[int], loader: Any, *, reader: int | None
) -> Any:
    """What a rank gets when the readers have so many batches, and one rank does not read."""
    said: list[tuple[int | None, int]] = [(None, 77), *enumerate(lengths)]
    monkeypatch.setattr(process_group, "gather_objects", lambda mine: said)
    return adapt_loader(loader, reader=reader)


def count(loaders: list[Any], step: int) -> int:
    return count_minibatches(loaders, step, None, reader=None)


@pytest.mark.parametrize("lengths", [[4], [4, 4], [4, 3], [4, 4, 3]])
def test_all_ranks_take_as_many_steps(monkeypatch: Any, lengths: list[int]) -> None:
    for reader in (None, *range(len(lengths))):
        length = 77 if reader is None else lengths[reader]
        loader = adapted(monkeypatch, lengths, Promises(length), reader=reader)
        batches = list(loader)
        assert len(batches) == len(loader) == 4
        real = 0 if reader is None else lengths[reader]
        assert batches == [*range(real), *[REMOTE_BATCH] * (4 - real)]
        counts = [count([loader], step) for step in range(4)]
        assert sum(counts) == sum(lengths)
        assert counts[:3] == [len(lengths)] * 3


def test_a_loader_that_suits_stays_as_it_is(monkeypatch: Any) -> None:
    loader = DataLoader(list(range(8)), batch_size=2)  # type: ignore[arg-type]
    assert adapted(monkeypatch, [4, 4], loader, reader=1) is loader
    padded = adapted(monkeypatch, [5, 4], loader, reader=1)
    assert isinstance(padded, Padded)
    assert padded.sampler is loader.sampler
    assert not hasattr(padded, "worker_init_fn")


@pytest.mark.parametrize("really", [2, 6])
def test_a_loader_that_is_wrong_about_its_length(monkeypatch: Any, really: int) -> None:
    loader = adapted(monkeypatch, [4], Promises(4, really=really), reader=0)
    assert len(list(itertools.islice(loader, 9))) == 4


@pytest.mark.parametrize(
    ("lengths", "message"),
    [([5, 3], "have 5, 3 batches"), ([3, 4], "have 3, 4 batches"), ([4, -1], "has no length")],
)
def test_refused_lengths(monkeypatch: Any, lengths: list[int], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as refused:
        adapted(monkeypatch, lengths, Promises(4), reader=0)
    assert refused.value.remedy


def test_loaders_side_by_side(monkeypatch: Any) -> None:
    first, second = (adapted(monkeypatch, [4, 4], Promises(4), reader=0) for _ in range(2))
    assert count([first, second], 3) == 2
    third = adapted(monkeypatch, [3, 2], Promises(3), reader=0)
    with pytest.raises(ConfigError, match="side by side"):
        count([first, third], 0)


def test_stand_ins() -> None:
    assert is_remote({"one": [1, RemoteBatch()]})
    assert not is_remote({"one": [1, 2]})
    assert REMOTE_BATCH.to("cuda") is REMOTE_BATCH
    assert extract_batch_size(REMOTE_BATCH) == 1


class Numbered(Dataset[Any]):
    """Vectors and their numbers."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return torch.tensor([float(index), index % 3, index % 5]), index


class Counted(BatchSampler):
    """Knows its number of batches from the start."""

    def __init__(self, sampler: Any, batch_size: int, drop_last: bool) -> None:
        super().__init__(sampler, batch_size, drop_last)
        self.count = super().__len__()

    def __len__(self) -> int:
        return self.count


def loaders() -> list[DataLoader[Any]]:
    """For two readers: one batch more, one sample more, none for one, as many for each."""
    data = Numbered(9)
    return [
        DataLoader(Numbered(4 * BATCH + 1), batch_size=BATCH),
        DataLoader(Numbered(4 * BATCH + 3), batch_size=BATCH, shuffle=True),
        DataLoader(Numbered(1), batch_size=BATCH),
        DataLoader(Numbered(12), batch_size=BATCH),
        DataLoader(data, batch_sampler=Counted(SequentialSampler(data), BATCH, False)),
        DataLoader(data, batch_size=BATCH, sampler=SubsetRandomSampler([1, 4, 7])),
    ]


class Counts(Net):
    """Learns nothing; keeps which samples it evaluated."""

    def __init__(self) -> None:
        torch.manual_seed(3)
        super().__init__(nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, CLASSES)))
        self.numbers = nn.ModuleList([CatMetric() for _ in loaders()])
        self.right = nn.ModuleList(
            [MulticlassAccuracy(CLASSES, average="micro") for _ in loaders()]
        )
        self.seen: list[list[list[float]]] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, numbers = batch
        return F.cross_entropy(self.layers(x), numbers % CLASSES)

    def _evaluate(self, batch: Any, loader: int) -> None:
        x, numbers = batch
        logits, classes = self.layers(x), numbers % CLASSES
        self.numbers[loader].update(numbers.float())
        self.right[loader].update(logits, classes)
        self.log("right", self.right[loader])
        self.log("loss", F.cross_entropy(logits, classes))
        self.log("samples", float(len(x)), reduce_fx="sum")

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self._evaluate(batch, dataloader_idx)

    def test_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self._evaluate(batch, dataloader_idx)

    def _end(self) -> None:
        used = [metric for metric in self.numbers if metric.update_called]
        self.seen.append([sorted(metric.compute().reshape(-1).tolist()) for metric in used])
        for metric in self.numbers:
            metric.reset()

    def on_validation_epoch_end(self) -> None:
        self._end()

    def on_test_epoch_end(self) -> None:
        self._end()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.0)


def evaluated(rank: int, config: str | None) -> Any:
    options: dict[str, Any] = {"max_epochs": 1, "num_sanity_val_steps": -1}
    trainer = (
        plain_trainer(**options) if config is None else pipeline_trainer(config, [1], **options)
    )
    net = Counts()
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        found = [
            *trainer.validate(net, loaders(), verbose=False),
            *trainer.test(net, loaders(), verbose=False),
        ]
    assert "replicates" not in str([str(warning.message) for warning in warned])
    trainer.fit(net, DataLoader(Numbered(2 * BATCH), batch_size=BATCH), loaders())
    fitted = {name: float(value) for name, value in trainer.callback_metrics.items()}
    return [*found, {name: value for name, value in fitted.items() if "loader" in name}], net.seen


def test_every_sample_counts_once() -> None:
    """In validation, in test, and in a fit's validations before and after its epoch."""
    ((plain, samples),) = run(evaluated, 1, None)
    assert [list(map(len, seen)) for seen in samples] == [[17, 19, 1, 12, 9, 3]] * 4
    for found, seen in run(evaluated, 3, "2-1"):
        assert seen == samples
        assert len(found) == len(plain) == 13
        for ours, theirs in zip(found, plain, strict=True):
            assert ours.keys() == theirs.keys()
            assert ours == pytest.approx(theirs, rel=1e-6)
            for name in ours:
                if "loss" not in name:
                    assert ours[name] == theirs[name]


def chosen(rank: int) -> Any:
    data = Numbered(3)
    sampler = DistributedSampler(data, num_replicas=2, rank=rank % 2, shuffle=False)
    net = Counts()
    trainer = pipeline_trainer("2-1", [1])
    trainer.validate(net, DataLoader(data, batch_size=BATCH, sampler=sampler), verbose=False)
    assert "_resolve_sampler" not in vars(trainer._data_connector)
    return net.seen[0][0]


def test_a_sampler_of_ones_own_stays_as_it_is() -> None:
    assert run(chosen, 3) == [[0.0, 0.0, 1.0, 2.0]] * 3
