"""Count the figures of docs/structure.md: `python tests/structure.py` prints each figure on a line.

Statements are those of Python's grammar, without docstrings and other bare strings, of every tracked Python file
outside tests/; lines are all lines of these files.
"""

from __future__ import annotations

import ast
import re
import subprocess
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = "src/forerun/"
APART = (f"{PACKAGE}train/", f"{PACKAGE}lab/")
"""Packages that nothing in the core imports."""


def tracked(*patterns: str) -> list[str]:
    """Return the paths of tracked files, relative to the root, that match any of the patterns and are still there."""
    found = subprocess.run(["git", "ls-files", *patterns], cwd=ROOT, capture_output=True, text=True, check=True)
    return [path for path in found.stdout.splitlines() if (ROOT / path).exists()]


def sources() -> list[str]:
    """Return the tracked Python files outside tests/."""
    return [path for path in tracked("*.py") if not path.startswith("tests/")]


def statements(source: str) -> int:
    """Count the statements of a module; docstrings and other bare strings do not count."""
    return sum(isinstance(node, ast.stmt) and not _is_text(node) for node in ast.walk(ast.parse(source)))


def _is_text(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def repeated_classes(paths: Iterable[str]) -> list[str]:
    """Return the names of classes that are defined more than once."""
    names = Counter(
        node.name for path in paths for node in ast.walk(ast.parse(_read(path))) if isinstance(node, ast.ClassDef)
    )
    return sorted(name for name, count in names.items() if count > 1)


def top_level() -> list[str]:
    """Return the entries of the package's top level; dunder files, py.typed and assets do not count."""
    entries = {path.removeprefix(PACKAGE).partition("/")[0] for path in tracked(f"{PACKAGE}*")}
    return sorted(entry for entry in entries if not entry.startswith("__") and entry not in ("py.typed", "assets"))


def surface() -> tuple[int, int, int]:
    """Count the commands of the command line, options with a flag, and keys of --config without one.

    --help does not count.
    """
    import typer

    from forerun.cli.main import app

    commands = options = keys = 0
    waiting = [typer.main.get_command(app)]
    while waiting:
        command = waiting.pop()
        below = list(getattr(command, "commands", {}).values())
        waiting += below
        commands += not below
        kinds = [each.hidden for each in command.params if each.param_type_name == "option"]
        options += kinds.count(False)
        keys += kinds.count(True)
    return commands, options, keys


def words() -> int:
    """Count the words of the documents: README, CHANGELOG, CONTRIBUTING and docs/*.md."""
    paths = tracked("docs/*.md", "README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")
    return sum(len(re.findall(r"\S+", _read(path))) for path in paths)


def figures() -> dict[str, int]:
    """Return every figure by its name."""
    code = sources()
    counts = {path: statements(_read(path)) for path in code}
    package = [path for path in code if path.startswith(PACKAGE)]
    commands, options, keys = surface()
    return {
        "statements": sum(counts.values()),
        "statements of the core": sum(counts[path] for path in package if not path.startswith(APART)),
        "lines": sum(len(_read(path).splitlines()) for path in code),
        "files in src": len([path for path in code if path.startswith("src/")]),
        "top-level entries": len(top_level()),
        "commands": commands,
        "options": options,
        "options with keys of --config": options + keys,
        "class names defined more than once": len(repeated_classes(package)),
        "words of documents": words(),
    }


def _read(path: str) -> str:
    return (ROOT / path).read_text(encoding="utf-8")


if __name__ == "__main__":
    for name, figure in figures().items():
        print(f"{figure:>7,}  {name}")
