"""What documents show: commands of all of them, files and printed text of the guides in docs/."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import IntervalSweep

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
GUIDES = ("own_model", "own_data", "own_cluster", "learning_rate", "sweeps")
OTHERS = sorted(
    path
    for pattern in ("README.md", "docs/*.md", "outputs/*.md", "experiments/*/*.md")
    for path in ROOT.glob(pattern)
    if path.stem not in GUIDES
)
"""Documents whose commands need none of the files that a guide shows."""

_FILE = re.compile(
    r"`([\w./]+\.(?:py|yaml))`[^`\n]*:\n\n```\w+\n(.*?)^```", re.DOTALL | re.MULTILINE
)
_BLOCKS = re.compile(r"^```(\w*)\n(.*?)^```", re.DOTALL | re.MULTILINE)
_PATTERN = re.compile(r"=(?:GROUP|NAME)\b| -sc |\.\.\.")  # of commands, in place of one
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
    """Those in blocks of their own."""
    for line in _lines(text_of(guide)):
        command = _command(line)
        assert all("=" in word for word in command.words), line
        yield command


def commands_in(document: Path) -> list[Command]:
    """Those of a document that compose a job, in blocks, sentences and tables, each once."""
    text = document.read_text()
    spans = re.findall(r"`(sparsepipe [^`]*)`", _BLOCKS.sub("", text))
    lines = [line for line in (*_lines(text), *spans) if not _PATTERN.search(line)]
    found = {line: _command(line) for line in lines if "=" in line}
    return list({command.words: command for command in found.values()}.values())


def _lines(text: str) -> list[str]:
    blocks = [
        block for language, block in _BLOCKS.findall(text.replace("\\\n", " ")) if not language
    ]
    return [line for block in blocks for line in block.splitlines() if line[:10] == "sparsepipe"]


def _command(line: str) -> Command:
    words = shlex.split(line.replace("<run id>", "0123456789ab"), comments=True)[1:]
    options = {"--config-dir", "own", "-m", "--cfg", "job"}
    rest = tuple(re.sub(r"\$\w+", "/data", word) for word in words if word not in options)
    return Command(words=rest, own=words[:2] == ["--config-dir", "own"], prints="--cfg" in words)


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
