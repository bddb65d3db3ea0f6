"""What a body says of the form of its answers."""

from __future__ import annotations

from typing import Any

import pytest

from forerun import Grammar, GrammarDeadEndError, GrammarError
from forerun.errors import RequestBodyError
from forerun.server.kept_responses import KeptResponses
from forerun.server.protocol.bodies import validated
from forerun.server.protocol.errors import error_response
from forerun.server.protocol.requests import CHAT_URL, COMPLETIONS_URL, CompletionRequest, parse_body
from forerun.server.protocol.responses_api import ResponseBody

SCHEMA = {"type": "object", "properties": {"b": {"type": "string"}, "a": {"type": "integer"}}}
STRICT = {"type": "json_schema", "json_schema": {"name": "x", "description": "y", "strict": True, "schema": SCHEMA}}


def grammar(**fields: Any) -> Grammar | None:
    chat = parse_body(CHAT_URL, {"messages": [{"role": "user", "content": "hello"}], **fields}, 99)
    completion = parse_body(COMPLETIONS_URL, {"prompt": "hello", **fields}, 99)
    assert chat.params.grammar == completion.params.grammar
    return chat.params.grammar


def parse_response(body: Any, context_length: int) -> CompletionRequest:
    return validated(ResponseBody, body).request(context_length, {}, KeptResponses(0, 0))


def test_forms() -> None:
    schema = Grammar.json_schema(SCHEMA)
    assert grammar() is None
    assert grammar(response_format=None) is None
    assert grammar(response_format={"type": "text"}) is None
    assert grammar(response_format={"type": "json_object"}) == Grammar.json_object()
    assert grammar(response_format=STRICT) == schema
    assert grammar(response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}) == schema
    assert grammar(response_format={"type": "json_object", "schema": SCHEMA}) == schema
    assert grammar(guided_json=SCHEMA) == grammar(guided_json=schema.text) == schema
    assert grammar(guided_regex="a+") == Grammar.regex("a+")
    assert grammar(guided_choice=["a", "b"]) == Grammar.choice(["a", "b"])
    assert grammar(guided_grammar='start: "a"') == Grammar.lark('start: "a"')
    assert grammar(structured_outputs={"json": SCHEMA}) == schema
    assert grammar(structured_outputs={"json": schema.text}) == schema
    assert grammar(structured_outputs={"json_object": True}) == Grammar.json_object()
    assert grammar(structured_outputs={"json_object": False}) is None
    assert grammar(structured_outputs={"regex": "a+", "choice": None}) == Grammar.regex("a+")
    assert grammar(structured_outputs={"choice": ["a", "b"]}) == Grammar.choice(["a", "b"])
    assert grammar(structured_outputs={"grammar": 'start: "a"'}) == Grammar.lark('start: "a"')


@pytest.mark.parametrize(
    "value",
    [
        "json_object",
        {},
        {"type": "yaml"},
        {"type": "json_schema"},
        {"type": "json_schema", "json_schema": {}},
        {"type": "json_schema", "json_schema": {"schema": []}},
        {"type": "json_schema", "json_schema": {"schema": {}, "strict": "yes"}},
        {"type": "json_schema", "json_schema": {"schema": {}, "other": 1}},
        {"type": "json_object", "schema": "a"},
    ],
)
def test_a_response_format_that_is_refused(value: Any) -> None:
    with pytest.raises(RequestBodyError) as caught:
        grammar(response_format=value)
    assert caught.value.param == "response_format"


@pytest.mark.parametrize(
    "value",
    [
        "a",
        {},
        {"regex": "a", "json": {}},
        {"regex": 5},
        {"regex": ""},
        {"choice": "ab"},
        {"choice": []},
        {"json": "{"},
        {"json": 3},
        {"structural_tag": "x"},
        {"structural_tag": {"type": "structural_tag", "format": {}}},
        {"structural_tag": "{}"},
    ],
)
def test_structured_outputs_that_are_refused(value: Any) -> None:
    with pytest.raises(RequestBodyError) as caught:
        grammar(structured_outputs=value)
    assert caught.value.param == "structured_outputs"


def test_the_text_of_a_response() -> None:
    for nothing in ({}, {"format": None}, {"format": {"type": "text"}, "verbosity": None}):
        assert parse_response({"input": "hello", "text": nothing}, 99).params.grammar is None
    given = {"format": {"type": "json_object"}}
    asked = parse_response({"input": "hello", "text": given}, 99)
    assert asked.params.grammar == Grammar.json_object() and asked.repeated["text"] == given
    assert parse_response({"input": "hello", "text": {"verbosity": "low", **given}}, 99).ignored == ("text.verbosity",)
    for text in ({"tone": "low"}, {"tone": "low", **given}, {"format": "json_object"}):
        with pytest.raises(RequestBodyError) as caught:
            parse_response({"input": "hello", "text": text}, 99)
        assert caught.value.param == "text"


def test_two_forms() -> None:
    with pytest.raises(RequestBodyError, match="Give one of them"):
        grammar(structured_outputs={"regex": "a"}, response_format={"type": "json_object"})
    assert grammar(structured_outputs={"regex": "a"}, response_format={"type": "text"}) == Grammar.regex("a")


@pytest.mark.parametrize("error", [GrammarError("x"), GrammarDeadEndError("x")])
def test_the_request_is_at_fault(error: Exception) -> None:
    status, body = error_response(error)
    assert status == 400
    assert body["error"]["type"] == "invalid_request_error"
