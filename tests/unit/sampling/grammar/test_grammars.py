"""Grammars by llguidance: what may follow makes texts that they describe; what cannot be followed is refused."""

from __future__ import annotations

import json
import random
import re
import sys
from typing import Any

import jsonschema
import numpy as np
import pytest

from forerun import Grammar, GrammarError
from forerun.config import SamplingParams
from forerun.models import find_tokenizer
from forerun.sampling import SequenceConstraint
from forerun.sampling.grammar import Grammars
from forerun.types import Sequence, is_allowed
from small_tokenizers import byte_level, ids_of, sentence_piece

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "größe": {"type": "number", "minimum": -1.5, "maximum": 2},
        "tags": {"type": "array", "items": {"enum": ["ä", 'b"', "c\\", 4, None, True]}, "maxItems": 3},
        "inner": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/point"}]},
    },
    "required": ["name", "tags", "inner"],
    "additionalProperties": False,
    "$defs": {
        "point": {
            "type": "object",
            "properties": {"x": {"type": "integer", "minimum": 3, "maximum": 77}},
            "required": ["x"],
            "additionalProperties": False,
        }
    },
}
DATE = r"[0-9]{4}-(0[1-9]|1[0-2])-[0-3][0-9]( [a-zé]{1,3})?"
LARK = 'start: "(" item ("," item)* ")"\nitem: /[a-c]{1,2}/ | start'


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return find_tokenizer("bundled")


@pytest.fixture(scope="module")
def grammars(tokenizer: Any) -> Grammars:
    return Grammars(tokenizer, "bundled", len(tokenizer) + 21)


def write(grammars: Grammars, grammar: Grammar, tokenizer: Any, seed: int, most: int = 200) -> str | None:
    """A text of tokens drawn from those that are allowed; None if it has not ended after so many."""
    rng, width = random.Random(seed), len(tokenizer) + 21
    end = tokenizer.eos_token_id
    constraint = SequenceConstraint(grammars.prepare(grammar), {end}, width)
    sequence = Sequence(0, [1], 1, SamplingParams(grammar=grammar), constraint=constraint)
    for _ in range(most):
        (bits,) = constraint.allowed(sequence, [[]])
        assert isinstance(bits, np.ndarray), bits
        tokens = np.flatnonzero(np.unpackbits(bits, bitorder="little", count=width))
        assert tokens.max() < len(tokenizer)
        forced = constraint.forced(sequence, 9)
        if forced:
            assert is_allowed(bits, forced[0])
        token_id = end if is_allowed(bits, end) and rng.random() < 0.3 else int(rng.choice(tokens))
        if token_id == end:
            text: str = tokenizer.decode(sequence.output_ids, clean_up_tokenization_spaces=False)
            return text
        forced = forced[:-1] if forced[-1:] == [end] else forced
        sequence.token_ids += forced if forced and rng.random() < 0.5 else [token_id]
    return None


def is_json(text: str, schema: Any) -> None:
    value = json.loads(text)
    jsonschema.validate(value, schema)
    # llguidance may escape what need not be
    if "\\" not in text and not re.search(r"\d", text):
        assert text == json.dumps(value, ensure_ascii=False)


def matches_lark(text: str) -> None:
    inner = re.compile(r"\([a-c]{1,2}(,[a-c]{1,2})*\)")
    while text != "a":
        smaller = inner.sub("a", text)
        assert smaller != text, text
        text = smaller


CASES = {
    "schema": (Grammar.json_schema(SCHEMA), lambda text: is_json(text, SCHEMA)),
    "regex": (Grammar.regex(DATE), lambda text: pytest.fail(text) if re.fullmatch(DATE, text) is None else None),
    "choice": (Grammar.choice(["a+b", "ä\n(", " x"]), lambda text: None if text in ("a+b", "ä\n(", " x") else 1 / 0),
    "lark": (Grammar.lark(LARK), matches_lark),
    "object": (Grammar.json_object(), lambda text: is_json(text, {"type": "object"})),
    "any JSON": (Grammar.json_schema("{}"), lambda text: is_json(text, {})),
}


@pytest.mark.parametrize("name", CASES)
def test_texts_are_what_the_grammar_says(name: str, grammars: Grammars, tokenizer: Any) -> None:
    grammar, check = CASES[name]
    ended = [text for seed in range(12) if (text := write(grammars, grammar, tokenizer, seed)) is not None]
    for text in ended:
        check(text)
    assert len(ended) >= (12 if name in ("regex", "choice") else 3)


@pytest.mark.parametrize("make", [byte_level, sentence_piece], ids=["byte-level", "sentence-piece"])
def test_both_kinds_of_tokenizer(make: Any) -> None:
    tokenizer = make()
    grammars = Grammars(tokenizer, "small", len(tokenizer))
    for seed in range(5):
        text = write(grammars, Grammar.regex("hello( world)?!é+"), tokenizer, seed)
        assert text is None or re.fullmatch("hello( world)?!é+", text)


def test_special_tokens_may_be_named() -> None:
    tokenizer = byte_level()
    grammars = Grammars(tokenizer, "small", len(tokenizer))
    matcher = grammars.prepare(Grammar.lark('start: <|im_end|> "hello"'))()
    (turn,) = ids_of(tokenizer, "<|im_end|>")
    assert matcher.accept(turn)
    # where the text alone is meant, llguidance offers the special token and refuses it
    with pytest.raises(GrammarError, match="refused"):
        grammars.prepare(Grammar.regex(r"<\|im_end\|>"))


