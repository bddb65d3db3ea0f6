"""What a reader meets in the code, which docs/structure.md tells, grows on purpose only (structure.py counts)."""

from __future__ import annotations

import ast

import pytest

import structure
from forerun.kernels.cpu import native

MOST: dict[str, float] = {
    "files in src": 483,
    "top-level entries": 20,
    "options with a flag": 369,
    "options of all kinds": 499,
    "class names defined more than once": 0,
    "words of documents": 47_220,
    "tuple assignments in 1,000 statements": 2.2,
    "nested conditional expressions": 0,
    "imports inside functions": 343,
    "lambdas": 328,
    "depth of classes": 4,
    "public names in several modules": 3,
}
MOST_ENTERED = {
    "functions entered by generate": 181,
    "files entered by generate": 40,
    "modules loaded by generate": 138,
    "files entered by loading a GGUF file": 53,  # how many functions depends on what its self-test had time for
}
"""These are raised on purpose, with a reason in the commit, where a feature pays for its room."""
tracked = pytest.mark.skipif(not (structure.ROOT / ".git").exists(), reason="tracked files are counted")


def too_large(found: dict[str, float], most: dict[str, float]) -> dict[str, float]:
    return {name: found[name] for name, limit in most.items() if found[name] > limit}


@tracked
def test_nothing_grows_unnoticed() -> None:
    assert too_large(structure.figures(), MOST) == {}


def test_little_runs_for_one_token_and_to_load_a_file() -> None:
    if native() is None:
        pytest.skip("with the kernels in PyTorch, other functions run")
    assert too_large({**structure.walks()}, {**MOST_ENTERED}) == {}


def test_what_counts_as_a_statement() -> None:
    source = '"""Text."""\nx = 1\n"""More."""\ndef f():\n    "Text."\n    return 1\n'
    assert structure.statements(ast.parse(source)) == 3


@pytest.mark.parametrize(
    ("count", "source", "expected"),
    [
        (structure.tuple_assignments, "a, b = 1, 2", 1),
        (structure.tuple_assignments, "a.x, (b, c) = f(), (1, 2)", 1),
        (structure.tuple_assignments, "a, b = b, a\nc, d = f()\nfor e, g in h: pass\ni = 1, 2", 0),
        (structure.nested_conditionals, "a if b else c if d else e", 1),
        (structure.nested_conditionals, "f(a if b else c, a if b else c)", 0),
        (structure.inner_imports, "import a\ndef f():\n    import b, c\n    def g():\n        from d import e", 2),
        (structure.lambdas, "f(lambda: 1)\ndef g(x=lambda: 2): pass", 2),
    ],
)
def test_what_is_counted(count: object, source: str, expected: int) -> None:
    assert callable(count)
    assert count(ast.parse(source)) == expected


def test_how_deep_classes_are() -> None:
    sources = {
        "p": "from p.a import A",
        "p.a": "class A(dict): ...\nclass A2(A): ...",
        "p.b": "from p import A as Other\nclass B(Generic, Other[int]): ...\nclass A: ...",
        "p.c": "from p.b import B\nclass C(B): ...\nclass D(A): ...",
        "p.d": "from p.c import C\nclass CError(C): ...",
    }
    trees = {name: ast.parse(source) for name, source in sources.items()}
    assert structure.class_depth(trees) == 3
    assert max(structure.lineages(trees), key=len) == ["p.d:CError", "p.c:C", "p.b:B", "p.a:A"]
    assert structure.repeated_names(trees.values()) == ["A"]
