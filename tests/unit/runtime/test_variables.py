"""Environment variables are as they were, whatever happened meanwhile."""

from __future__ import annotations

import os

import pytest

from sparsepipe.runtime.launch import environment_variables

NAME, OTHER, LEFT = "SPARSEPIPE_TEST_A", "SPARSEPIPE_TEST_B", "SPARSEPIPE_TEST_C"


def test_they_are_set_within_and_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(NAME, "before")
    monkeypatch.delenv(OTHER, raising=False)
    monkeypatch.delenv(LEFT, raising=False)
    with environment_variables({NAME: "within", OTHER: "new"}, restored=(LEFT,)):
        assert (os.environ[NAME], os.environ[OTHER]) == ("within", "new")
        os.environ[LEFT] = "by somebody else"
    assert os.environ[NAME] == "before"
    assert OTHER not in os.environ
    assert LEFT not in os.environ


def test_they_are_put_back_after_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(NAME, "before")
    with pytest.raises(RuntimeError), environment_variables({NAME: "within"}):
        raise RuntimeError
    assert os.environ[NAME] == "before"