INVALID = {
    "a regex": Grammar.regex("(a"),
    "a backreference": Grammar.regex(r"(a)\1"),
    "lark": Grammar.lark("start: nothing"),
    "no start": Grammar.lark('begin: "a"'),
    "a type": Grammar.json_schema({"type": "strange"}),
    "a keyword that would be ignored": Grammar.json_schema({"type": "object", "not": {"type": "string"}}),
    "a reference to nowhere": Grammar.json_schema({"$ref": "#/$defs/nothing"}),
    "a reference to itself": Grammar.json_schema({"$ref": "#"}),
    "a contradiction": Grammar.json_schema({"type": "integer", "minimum": 3, "maximum": 2}),
    "rules without end": Grammar.lark("start: a\na: b\nb: a"),
    "deep nesting": Grammar.regex("(" * 500 + "a" + ")" * 500),
    "a deep schema": Grammar.json_schema('{"items":' * 400 + "{}" + "}" * 400),
    "many alternatives": Grammar.json_schema(
        {"allOf": [{"anyOf": [{"type": "integer", "minimum": i + j} for i in range(8)]} for j in range(8)]}
    ),
    "much to compare": Grammar.lark("start: A\nA: /(.*a.{20}){3}/ & /(.*b.{20}){3}/ & ~/(.*c){5}/"),
    "many optional properties": Grammar.json_schema(
        {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(600)}}
    ),
}


@pytest.mark.parametrize("name", INVALID)
def test_what_cannot_be_followed_is_refused(name: str, grammars: Grammars) -> None:
    with pytest.raises(GrammarError) as caught:
        grammars.prepare(INVALID[name])
    message = str(caught.value)
    assert message.startswith(f"The {INVALID[name].kind} cannot be followed: ")
    assert message.endswith("Correct it, or leave it out.")
    assert len(message) < 500 and "\n" not in message


def test_each_is_prepared_once(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import llguidance

    grammars = Grammars(tokenizer, "bundled", len(tokenizer))
    made: list[str] = []
    original = llguidance.LLMatcher

    class Counting:
        grammar_from_regex = staticmethod(original.grammar_from_regex)

        def __new__(cls, *arguments: Any, **options: Any) -> Any:
            made.append(arguments[1])
            return original(*arguments, **options)

    monkeypatch.setattr(llguidance, "LLMatcher", Counting)
    one, other = grammars.prepare(Grammar.regex("a+"))(), grammars.prepare(Grammar.regex("a+"))()
    (token_id,) = ids_of(tokenizer, "a")
    assert one.accept(token_id)
    assert other.allowed()[1] is False
    assert one.allowed()[1] is True
    assert len(made) == 1
    for number in range(70):
        grammars.prepare(Grammar.regex(f"b{number}"))
    grammars.prepare(Grammar.regex("a+"))
    assert len(made) == 72
    for tenant in ("one", "two", "one", None):  # nobody learns what another tenant has prepared
        grammars.prepare(Grammar.regex("a+"), tenant)
    assert len(made) == 74


def test_without_the_package(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(GrammarError, match=r"pip install 'forerun\[grammar\]'"):
        Grammars(tokenizer, "bundled", len(tokenizer)).prepare(Grammar.json_object())


def test_tokenizers_that_do_not_serve() -> None:
    class Slow:
        all_special_tokens, all_special_ids, eos_token_id = ["</s>"], [0], 0

        def __len__(self) -> int:
            return 3

    with pytest.raises(GrammarError, match="cannot be used with grammars"):
        Grammars(Slow(), "slow", 3).prepare(Grammar.json_object())


class TestGrammar:
    """What can be said of one without a tokenizer."""

    @pytest.mark.parametrize(
        ("make", "reason"),
        [
            (lambda: Grammar.regex(""), "empty"),
            (lambda: Grammar.lark(5), "type int"),  # type: ignore[arg-type]
            (lambda: Grammar.regex("\ud800"), "surrogates"),
            (lambda: Grammar.json_schema("{"), "not JSON"),
            (lambda: Grammar.json_schema("[1]"), "no JSON object"),
            (lambda: Grammar.json_schema("[" * 100_000), "nested too deeply"),
            (lambda: Grammar.json_schema({"minimum": float("nan")}), "cannot be written"),
            (lambda: Grammar.json_schema({"a": object()}), "cannot be written"),
            (lambda: Grammar.choice("abc"), "list of texts"),
            (lambda: Grammar.choice([]), "list of texts"),
            (lambda: Grammar.choice(["", "a"]), "none of them empty"),
            (lambda: Grammar("yaml", "a"), "'yaml'"),
        ],
    )
    def test_is_checked(self, make: Any, reason: str) -> None:
        with pytest.raises(GrammarError, match=reason):
            make()

    def test_shows_nothing_of_its_text(self) -> None:
        assert repr(Grammar.regex("secret")) == "Grammar(regex)"

    def test_keeps_the_order_of_properties(self) -> None:
        schema = {"properties": {"b": {}, "a": {}}}
        assert Grammar.json_schema(schema).text == '{"properties": {"b": {}, "a": {}}}'
        assert Grammar.json_schema(schema) == Grammar.json_schema(json.dumps(schema))

    def test_of_another_type(self) -> None:
        with pytest.raises(GrammarError.__base__, match=r"forerun\.Grammar"):  # type: ignore[arg-type]
            SamplingParams(grammar="[a-z]+")  # type: ignore[arg-type]
