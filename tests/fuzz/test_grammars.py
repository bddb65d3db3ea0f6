"""Random schemas and expressions: what is told depends on the tokens alone, and texts are what they describe."""

from __future__ import annotations

import json
import random
import re
from functools import lru_cache
from typing import Any

import jsonschema
import numpy as np
from hypothesis import given, strategies as st

from forerun import Grammar, GrammarError, SamplingParams
from forerun.errors import GrammarDeadEndError
from forerun.models import find_tokenizer
from forerun.sampling import SequenceConstraint
from forerun.sampling.grammar import Grammars
from forerun.types import Allowed, Sequence, is_allowed
from fuzzing import examples

MOST = 40


@lru_cache(maxsize=1)
def bundled() -> tuple[Any, Grammars]:
    tokenizer: Any = find_tokenizer("bundled")
    return tokenizer, Grammars(tokenizer, "bundled", len(tokenizer))


texts = st.text(st.sampled_from('ab"\\/\n\té€😀 {}[]<|>'), max_size=4)
numbers = st.integers(-1000, 1000) | st.sampled_from([0.5, -2.25, 1e3])


def bounded(low: str, high: str, values: Any, kind: str) -> Any:
    def make(ends: tuple[Any, Any], some: int) -> dict[str, Any]:
        one, other = sorted(ends)
        return {"type": kind} | ({low: one} if some & 1 else {}) | ({high: other} if some & 2 else {})

    return st.builds(make, st.tuples(values, values), st.integers(0, 3))


leaves = st.one_of(
    st.just({"type": "null"}),
    st.just({"type": "boolean"}),
    bounded("minimum", "maximum", st.integers(-300, 300), "integer"),
    bounded("minimum", "maximum", numbers, "number"),
    st.builds(lambda most: {"type": "string", "maxLength": most}, st.integers(0, 6)),
    st.just({"type": "string", "pattern": "^[ab]{1,3}é?$"}),
    st.just({"type": "string", "format": "date"}),
    st.builds(lambda values: {"enum": values}, st.lists(texts | numbers | st.none() | st.booleans(), min_size=1)),
    st.builds(lambda value: {"const": value}, texts | st.lists(st.integers(0, 9), max_size=2)),
)


def nested(inner: Any) -> Any:
    def an_object(properties: dict[str, Any], required: int) -> dict[str, Any]:
        names = [name for at, name in enumerate(properties) if required >> at & 1]
        return {"type": "object", "properties": properties, "required": names, "additionalProperties": False}

    arrays = st.builds(
        lambda items, most: {"type": "array", "items": items, "maxItems": most}, inner, st.integers(0, 3)
    )
    objects = st.builds(an_object, st.dictionaries(texts, inner, max_size=3), st.integers(0, 7))
    return arrays | objects | st.builds(lambda parts: {"anyOf": parts}, st.lists(inner, min_size=1, max_size=3))


schemas = st.recursive(leaves, nested, max_leaves=5)
expressions = st.from_regex(r"\A([ab.]|\[^a\]|(é|\(x\?\))\+?|\(a\|bc\)(\{1,3\})?){1,6}\Z")


def shown(allowed: Allowed) -> Any:
    return allowed.tobytes() if isinstance(allowed, np.ndarray) else type(allowed)


def walk(grammar: Grammar, rng: random.Random) -> str | None:
    """A text drawn under the grammar, with drafts looked at between; None if it has not ended.

    At each step, what is told after random moves is compared with what a matcher tells that has only seen the tokens.
    """
    tokenizer, grammars = bundled()
    end, width = tokenizer.eos_token_id, len(tokenizer)

    def new(token_ids: list[int]) -> Sequence:
        constraint = SequenceConstraint(grammars.prepare(grammar), {end}, width)
        return Sequence(0, [1, *token_ids], 1, SamplingParams(grammar=grammar), constraint=constraint)

    def ask(sequence: Sequence, path: list[int]) -> Allowed:
        assert sequence.constraint is not None
        return sequence.constraint.allowed(sequence, [path])[0]

    sequence = new([])
    for _ in range(MOST):
        bits = ask(sequence, [])
        assert isinstance(bits, np.ndarray), (bits, tokenizer.decode(sequence.output_ids))
        for _ in range(rng.randrange(3)):  # drafts: of allowed tokens mostly
            path: list[int] = []
            at: Allowed = bits
            while isinstance(at, np.ndarray) and len(path) < rng.randrange(1, 5):
                tokens = np.flatnonzero(np.unpackbits(at, bitorder="little", count=width))
                path.append(int(rng.choice(tokens)) if rng.random() < 0.8 else rng.randrange(width))
                at = ask(sequence, path)
            assert shown(at) == shown(ask(new(sequence.output_ids), path)), (sequence.output_ids, path)
            if rng.random() < 0.5:
                assert sequence.constraint is not None
                sequence.constraint.forced(sequence, 5)
        assert shown(ask(new(sequence.output_ids), [])) == shown(bits)
        tokens = np.flatnonzero(np.unpackbits(bits, bitorder="little", count=width))
        token_id = end if is_allowed(bits, end) and rng.random() < 0.5 else int(rng.choice(tokens))
        if token_id == end:
            text: str = tokenizer.decode(sequence.output_ids, clean_up_tokenization_spaces=False)
            return text
        sequence.token_ids.append(token_id)
        if isinstance(ask(sequence, []), GrammarDeadEndError):  # a token that was offered and is refused
            assert isinstance(ask(new(sequence.output_ids), []), GrammarDeadEndError)
            return None
    return None


@examples(60)
@given(schemas, st.integers(0, 2**32))
def test_schemas(schema: Any, seed: int) -> None:
    try:
        text = walk(Grammar.json_schema(schema), random.Random(seed))
    except GrammarError:
        return
    if text is not None:
        jsonschema.validate(json.loads(text), schema)


@examples(40)
@given(expressions, st.integers(0, 2**32))
def test_expressions(pattern: str, seed: int) -> None:
    try:
        text = walk(Grammar.regex(pattern), random.Random(seed))
    except GrammarError:
        return
    assert text is None or re.fullmatch(pattern, text), (pattern, text)
