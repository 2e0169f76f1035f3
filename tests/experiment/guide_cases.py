"""What the guides in docs/ show: files, commands and printed text."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import IntervalSweep

DOCS = Path(__file__).parents[2] / "docs"
GUIDES = ("own_model", "own_data", "own_cluster", "learning_rate", "sweeps")

_FILE = re.compile(
    r"`([\w./]+\.(?:py|yaml))`[^`\n]*:\n\n```\w+\n(.*?)^```", re.DOTALL | re.MULTILINE
)
_BLOCKS = re.compile(r"^```(\w*)\n(.*?)^```", re.DOTALL | re.MULTILINE)
_PRINTING = re.compile(
    r"^```python\n((?:(?!^```).)*print\((?:(?!^```).)*)^```\n\n```text\n(.*?)^```",
    re.DOTALL | re.MULTILINE,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """A line that begins with ``sparsepipe``.

    Args:
        words: its overrides.
        own: it names the guide's own directory of options.
        prints: it prints a configuration and runs nothing.
    """

    words: tuple[str, ...]
    own: bool
    prints: bool

    @property
    def first_job(self) -> list[str]:
        """Its overrides, or those of the first job where it is a sweep."""
        return [_first(word) for word in self.words]


def text_of(guide: str) -> str:
    return (DOCS / f"{guide}.md").read_text()


def write_files(guide: str, directory: Path) -> list[Path]:
    """Writes the files that a guide shows under their names."""
    written = []
    for name, content in _FILE.findall(text_of(guide)):
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
        written.append(path)
    return written


def commands_of(guide: str) -> Iterator[Command]:
    for language, block in _BLOCKS.findall(text_of(guide).replace("\\\n", " ")):
        for line in block.splitlines():
            if language or not line.startswith("sparsepipe"):
                continue
            words = shlex.split(line, comments=True)[1:]
            own = words[:2] == ["--config-dir", "own"]
            prints = "--cfg" in words
            options = {"--config-dir", "own", "-m", "--cfg", "job"}
            rest = tuple(word for word in words if word not in options)
            assert all("=" in word for word in rest), line
            yield Command(words=rest, own=own, prints=prints)


def printing_blocks(guide: str) -> list[tuple[str, str]]:
    """Code, and what stands below it as its output."""
    return _PRINTING.findall(text_of(guide))


def _first(word: str) -> str:
    (override,) = OverridesParser.create().parse_overrides([word])
    if not override.is_sweep_override():
        return word
    value = override.value()
    if isinstance(value, IntervalSweep):
        return f"{override.get_key_element()}={value.start}"
    return f"{override.get_key_element()}={next(iter(override.sweep_string_iterator()))}"
