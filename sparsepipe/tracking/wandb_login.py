"""Whether there is a login to Weights & Biases, without asking anybody for one.

Its own ``wandb.login`` would ask the server, or the terminal.
"""

from __future__ import annotations

import configparser
import netrc
import os
from collections.abc import Collection
from pathlib import Path
from urllib.parse import urlsplit

_ITS_OWN = ("api.wandb.ai", "api.forge.coreweave.com")
"""The names of the public server, old and new: a login to one is a login to the other."""
_KEYS = ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE")


def has_login() -> bool:
    """Whether the environment, the settings file or the netrc file has one for the server."""
    settings = _settings()
    if any(os.environ.get(name) for name in _KEYS) or settings.get("api_key"):
        return True
    url = os.environ.get("WANDB_BASE_URL") or settings.get("base_url") or f"https://{_ITS_OWN[0]}"
    host = urlsplit(url).netloc
    return _in_netrc(_ITS_OWN if host in _ITS_OWN else (host,))


def _settings() -> dict[str, str]:
    """Those that ``wandb login`` writes for all directories, such as the server's address."""
    folder = Path(os.environ.get("WANDB_CONFIG_DIR") or "~/.config/wandb").expanduser()
    found = configparser.ConfigParser(interpolation=None)
    try:
        found.read(folder / "settings", encoding="utf-8")
    except (configparser.Error, UnicodeDecodeError):
        return {}
    return dict(found["default"]) if found.has_section("default") else {}


def _in_netrc(hosts: Collection[str]) -> bool:
    path = Path(os.environ.get("NETRC") or "~/.netrc").expanduser()
    try:
        entries = netrc.netrc(path)
    except (OSError, UnicodeDecodeError, netrc.NetrcParseError):
        return False  # nor can Weights & Biases read it
    found = (entries.authenticators(host) for host in hosts)
    return any(entry is not None and entry[2] for entry in found)
