"""Count the figures of docs/structure.md: `python tests/structure.py` prints each figure on a line.

Statements are those of Python's grammar, without docstrings and other bare strings, of every tracked Python file
outside tests/; lines are all lines of these files. All other figures are of the package, `src/forerun`:

- tuple assignments: `a, b = x, y`, in 1,000 statements; swaps (`a, b = b, a`), unpacking and loops do not count.
- nested conditional expressions: `x if a else y` that hold another one.
- imports inside functions: import statements in functions and methods, those of one statement once.
- lambdas: all of them, default values too.
- depth of classes: classes of the package on the longest way from one to a base of a base, both ends included;
  exceptions do not count, since their bases are what callers catch.
- public names in several modules: functions and classes at the top of a module, without a leading underscore, whose
  name another module defines too.
- options with a flag: of all commands; --help does not count. Options of all kinds: with those that have no flag but a
  key of --config; arguments do not count.
- what runs: see walk.py, which is run in a process of its own.
"""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = "src/forerun/"
APART = (f"{PACKAGE}train/", f"{PACKAGE}lab/")
"""Packages that nothing in the core imports."""
_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


def tracked(*patterns: str) -> list[str]:
    """Return the paths of tracked files, relative to the root, that match any of the patterns and are still there."""
    found = subprocess.run(["git", "ls-files", *patterns], cwd=ROOT, capture_output=True, text=True, check=True)
    return [path for path in found.stdout.splitlines() if (ROOT / path).exists()]


def sources() -> list[str]:
    """Return the tracked Python files outside tests/."""
    return [path for path in tracked("*.py") if not path.startswith("tests/")]


def statements(tree: ast.AST) -> int:
    """Count the statements of a module; docstrings and other bare strings do not count."""
    return sum(isinstance(node, ast.stmt) and not _is_text(node) for node in ast.walk(tree))


def _is_text(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def repeated_classes(trees: Iterable[ast.AST]) -> list[str]:
    """Return the names of classes that are defined more than once."""
    names = Counter(node.name for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ClassDef))
    return sorted(name for name, count in names.items() if count > 1)


def top_level() -> list[str]:
    """Return the entries of the package's top level; dunder files, py.typed and assets do not count."""
    entries = {path.removeprefix(PACKAGE).partition("/")[0] for path in tracked(f"{PACKAGE}*")}
    return sorted(entry for entry in entries if not entry.startswith("__") and entry not in ("py.typed", "assets"))


def surface() -> tuple[int, int, int]:
    """Count the commands of the command line, the options with a flag, and options of all kinds."""
    import typer

    from forerun.cli.main import app

    commands, flags, options = 0, 0, 0
    waiting = [typer.main.get_command(app)]
    while waiting:
        command = waiting.pop()
        below = list(getattr(command, "commands", {}).values())
        waiting += below
        commands += not below
        found = [each for each in command.params if each.param_type_name == "option"]
        options += len(found)
        flags += sum(not each.hidden for each in found)
    return commands, flags, options


def tuple_assignments(tree: ast.AST) -> int:
    """Count the assignments of a tuple of values to a tuple of names, but swaps."""
    return sum(
        isinstance(node, ast.Assign)
        and isinstance(node.value, ast.Tuple)
        and any(isinstance(target, ast.Tuple) and not _swaps(target, node.value) for target in node.targets)
        for node in ast.walk(tree)
    )


def _swaps(target: ast.Tuple, value: ast.Tuple) -> bool:
    return sorted(map(ast.unparse, target.elts)) == sorted(map(ast.unparse, value.elts))


def nested_conditionals(tree: ast.AST) -> int:
    """Count the conditional expressions that hold another one."""
    return sum(isinstance(node, ast.IfExp) and _count(node, ast.IfExp) > 1 for node in ast.walk(tree))


def inner_imports(tree: ast.AST) -> int:
    """Count the import statements in functions."""
    functions = (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))
    imports = (node for each in functions for node in ast.walk(each) if isinstance(node, ast.Import | ast.ImportFrom))
    return len({id(node) for node in imports})


def lambdas(tree: ast.AST) -> int:
    """Count the lambdas."""
    return _count(tree, ast.Lambda)


def _count(tree: ast.AST, kind: type[ast.AST]) -> int:
    return sum(isinstance(node, kind) for node in ast.walk(tree))


