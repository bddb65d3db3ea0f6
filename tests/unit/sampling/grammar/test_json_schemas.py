"""JSON schemas as they are published: what asks for nothing is no obstacle, what is not held is told and checked."""

from __future__ import annotations

import json
import sys
from contextlib import suppress
from typing import Any

import pytest

from forerun import Grammar, GrammarError
from forerun.models import find_tokenizer
from forerun.sampling import grammar, json_schemas
from forerun.sampling.grammar import Grammars
from forerun.sampling.json_schemas import Unheld, readable, readable_text
from forerun.sampling.schema_rewriting import FORMATS
from forerun.utils.child_program import compiled

LENIENT = {"x-guidance": {"lenient": True}}
SET = {"type": "array", "items": {"type": "integer"}, "uniqueItems": True}
LARGE = {"enum": [f"a name of some length, number {number}" for number in range(4_000)]}


@pytest.fixture(scope="module")
def grammars() -> Grammars:
    tokenizer = find_tokenizer("bundled")
    return Grammars(tokenizer, "bundled", len(tokenizer))


def accepts(grammars: Grammars, schema: Any, value: Any) -> bool:
    grammars.prepare(Grammar.json_schema(schema))
    assert grammars._tokenizer is not None
    matcher = compiled(grammars._tokenizer, "json_schema", json.dumps(readable(schema)[0]))
    tokens = grammars._tokenizer.tokenize_str(json.dumps(value, ensure_ascii=False))
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


@pytest.mark.parametrize("name", ["path", "password", "binary", "byte", "regex", "uri-reference", "int32", "any name"])
def test_a_format_that_is_not_known_is_an_annotation_and_told(name: str, grammars: Grammars) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "string", "format": name}}}
    (warning,) = grammars.unheld(Grammar.json_schema(schema)).warnings
    assert repr(name) in warning
    assert accepts(grammars, schema, {"a": "b"})


def test_a_format_that_is_known_is_held_without_a_warning(grammars: Grammars) -> None:
    for name in FORMATS - {"unknown"}:
        schema = {"type": "string", "format": name}
        assert grammars.unheld(Grammar.json_schema(schema)) == Unheld()
        assert not accepts(grammars, schema, "?")


def test_unique_items_that_are_not_asked_for(grammars: Grammars) -> None:
    schema = {"$defs": {"list": {"type": "array", "uniqueItems": False}}, "$ref": "#/$defs/list"}
    assert grammars.unheld(Grammar.json_schema(schema)) == Unheld()
    assert accepts(grammars, schema, [1, 1])


def test_only_keywords_are_left_out() -> None:
    """Not names of properties, nor values."""
    schema = {
        "properties": {"format": {"enum": [{"format": "path"}]}, "uniqueItems": False, "enum": {"format": "path"}},
        "$defs": {"format": {"const": {"uniqueItems": False}}},
        "default": {"format": "path"},
    }
    expected = json.loads(json.dumps(schema))
    del expected["properties"]["enum"]["format"]
    assert readable(schema) == (expected, ("Formats of the schema are not applied: 'path'.",))


@pytest.mark.parametrize(
    "schema",
    [
        SET,
        {"not": {"type": "string"}},
        {"oneOf": [{"type": "string"}, {"type": "string", "maxLength": 3}]},
        {"type": "object", "properties": {"a": {}, "b": {}}, "minProperties": 2},
    ],
    ids=lambda schema: next(key for key in ("uniqueItems", "not", "oneOf", "minProperties") if key in schema),
)
def test_what_cannot_be_held_is_refused_unless_the_schema_is_lenient(schema: Any, grammars: Grammars) -> None:
    with pytest.raises(GrammarError, match=r'"x-guidance": \{"lenient": true\}'):
        grammars.prepare(Grammar.json_schema(schema))
    lenient = Grammar.json_schema(schema | LENIENT)
    unheld = grammars.unheld(lenient)
    assert len(unheld.warnings) == 1 and json.loads(unheld.schema) == schema | LENIENT


def test_an_answer_is_checked(grammars: Grammars) -> None:
    unheld = grammars.unheld(Grammar.json_schema(SET | LENIENT))
    assert unheld.verdict("[1, 2]", is_whole=True) == "The answer is checked: it keeps to its schema."
    assert unheld.verdict("[1, 1]", is_whole=True) == "The answer breaks its schema: $: uniqueItems"
    for text, is_whole in (("[1, 1", False), ("[1, 1", True)):
        assert "not checked" in unheld.verdict(text, is_whole=is_whole)


def test_a_check_asks_nobody_else_and_has_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    elsewhere = Unheld((), json.dumps({"$ref": "http://127.0.0.1:9/schema"}))
    assert "not checked" in elsewhere.verdict("1", is_whole=True)
    monkeypatch.setattr(json_schemas, "_SECONDS", 0.2)
    endless = Unheld((), json.dumps({"pattern": "^(a+)+$"}))
    assert "takes more than 0.2 s" in endless.verdict(json.dumps("a" * 40 + "!"), is_whole=True)


def test_a_check_needs_its_package(grammars: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "jsonschema", None)
    with pytest.raises(GrammarError, match=r"pip install 'forerun\[grammar\]'"):
        grammars.prepare(Grammar.json_schema(SET | LENIENT | {"title": "anew"}))


def test_a_grammar_that_holds_a_lenient_schema_says_that_nothing_is_checked(grammars: Grammars) -> None:
    unheld = grammars.unheld(Grammar.lark(f"start: %json {json.dumps(SET | LENIENT)}"))
    assert "not checked" in unheld.warnings[0] and not unheld.schema


def test_a_large_schema_has_the_time_of_two_compilations(grammars: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    given = Grammar.json_schema(LARGE)
    assert len(given.text) > 1 << 16
    grammars.prepare(given)

    class Slow:
        def perform(self, *_: Any, **__: Any) -> Any:
            return {"nbytes": 1, "seconds": 2.1}, b""

    monkeypatch.setattr(grammar, "CHILDREN", Slow())
    with pytest.raises(GrammarError, match=r"takes more than 2 s of processor time\. Correct it"):
        grammars.prepare(Grammar.json_schema(LARGE | {"title": "anew"}))


def test_a_schema_that_its_rewriting_nests_too_deeply(grammars: Grammars) -> None:
    """Whichever step finds it: each has frames of its own."""
    for depth in range(100, 500, 3):
        text = '{"oneOf": [' * depth + "{}" + "]}" * depth
        with suppress(GrammarError):
            readable_text(Grammar.json_schema(text).text)
    with pytest.raises(GrammarError, match="nested too deeply"):
        grammars.prepare(Grammar.json_schema(text))
