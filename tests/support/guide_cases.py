"""What documents show: commands of all of them, files and printed text of the guides in docs/."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import IntervalSweep

from sparsepipe.config.compose import in_place_of_scale

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
GUIDES = ("configuration", "own_model", "own_data", "own_cluster", "learning_rate", "sweeps")
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
_BEGIN = r"(?:[A-Za-z_]\w*=\S+ +)*sparsepipe "
"""Of a command, before which variables of the environment may be set."""
_PATTERN = re.compile(r"=(?:GROUP|NAME)\b| -sc |\.\.\.")  # of commands, in place of one
_PRINTING = re.compile(
    r"^```python\n((?:(?!^```).)*print\((?:(?!^```).)*)^```\n\n```text\n(.*?)^```",
    re.DOTALL | re.MULTILINE,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """A line that begins with ``sparsepipe``, or with variables of the environment before it.

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
        return [_values(word)[0] for word in self._swept]

    @property
    def _swept(self) -> Sequence[str]:
        """With what an experiment has in the place of a scale, which may be swept as well."""
        if any(word.startswith("scale=") for word in self.words):
            return in_place_of_scale(self.words)
        return self.words

    @property
    def jobs(self) -> Iterator[list[str]]:
        """The first one, and as it is with each other option of a group that is swept."""
        first = self.first_job
        yield first
        for place, word in enumerate(self._swept):
            if "." not in word.partition("=")[0]:
                for value in _values(word)[1:]:
                    yield [*first[:place], value, *first[place + 1 :]]


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
    spans = re.findall(rf"`({_BEGIN}[^`]*)`", _BLOCKS.sub("", text))
    lines = [line for line in (*_lines(text), *spans) if not _PATTERN.search(line)]
    found = {line: _command(line) for line in lines if "=" in line}
    return list({command.words: command for command in found.values()}.values())


def _lines(text: str) -> list[str]:
    blocks = [
        block for language, block in _BLOCKS.findall(text.replace("\\\n", " ")) if not language
    ]
    lines = [line for block in blocks for line in block.splitlines()]
    return [line for line in lines if re.match(_BEGIN, f"{line} ")]


def _command(line: str) -> Command:
    told = shlex.split(line.replace("<run id>", "0123456789ab"), comments=True)
    words = told[told.index("sparsepipe") + 1 :]
    options = {"--config-dir", "own", "-m", "--cfg", "job"}
    rest = tuple(re.sub(r"\$\w+", "/data", word) for word in words if word not in options)
    return Command(words=rest, own=words[:2] == ["--config-dir", "own"], prints="--cfg" in words)


def printing_blocks(guide: str) -> list[tuple[str, str]]:
    """Code, and what stands below it as its output."""
    return _PRINTING.findall(text_of(guide))


def _values(word: str) -> list[str]:
    """An override for each value that it sweeps; of an interval, which has no first, its start."""
    (override,) = OverridesParser.create().parse_overrides([word])
    if not override.is_sweep_override():
        return [word]
    value, key = override.value(), override.get_key_element()
    if isinstance(value, IntervalSweep):
        return [f"{key}={value.start}"]
    return [f"{key}={each}" for each in override.sweep_string_iterator()]
