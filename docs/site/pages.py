"""A hook of mkdocs: the site is the repository seen from its root.

Pages keep the paths that they have in the repository, so that a link works here as it does there.
Added are the pages that are generated, what pages link to, and a list of files in place of a
directory without a README.
"""

from __future__ import annotations

import re
from pathlib import Path, PurePosixPath
from posixpath import normpath
from typing import Any

import configuration
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = ("*.md", "docs/*.md", "experiments/README.md", "experiments/*/README.md")
PACKAGES = ("sparsepipe", "hydra_plugins")
SOURCES = {".py": "python", ".yaml": "yaml", ".sbatch": "bash"}
"""Files that are shown as pages; others are downloads."""
_LINK = re.compile(r"(?<=\]\()(?!\w+:|#)([^)#\s]+)")
_FENCE = re.compile(r"^(```\w+) .+$", re.MULTILINE)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Puts the repository's documents and all generated pages in place of the files of docs/."""
    for file in list(files):
        if file.src_dir == config.docs_dir:
            files.remove(file)
    documents = [path for pattern in DOCUMENTS for path in sorted(ROOT.glob(pattern))]
    for path in documents:
        files.append(_existing(path.relative_to(ROOT).as_posix(), config))
    for name, text in configuration.pages(ROOT / "conf").items():
        files.append(File.generated(config, f"configuration/{name}.md", content=text))
    for name, text in _modules():
        files.append(File.generated(config, f"reference/{name}.md", content=text))
    for path in documents:
        for target in _LINK.findall(path.read_text(encoding="utf-8")):
            _add_target(normpath(path.relative_to(ROOT).parent / target), files, config)
    config.nav = _expanded(config.nav, files)
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Leads links to directories and sources to their pages; GitHub allows more behind ```."""
    parent = PurePosixPath(page.file.src_uri).parent
    return _LINK.sub(lambda link: _page_of(link[0], parent), _FENCE.sub(r"\1", markdown))


def _page_of(target: str, parent: PurePosixPath) -> str:
    place = ROOT / normpath(parent / target)
    if place.is_dir():
        return f"{target.rstrip('/')}/README.md"
    return f"{target}.md" if place.suffix in SOURCES and place.is_file() else target


def _add_target(name: str, files: Files, config: MkDocsConfig) -> None:
    """Adds what a page links to, if it exists; mkdocs complains of what does not."""
    path, page = ROOT / name, _page_of(name, PurePosixPath())
    if page in files.src_uris or not path.exists():
        return
    if path.is_dir():
        inside = sorted(item for item in path.iterdir() if item.is_file())
        for item in inside:
            _add_target(f"{name}/{item.name}", files, config)
        links = (f"- [{item.name}]({item.name})" for item in inside)
        text = "\n".join([f"# {name}\n", *links])
    elif page != name:
        text = f"# {name}\n\n```{SOURCES[path.suffix]}\n{path.read_text(encoding='utf-8')}```\n"
    else:
        files.append(_existing(name, config))
        return
    file = File.generated(config, page, content=text)
    file.inclusion = InclusionLevel.NOT_IN_NAV
    files.append(file)


def _existing(name: str, config: MkDocsConfig) -> File:
    return File(name, str(ROOT), config.site_dir, config.use_directory_urls)


def _modules() -> list[tuple[str, str]]:
    """A page for each module that is not private: its path without an ending, and its text."""
    found = []
    for path in sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py")):
        place = path.relative_to(ROOT).with_suffix("")
        package = place.name == "__init__"
        parts = place.parts[:-1] if package else place.parts
        if not any(part.startswith("_") for part in parts):
            page = "/".join([*parts, "index"] if package else parts)
            name = ".".join(parts)
            found.append((page, f"---\ntitle: {parts[-1]}\n---\n\n# `{name}`\n\n::: {name}\n"))
    return found


def _expanded(nav: list[Any], files: Files) -> list[Any]:
    """The navigation, with all pages of a directory in place of a name that ends with a slash."""
    entries: list[Any] = []
    for entry in nav:
        if isinstance(entry, dict):
            ((title, value),) = entry.items()
            below = _tree(value, files) if str(value).endswith("/") else value
            entries.append({title: _expanded(below, files) if isinstance(below, list) else below})
        else:
            entries.append(entry)
    return entries


def _tree(directory: str, files: Files) -> list[Any]:
    """Its own page first, then pages and directories by name, those with one page as a page."""
    index, entries = [], []
    pages = [file.src_uri for file in files if file.inclusion is not InclusionLevel.NOT_IN_NAV]
    below = [uri[len(directory) :] for uri in pages if uri.startswith(directory)]
    for name in dict.fromkeys(uri.partition("/")[0] for uri in below if uri.endswith(".md")):
        if name in ("index.md", "README.md"):
            index.append(directory + name)
        elif name.endswith(".md"):
            entries.append(directory + name)
        else:
            inside = _tree(f"{directory}{name}/", files)
            entries.append(inside[0] if len(inside) == 1 else {name: inside})
    return [*index, *entries]
