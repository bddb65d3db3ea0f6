"""A rewritten schema allows what the given one does, and llguidance holds it."""

from __future__ import annotations

import random
from contextlib import suppress
from time import thread_time
from typing import Any

import pytest
from jsonschema import Draft7Validator, Draft202012Validator

from forerun.errors import GrammarError
from forerun.sampling.schema_rewriting import Rewriter, Work

NAMES = ("a", "b", "c")
TYPES = ["object", "object", "string", "integer", "number", "null", "boolean", "array", ["object", "null"]]
PET = {"type": "object", "properties": {"kind": {"const": "cat"}}, "required": ["kind"]}
HELD = {
    "values": {"oneOf": [{"const": 1}, {"const": 2}, {"enum": [True, None]}]},
    "references": {"$defs": {"a": {"type": "string"}}, "oneOf": [{"$ref": "#/$defs/a"}, {"type": ["null", "array"]}]},
    "a tag behind a reference": {
        "definitions": {"cat": PET},
        "oneOf": [{"$ref": "#/definitions/cat"}, {"type": "object", "properties": {"kind": {"enum": ["dog", "cow"]}}}],
    },
    "one of two properties": {"type": "object", "oneOf": [{"required": ["a"]}, {"required": ["b"]}]},
    "not both": {"type": "object", "not": {"required": ["a", "b"]}},
    "dependencies": {"type": "object", "dependencies": {"a": ["b"], "b": {"properties": {"c": {"type": "null"}}}}},
}


