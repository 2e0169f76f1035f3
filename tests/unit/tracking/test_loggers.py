"""Where a login to Weights & Biases is found, so that a run online is not refused in vain."""

from __future__ import annotations

from pathlib import Path

import pytest

from sparsepipe.errors import ConfigError
from sparsepipe.tracking.loggers import wandb_logger

KEY = 40 * "a"


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where there is no login yet."""
    for name in ("WANDB_API_KEY", "WANDB_BASE_URL", "WANDB_IDENTITY_TOKEN_FILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.setenv("WANDB_CONFIG_DIR", str(tmp_path))
    return tmp_path


def is_refused(place: Path) -> bool:
    given = {"project": "p", "run_id": "a", "run_dir": place / "run", "job_type": "train"}
    try:
        wandb_logger(offline=False, **given)
    except ConfigError as error:
        return "needs a Weights & Biases login" in error.message
    return False


@pytest.mark.parametrize(
    ("machine", "server", "refused"),
    [
        ("api.wandb.ai", None, False),
        ("api.forge.coreweave.com", None, False),
        ("tracker.example.org", "https://tracker.example.org", False),
        # Logins elsewhere, though one is called so.
        ("wandb.example.org", None, True),
        ("api.wandb.ai", "https://tracker.example.org", True),
    ],
)
def test_a_login_is_one_to_the_server(
    place: Path, monkeypatch: pytest.MonkeyPatch, machine: str, server: str | None, refused: bool
) -> None:
    (place / "netrc").write_text(f"machine {machine}\n  login user\n  password {KEY}\n")
    if server is not None:
        monkeypatch.setenv("WANDB_BASE_URL", server)
    assert is_refused(place) == refused
    if server is not None:  # as `wandb login --host` leaves it
        monkeypatch.delenv("WANDB_BASE_URL")
        (place / "settings").write_text(f"[default]\nbase_url = {server}\n")
        assert is_refused(place) == refused


@pytest.mark.parametrize("text", [None, "", "machine", "wandb"])
def test_without_a_login_it_is_refused(place: Path, text: str | None) -> None:
    if text is not None:
        (place / "netrc").write_text(text)
    assert is_refused(place)
    (place / "settings").write_text("no section")
    assert is_refused(place)
    (place / "settings").write_text(f"[default]\napi_key = {KEY}\n")
    assert not is_refused(place)


@pytest.mark.parametrize("name", ["WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE"])
def test_the_environment_is_a_login(
    place: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv(name, KEY)
    assert not is_refused(place)
