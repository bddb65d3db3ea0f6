"""A rewritten schema allows what the given one does, and llguidance holds it."""

from __future__ import annotations

import random
from typing import Any

import pytest
from jsonschema import Draft7Validator

from forerun.sampling.schema_rewriting import Rewriter

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
            return self.schema(depth + 1) if rng.random() < 0.7 else {"required": self.names()}

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


def test_many_choices_are_not_compared_for_long() -> None:
    schema = {"oneOf": [{"const": number} for number in range(1_000)]}
    rewriter = Rewriter(schema)
    assert rewriter.rewritten(schema) == schema
    assert rewriter._compared < 20_000