class Drawn:
    """Schemas and values."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)

    def names(self) -> list[str]:
        return [name for name in NAMES if self.rng.random() < 0.5]

    def scalar(self) -> Any:
        return self.rng.choice([None, True, False, 0, 1, "x", "y", 1.0, 1.5])

    def value(self, depth: int = 0) -> Any:
        which = self.rng.random()
        if which < 0.3 or depth > 1:
            return self.scalar()
        if which < 0.85:
            return {name: self.value(depth + 1) for name in self.names()}
        return [self.value(depth + 1) for _ in range(self.rng.randint(0, 2))]

    def schema(self, depth: int = 0) -> Any:
        rng = self.rng
        if rng.random() < 0.1:
            return rng.random() < 0.7
        if depth == 1 and rng.random() < 0.15:
            return {"$ref": f"#/definitions/{rng.choice('pq')}"}

        def part() -> Any:
            names: dict[str, Any] = {"required": self.names()}
            return self.schema(depth + 1) if rng.random() < 0.7 else names | rng.choice([{}, {"type": "object"}])

        makers = {
            "type": lambda: rng.choice(TYPES),
            "enum": lambda: [self.scalar(), self.scalar()],
            "const": self.scalar,
            "required": self.names,
            "additionalProperties": lambda: rng.random() < 0.3,
            "uniqueItems": lambda: False,
            "format": lambda: "path",
            "properties": lambda: {name: part() for name in self.names()},
            "dependencies": lambda: {rng.choice(NAMES): rng.choice([self.names(), part()])},
            "not": part,
            "oneOf": lambda: [part() for _ in range(rng.randint(1, 3))],
            "anyOf": lambda: [part(), part()],
            "allOf": lambda: [part()],
        }
        keys = [key for key in makers if rng.random() < 0.25 and (depth < 3 or key not in [*makers][7:])]
        rng.shuffle(keys)
        return {key: makers[key]() for key in keys}


@pytest.mark.parametrize("seed", range(4))
def test_the_same_values_fit(seed: int) -> None:
    drawn = Drawn(seed)
    num_changed = 0
    for _ in range(150):
        given = {"allOf": [drawn.schema()], "definitions": {name: drawn.schema(2) for name in "pq"}}
        made = Rewriter(given).rewritten(given)
        num_changed += made != given
        for value in (drawn.value() for _ in range(8)):
            assert Draft7Validator(made).is_valid(value) == Draft7Validator(given).is_valid(value), (given, value)
    assert num_changed > 50


@pytest.mark.parametrize("name", HELD)
def test_what_is_held(name: str) -> None:
    llguidance = pytest.importorskip("llguidance")
    made = Rewriter(HELD[name]).rewritten(HELD[name])
    source = llguidance.LLMatcher.grammar_from_json_schema(made)
    assert llguidance.LLMatcher.validate_grammar(source) == ""
    assert llguidance.LLMatcher.validate_grammar(llguidance.LLMatcher.grammar_from_json_schema(HELD[name])) != ""


def test_a_keyword_that_a_reference_leads_to_stays() -> None:
    schema = {"oneOf": [{"const": 1}, {"const": 2}], "properties": {"a": {"$ref": "#/oneOf/0"}}}
    assert Rewriter(schema).rewritten(schema) == schema


@pytest.mark.parametrize(
    "schema",
    [
        {"not": {"type": "object", "required": ["a"]}},
        {"oneOf": [{"not": {"type": "object", "required": ["a"]}}, {"type": "string"}]},
        {"oneOf": [{"required": ["a"]}, {"type": "object", "required": ["b"]}]},
        {"oneOf": [{"required": ["a"]}, {"required": ["b"]}]},
        {"oneOf": [{"const": 2**53}, {"const": 2.0**53}]},
        {"oneOf": [{"const": 10**400}, {"const": -(10**400)}]},
        {"oneOf": [{"const": 0}, {"const": -0.0}]},
        {"dependentRequired": {"oneOf": ["a"], "not": ["b"], "a": ["b"], "b": ["a"]}},
    ],
    ids=lambda schema: str(schema)[:60],
)
def test_the_same_values_of_each_type_fit(schema: Any) -> None:
    made = Rewriter(schema).rewritten(schema)
    for value in ("a", 5, 0, 2**53, 10**400, -(10**400), None, [], {}, {"a": 1}, {"b": 1}, {"a": 1, "b": 1}):
        assert Draft202012Validator(made).is_valid(value) == Draft202012Validator(schema).is_valid(value), value


def test_many_choices_are_not_compared_for_long() -> None:
    schema = {"oneOf": [{"const": number} for number in range(1_000)]}
    rewriter = Rewriter(schema)
    assert rewriter.rewritten(schema) == schema
    assert rewriter._work.compared < 20_000


def reference(name: str) -> dict[str, Any]:
    return {"$ref": f"#/$defs/{name}"}


def defined(**definitions: Any) -> dict[str, Any]:
    """Return choices that exclude each other only if no parts of x fit y."""
    return {"$defs": definitions, "oneOf": [reference("x"), reference("y" if "y" in definitions else "x")]}


HOSTILE: dict[str, Any] = {
    "values that are compared often": defined(
        x={"anyOf": [reference("a")] * 300}, y={"enum": [*range(30_000, 60_000)]}, a={"enum": [*range(30_000)]}
    ),
    "values of one hash": defined(
        x={"enum": [(2**61 - 1) * i for i in range(9_000)]}, y={"enum": [(2**61 - 1) * i for i in range(9_001, 18_000)]}
    ),
    "types": defined(x={"allOf": [reference("y")] * 3_000}, y={"type": ["string"] * 50_000}),
    "a circle of schemas": defined(x={"allOf": [reference("x")] * 90_000, "anyOf": [reference("x")] * 2}),
    "long references": defined(x={"allOf": [reference("y")] * 9_000}, y={"$ref": "#" + "/$defs/y" * 60_000}),
    "references to references": {
        "$defs": {f"d{i}": reference(f"d{i + 1}") for i in range(9_000)},
        "oneOf": [reference("d0")] * 200,
    },
    "choices that require much": {"oneOf": [{"required": [f"{k}{i}" for i in range(40_000)]} for k in "abcd"]},
    "many parts": {"anyOf": [{}] * 400_000},
}


@pytest.mark.parametrize("name", HOSTILE)
def test_no_schema_takes_long(name: str) -> None:
    started = thread_time()
    with suppress(GrammarError):
        Rewriter(HOSTILE[name]).rewritten(HOSTILE[name])
    assert thread_time() - started < 1


def test_many_schemas_of_a_request_take_no_longer_than_one() -> None:
    schema = defined(x={"allOf": [reference("x")] * 100})
    work = Work()
    for _ in range(5):
        assert Rewriter(schema, work).rewritten(schema) == schema
    assert work.compared < 20_000
    work.parts = 99_990
    with pytest.raises(GrammarError, match="more than 100000 parts"):
        Rewriter(schema, work).rewritten(schema)


WRONG: list[Any] = [None, 5, True, "x", [], {}, [[]], [{}], [None, 5], {"a": 5}, {"a": [[]]}]


KEYWORDS = """
type enum const required properties additionalProperties patternProperties $ref $defs anyOf allOf oneOf not format
uniqueItems dependencies dependentRequired dependentSchemas
"""


@pytest.mark.parametrize("key", KEYWORDS.split())
def test_what_is_no_schema_is_left_to_llguidance(key: str) -> None:
    for value in WRONG:
        for more in ({}, {"type": "object"}, {"required": ["a"]}):
            wrong = {key: value} | more
            for schema in (
                wrong,
                {"not": wrong},
                {"oneOf": [wrong, wrong, {"type": "string"}]},
                wrong | {"oneOf": [wrong, {}]},
            ):
                Rewriter(schema).rewritten(schema)
