"""Hooks of MkDocs: pages from outside docs/, links that leave it, and the page of the public API.

The Markdown files are written for a code host: their links name files of the repository. Here a link to a page of the
site becomes one, a link to another file of the repository becomes the file's name, and a link to nothing is an error.
"""

from __future__ import annotations

import inspect
import posixpath
import re
import sys
from collections.abc import Iterator
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parent
PAGES = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
}
"""Files of the repository that are pages of the site, and their names there."""
GROUPS = {
    "Models and requests": ("LLM", "AsyncLLM", "SamplingParams", "Grammar"),
    "Answers": ("Generation", "Choice", "StreamChunk", "SequenceStats"),
    "Drafters of your own": ("Drafter", "Sequence", "Draft", "Verdict", "Step"),
}
_LINK = re.compile(r"(?<!!)\[([^\[\]]+)\]\(([^()\s]+)\)")
_FENCED = re.compile(r"(^ *```.*?^ *```)", re.DOTALL | re.MULTILINE)


def on_files(files: Files, config: Any) -> Files:
    """Add the pages that are not in docs/."""
    for source, name in PAGES.items():
        text = (ROOT / source).read_text(encoding="utf-8")
        files.append(File.generated(config, name, content=with_links(text, source)))
    files.append(File.generated(config, "api.md", content=api_page()))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Rewrite the links of the pages in docs/."""
    return markdown if page.file.generated_by else with_links(markdown, f"docs/{page.file.src_uri}")


def with_links(text: str, source: str) -> str:
    """Rewrite the links of a file of the repository for the site. Raises PluginError for a link to nothing."""
    parts = _FENCED.split(text)  # every other one is a block of code
    parts[::2] = [_LINK.sub(lambda found: _linked(found, source), part) for part in parts[::2]]
    return "".join(parts).replace("](docs/images/", "](images/")


def _linked(found: re.Match[str], source: str) -> str:
    label, target = found.groups()
    if re.match(r"[a-z]+:|#", target):
        return found[0]
    path, hash_, anchor = target.partition("#")
    path_in_root = posixpath.normpath(posixpath.join(posixpath.dirname(source), path))
    if not (ROOT / path_in_root).exists():
        raise PluginError(f"{source} links to {target}, which is not there.")
    if path_in_root in PAGES or (path_in_root.startswith("docs/") and path_in_root.endswith(".md")):
        label = title_of(ROOT / path_in_root) if label in (path, path_in_root, posixpath.basename(path)) else label
        return f"[{label}]({PAGES.get(path_in_root) or posixpath.relpath(path_in_root, 'docs')}{hash_}{anchor})"
    return label if f"`{path_in_root}`" in label or label == path_in_root else f"{label} (`{path_in_root}`)"


def title_of(path: Path) -> str:
    """Return the first heading of a file."""
    heading = re.search(r"^# (.+)$", path.read_text(encoding="utf-8"), re.MULTILINE)
    return heading[1] if heading else path.name


def api_page() -> str:
    """Return the page of all public names of forerun, by group."""
    sys.path.insert(0, str(ROOT / "src"))
    import forerun
    from forerun.drafters.registry import DRAFTERS

    errors = sorted(name for name in forerun.__all__ if name.endswith("Error"))
    drafters = [f"{row.module}.{row.class_name}" for row in DRAFTERS.values()]
    grouped = [*(name for names in GROUPS.values() for name in names), *errors, "__version__"]
    missing = {*forerun.__all__} - {*grouped} - {path.rpartition(".")[2] for path in drafters}
    if missing:
        raise PluginError(f"mkdocs_hooks.py: these public names are in no group of the page: {sorted(missing)}.")
    return "\n".join(_api_lines(errors, list(dict.fromkeys(drafters))))


def _api_lines(errors: list[str], drafters: list[str]) -> Iterator[str]:
    yield "# The Python interface\n\nAll names here are imported from `forerun`; what is not here may change.\n"
    for group, names in GROUPS.items():
        yield f"## {group}\n"
        for name in names:
            yield f"::: forerun.{name}\n{_shown(name)}"
    yield "## Drafters\n\n`LLM(drafter=...)` takes names or objects of these classes: [methods](methods.md).\n"
    yield from (f"::: {path}\n    options:\n      members: false\n" for path in drafters)
    yield "## Exceptions\n\nEvery message says what was wrong, why, and what to do.\n"
    yield from (f"::: forerun.errors.{name}\n    options:\n      members: false\n" for name in errors)


def _shown(name: str) -> str:
    """Return the page's options for one name; classes of options get a table of fields instead of members."""
    from forerun import config
    from forerun.utils.fields import described

    options = getattr(config, name, None)
    if not (inspect.isclass(options) and is_dataclass(options)):
        return ""
    rows = []
    for each in described(options).values():
        default = each.option.default_text or f"`{each.default()!r}`"
        limits = f" ({each.option.range})" if each.option.range else ""
        rows.append(f"| `{each.name}` | {_cell(default)} | {_cell(each.option.help + limits)} |")
    table = "\n".join(["| field | default | what it does |", "|---|---|---|", *rows])
    return f"    options:\n      members: false\n\n{table}\n"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
