"""Grammars that no end is in sight of: each is compiled, or refused, within the limits of a child process."""

from __future__ import annotations

import json
from typing import Any

import pytest

from forerun import Grammar, GrammarError
from forerun.models import find_tokenizer
from forerun.sampling import grammar as compiling
from forerun.sampling.grammar import Grammars
from forerun.utils.children import CHILDREN

pytest.importorskip("llguidance")


def _nested(depth: int) -> str:
    return "(" * depth + "a" + "{2,9})" * depth


def _refs(width: int, depth: int) -> dict[str, Any]:
    definitions: dict[str, Any] = {f"d{depth}": {"type": "integer"}}
    for level in range(depth):
        definitions[f"d{level}"] = {"anyOf": [{"$ref": f"#/$defs/d{level + 1}"} for _ in range(width)]}
    return {"$ref": "#/$defs/d0", "$defs": definitions}


def _objects(depth: int, width: int) -> dict[str, Any]:
    if not depth:
        return {"type": "string"}
    return {"type": "object", "properties": {f"p{i}": _objects(depth - 1, width) for i in range(width)}}


SCHEMAS: dict[str, Any] = {
    "a multiple": {"type": "integer", "multipleOf": 99999989},
    "another multiple": {"type": "integer", "multipleOf": 2**31 - 1},
    "a multiple that is a float": {"type": "number", "multipleOf": 0.000000137},
    "two multiples": {"allOf": [{"type": "integer", "multipleOf": 99991}, {"multipleOf": 99989}]},
    "multiples in an array": {"type": "array", "items": {"type": "integer", "multipleOf": 9999991}, "maxItems": 99},
    "6,000 choices": {"enum": [f"n{i}" for i in range(1500)] + list(range(4500))},
    "6,000 numbers": {"enum": list(range(0, 12000, 2))},
    "a loop": {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}},
    "a loop of arrays": {"$ref": "#/$defs/a", "$defs": {"a": {"type": "array", "items": {"$ref": "#/$defs/a"}}}},
    "many references": _refs(8, 40),
    "wide references": _refs(60, 9),
    "a deep object": _objects(9, 2),
    "a wide object": _objects(2, 30),
    "long strings": {"type": "string", "minLength": 100_000, "maxLength": 200_000},
    "longer strings": {"type": "string", "maxLength": 2**31 - 1},
    "many items": {"type": "array", "items": {"type": "string"}, "minItems": 99_999, "maxItems": 100_000},
    "all of any of": {
        "allOf": [{"anyOf": [{"type": "integer", "minimum": i * j} for i in range(9)]} for j in range(1, 9)]
    },
    "a pattern": {"type": "string", "pattern": "^(a{1,200}b{1,200}){1,200}$"},
    "patterns": {"allOf": [{"type": "string", "pattern": f"(.*{c}.{{12}})"} for c in "abcdefg"]},
    "properties by pattern": {
        "type": "object",
        "patternProperties": {f"^.*{c}.*$": {"type": "integer"} for c in "abcdefghij"},
    },
    "600 optional properties": {"type": "object", "properties": {f"p{i}": {} for i in range(600)}},
    "a range": {"type": "number", "minimum": 1e-300, "maximum": 1e300},
    "a long range": {"type": "integer", "minimum": -(10**60), "maximum": 10**60 + 7},
}
OTHERS = {
    "an exponential expression": Grammar.regex("(a*)*" * 12 + "b"),
    "nested repetitions": Grammar.regex(_nested(12)),
    "more repetitions": Grammar.regex("((a{1,99}){1,99}){1,99}"),
    "a counter": Grammar.regex("(a|b)*a(a|b){24}"),
    "an intersection": Grammar.lark("start: A\nA: /(.*a.{18}){3}/ & /(.*b.{18}){3}/ & ~/(.*c.{9}){5}/"),
    "a complement": Grammar.lark("start: A\nA: ~/((a|b)*a(a|b){18})/"),
    "characters": Grammar.regex(r"\p{L}{1,4000}\p{N}{1,4000}"),
    "an ambiguous grammar": Grammar.lark('start: s\ns: s s | s s s | "a" | ""'),
    "rules in a circle": Grammar.lark('start: a\na: b "x" | ""\nb: a a a a'),
    "many rules": Grammar.lark(
        "start: "
        + " | ".join(f"r{i}" for i in range(900))
        + "".join(f'\nr{i}: "a{i}" r{(i * 7 + 1) % 900}?' for i in range(900))
    ),
}
BOMBS = {name: Grammar.json_schema(schema) for name, schema in SCHEMAS.items()} | OTHERS


@pytest.fixture(scope="module")
def grammars() -> Grammars:
    tokenizer = find_tokenizer("bundled")
    return Grammars(tokenizer, "bundled", len(tokenizer))


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiling, "_SECONDS", 0.3)


@pytest.mark.parametrize("name", BOMBS)
def test_each_has_an_end(name: str, grammars: Grammars) -> None:
    refused = ""
    try:
        grammars.prepare(BOMBS[name])().allowed()
    except GrammarError as error:
        refused = str(error)
    assert not refused or refused.startswith(f"The {BOMBS[name].kind} cannot be followed: ")


def test_a_verdict_is_kept(grammars: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    schema = Grammar.json_schema(json.dumps({"type": "integer", "multipleOf": 99999971}))
    with pytest.raises(GrammarError, match=r"it takes more than 0\.3 s of processor time"):
        grammars.prepare(schema)
    monkeypatch.setattr(CHILDREN, "perform", None)  # it is not tried again
    with pytest.raises(GrammarError, match=r"it takes more than 0\.3 s of processor time"):
        grammars.prepare(schema)


def test_few_verdicts_are_kept(grammars: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiling, "_MOST_VERDICTS", 3)
    for number in range(9):
        grammars.prepare(Grammar.regex(f"a{number}"))
    assert len(grammars._verdicts) == 3


def test_large_grammars_are_not_kept_together(grammars: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiling, "_MOST_BYTES", 100)
    verdicts = iter([{"nbytes": 60}, {"nbytes": 70}])
    monkeypatch.setattr(Grammars, "_verdict", lambda *_: next(verdicts))
    grammars.prepare(Grammar.regex("large1"))
    grammars.prepare(Grammar.regex("large2"))
    assert [grammar.text for _, grammar in grammars._prepared] == ["large2"]
