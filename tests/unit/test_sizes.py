"""Files and functions of src stay small. An exception has a name and a reason, and goes when it is no longer needed."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

SRC = Path(__file__).parents[2] / "src" / "forerun"
MAX_FILE_LINES = 700
MAX_FUNCTION_LINES = 55
"""From `def` to the last line, docstring included, decorators not."""

EXCEPTIONS: dict[str, str] = {
    "engine/llm.py:LLM.__init__": "half of its lines are the options that a user may give",
    "models/fused/native.py": "one step, and what the library is told of its layers",
}
"""Path below src/forerun, or path:function -> why it may be longer."""


def functions(node: ast.AST, prefix: str = "") -> Iterator[tuple[str, int]]:
    """Dotted name and number of lines of every function below `node`, methods and nested ones included."""
    for child in ast.iter_child_nodes(node):
        name = prefix
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            name = f"{prefix}{child.name}."
            if not isinstance(child, ast.ClassDef):
                assert child.end_lineno is not None
                yield name[:-1], child.end_lineno - child.lineno + 1
        yield from functions(child, name)


def too_long(path: str, source: str) -> dict[str, int]:
    """What exceeds its limit in one file: path or path:function -> lines."""
    lines = len(source.splitlines())
    found = {path: lines} if lines > MAX_FILE_LINES else {}
    for name, count in functions(ast.parse(source)):
        if count > MAX_FUNCTION_LINES:
            found[f"{path}:{name}"] = count
    return found


def test_files_and_functions_are_small() -> None:
    """Equality, so that an exception that is no longer needed fails too."""
    found: dict[str, int] = {}
    for path in sorted(SRC.rglob("*.py")):
        found |= too_long(path.relative_to(SRC).as_posix(), path.read_text(encoding="utf-8"))
    new = {name: lines for name, lines in found.items() if name not in EXCEPTIONS}
    assert not new, "split these"
    assert set(EXCEPTIONS) == set(found), "take exceptions that are no longer needed out of the list"


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("x = 1\n" * 700, {}),
        ("x = 1\n" * 701, {"a.py": 701}),
        ("def f():\n" + "    x = 1\n" * 54, {}),
        ("@property\ndef f():\n" + "    x = 1\n" * 54, {}),
        ("def f():\n" + "    x = 1\n" * 55, {"a.py:f": 56}),
        ("class C:\n    async def f(self):\n" + "        x = 1\n" * 55, {"a.py:C.f": 56}),
        ("if x:\n    def f():\n        def g():\n" + "            x = 1\n" * 55, {"a.py:f": 57, "a.py:f.g": 56}),
    ],
)
def test_sizes_are_counted(source: str, expected: dict[str, int]) -> None:
    assert too_long("a.py", source) == expected
