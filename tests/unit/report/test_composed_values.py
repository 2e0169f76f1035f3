"""What the configuration is with some overrides."""

from __future__ import annotations

import logging

import pytest

from sparsepipe.report.overrides import composed_values

KEYS = ("data.num_points", "data.source.train_per_class", "model.width", "trainer.max_epochs")


@pytest.mark.parametrize(
    ("overrides", "values"),
    [
        (("experiment=table2", "scale=smoke"), (4096, 8, 0.125, 1)),
        (("experiment=table2", "scale=desk"), (4096, 200, 0.25, 4)),
        (("experiment=fig8", "scale=desk", "data=modelnet40_points"), (None, None, 0.25, 4)),
        (("experiment=table2",), (4096, 200, 1.0, 90)),
    ],
)
def test_scales(overrides: tuple[str, ...], values: tuple[float | None, ...]) -> None:
    """As docs/experiments.md has them in a table."""
    assert composed_values(overrides, KEYS) == dict(zip(KEYS, values, strict=True))


def test_overrides_that_do_not_compose_are_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert composed_values(("experiment=table2", "scale=dsk"), KEYS) == {}
    (message,) = caplog.messages
    assert "'scale' has no option 'dsk'" in message