def repeated_names(trees: Iterable[ast.Module]) -> list[str]:
    """Return the public functions and classes that several modules define at their top."""
    names: Counter[str] = Counter()
    for tree in trees:
        defined = {node.name for node in tree.body if isinstance(node, _DEFINITIONS)}
        names.update(name for name in defined if not name.startswith("_"))
    return sorted(name for name, count in names.items() if count > 1)


def class_depth(trees: Mapping[str, ast.Module]) -> int:
    """Return the number of classes on the longest way from one to a base of a base. trees: by name of module."""
    return max((len(each) for each in lineages(trees) if not each[0].endswith("Error")), default=0)


def lineages(trees: Mapping[str, ast.Module]) -> Iterator[list[str]]:
    """Yield each class as "module:Name", and behind it the longest way through its bases."""
    classes = {
        f"{module}:{node.name}": (module, node)
        for module, tree in trees.items()
        for node in tree.body
        if isinstance(node, ast.ClassDef)
    }
    imported = {module: dict(_imported(tree)) for module, tree in trees.items()}

    def resolved(module: str, name: str) -> str | None:
        if f"{module}:{name}" in classes:
            return f"{module}:{name}"
        home = imported.get(module, {}).get(name)
        return None if home is None else resolved(*home)

    def lineage(place: str) -> list[str]:
        module, node = classes[place]
        names = (each.value if isinstance(each, ast.Subscript) else each for each in node.bases)
        bases = (resolved(module, each.id) for each in names if isinstance(each, ast.Name))
        return [place, *max((lineage(base) for base in bases if base is not None), key=len, default=[])]

    return map(lineage, classes)


def _imported(tree: ast.AST) -> Iterator[tuple[str, tuple[str, str]]]:
    """Yield the names that a module imports from others, with module and name there."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            yield from ((each.asname or each.name, (node.module, each.name)) for each in node.names)


def walks() -> dict[str, int]:
    """Return what runs for one token and for a GGUF file that is loaded (walk.py)."""
    paths = os.pathsep.join(map(str, (ROOT / "src", ROOT / "tests", *(ROOT / "tests/helpers").iterdir())))
    own = {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "FORERUN_COST_CACHE": "0", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, str(ROOT / "tests" / "walk.py"), "--json"]
    found = subprocess.run(command, capture_output=True, text=True, check=True, env={**os.environ, **own})
    figures: dict[str, int] = json.loads(found.stdout)
    return figures


def words() -> int:
    """Count the words of the documents: README, CHANGELOG, CONTRIBUTING and docs/*.md."""
    paths = tracked("docs/*.md", "README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")
    return sum(len(re.findall(r"\S+", _read(path))) for path in paths)


def figures() -> dict[str, float]:
    """Return every figure by its name, but those of `walks`."""
    code = sources()
    parsed = {path: ast.parse(_read(path)) for path in code}
    counts = {path: statements(tree) for path, tree in parsed.items()}
    package = [path for path in code if path.startswith(PACKAGE)]
    commands, flags, options = surface()
    modules = {_module(path): parsed[path] for path in package}
    trees = list(modules.values())
    tuples = sum(map(tuple_assignments, trees))
    return {
        "statements": sum(counts.values()),
        "statements of the core": sum(counts[path] for path in package if not path.startswith(APART)),
        "lines": sum(len(_read(path).splitlines()) for path in code),
        "files in src": len([path for path in code if path.startswith("src/")]),
        "top-level entries": len(top_level()),
        "commands": commands,
        "options with a flag": flags,
        "options of all kinds": options,
        "class names defined more than once": len(repeated_classes(trees)),
        "words of documents": words(),
        "tuple assignments in 1,000 statements": round(1000 * tuples / sum(counts[path] for path in package), 1),
        "nested conditional expressions": sum(map(nested_conditionals, trees)),
        "imports inside functions": sum(map(inner_imports, trees)),
        "lambdas": sum(map(lambdas, trees)),
        "depth of classes": class_depth(modules),
        "public names in several modules": len(repeated_names(trees)),
    }


def _module(path: str) -> str:
    """Return the name of a file's module."""
    name = path.removeprefix("src/").removesuffix(".py").replace("/", ".")
    return name.removesuffix(".__init__")


def _read(path: str) -> str:
    return (ROOT / path).read_text(encoding="utf-8")


if __name__ == "__main__":
    for name, figure in {**figures(), **walks()}.items():
        print(f"{figure:>7,}  {name}")
