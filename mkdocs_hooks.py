"""What MkDocs is told beside mkdocs.yml: pages from outside docs/, links that leave it, and the page of the public API.

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
    """Links of the pages in docs/."""
    return markdown if page.file.generated_by else with_links(markdown, f"docs/{page.file.src_uri}")


def with_links(text: str, source: str) -> str:
    """The text of a file of the repository with links of the site. Raises PluginError of a link to nothing."""
    parts = _FENCED.split(text)  # every other one is a block of code
    parts[::2] = [_LINK.sub(lambda found: _linked(found, source), part) for part in parts[::2]]
    return "".join(parts)


def _linked(found: re.Match[str], source: str) -> str:
    label, target = found.groups()
    if re.match(r"[a-z]+:|#", target):
        return found[0]
    path, hash_, anchor = target.partition("#")
    place = posixpath.normpath(posixpath.join(posixpath.dirname(source), path))
    if not (ROOT / place).exists():
        raise PluginError(f"{source} links to {target}, which is not there.")
    if place in PAGES or (place.startswith("docs/") and place.endswith(".md")):
        label = title_of(ROOT / place) if label in (path, place, posixpath.basename(path)) else label
        return f"[{label}]({PAGES.get(place) or posixpath.relpath(place, 'docs')}{hash_}{anchor})"
    return label if f"`{place}`" in label or label == place else f"{label} (`{place}`)"


def title_of(path: Path) -> str:
    """The first heading of a file."""
    heading = re.search(r"^# (.+)$", path.read_text(encoding="utf-8"), re.MULTILINE)
    return heading[1] if heading else path.name


def api_page() -> str:
    """Every public name of forerun, by group."""
    sys.path.insert(0, str(ROOT / "src"))
    import forerun
    from forerun.drafters.registry import DRAFTERS

    errors = sorted(name for name in forerun.__all__ if name.endswith("Error"))
    drafters = [f"forerun.drafters.{row.home.replace(':', '.')}" for row in DRAFTERS.values()]
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
    """Options for one name; a class of options has a table of its fields, with their help, in place of members."""
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
