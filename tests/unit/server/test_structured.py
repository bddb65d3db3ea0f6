"""Structured output through OpenAI's own client: the answer has the form that was asked for, whoever drafts."""

from __future__ import annotations

import json
from typing import Any

import httpx
import openai
import pytest

from forerun.sampling.grammar import Grammars
from serving import NAME, Served, fake_llm, serving

pytest.importorskip("llguidance")

MESSAGES: Any = [{"role": "user", "content": "hello"}]
SCHEMA = {
    "type": "object",
    "properties": {"world": {"type": "string", "maxLength": 4}, "a": {"enum": [1, 2]}},
    "required": ["world", "a"],
    "additionalProperties": False,
}
FORMAT: Any = {"type": "json_schema", "json_schema": {"name": "it", "schema": SCHEMA}}


def check(text: str) -> None:
    found = json.loads(text)
    assert set(found) == {"world", "a"} and len(found["world"]) <= 4 and found["a"] in (1, 2)


@pytest.mark.parametrize("extra", [{}, {"speculative": False}], ids=str)
def test_a_schema(client: openai.OpenAI, extra: dict[str, Any]) -> None:
    request: Any = {"model": NAME, "messages": MESSAGES, "seed": 3, "response_format": FORMAT, "extra_body": extra}
    text = client.chat.completions.create(**request).choices[0].message.content
    assert text is not None
    check(text)
    chunks = client.chat.completions.create(stream=True, **request)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == text
    if extra:
        del request["extra_body"]
        assert client.chat.completions.create(**request).choices[0].message.content == text


def test_a_response(client: openai.OpenAI) -> None:
    form: Any = {"format": {"type": "json_schema", "name": "it", "schema": SCHEMA}}
    answer = client.responses.create(model=NAME, input="hello", text=form, extra_body={"seed": 3})
    check(answer.output_text)
    assert answer.status == "completed"


def test_an_answer_says_what_was_not_held(http: httpx.Client) -> None:
    """In its warnings, whichever the endpoint; the last of them is what came of the check of a lenient schema."""
    schema = json.loads(json.dumps(SCHEMA))
    schema["properties"]["world"]["format"] = "place"
    schema["properties"]["a"]["not"] = {"enum": [1, 2]}
    refused = http.post("/v1/chat/completions", json={"messages": MESSAGES, "response_format": wrapped(schema)})
    assert refused.status_code == 400 and '"lenient": true' in refused.json()["error"]["message"]
    schema["x-guidance"] = {"lenient": True}
    own = {"format": {"type": "json_schema", "name": "it", "schema": schema}}
    bodies: dict[str, dict[str, Any]] = {
        "/v1/chat/completions": {"messages": MESSAGES, "response_format": wrapped(schema)},
        "/v1/completions": {"prompt": "hello", "max_tokens": 99, "response_format": wrapped(schema)},
        "/v1/responses": {"input": "hello", "text": own},
        "/v1/messages": {"messages": MESSAGES, "max_tokens": 99, "output_config": own},
    }
    for url, body in bodies.items():
        (format_told, not_held, verdict) = http.post(url, json=body).raise_for_status().json()["warnings"]
        assert "'place'" in format_told and '"not"' in not_held and verdict == "The answer breaks its schema: $.a: not"
        streamed = http.post(url, json=body | {"stream": True}).raise_for_status().text
        assert streamed.count(verdict) == 1
    cut = http.post("/v1/completions", json=bodies["/v1/completions"] | {"max_tokens": 2}).json()["warnings"]
    assert "not checked" in cut[-1]
    plain = {"messages": MESSAGES, "response_format": FORMAT}
    assert "warnings" not in http.post("/v1/chat/completions", json=plain).json()


def wrapped(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "it", "schema": schema}}


def test_what_is_refused(served: Served, http: httpx.Client) -> None:
    wrong: list[dict[str, Any]] = [
        {"type": "json_schema", "json_schema": {"name": "it", "schema": {"type": "nonsense"}}},
        wrapped({"oneOf": [{"type": 5}, {"type": "string"}]}),
        wrapped({"oneOf": [{"type": None}, {"type": [[]]}]}),
        wrapped(json.loads('{"oneOf": [' * 300 + "{}" + "]}" * 300)),
        {"type": "json_schema"},
        {"type": "json_schema", "json_schema": {"name": "it", "schema": {"$ref": "http://elsewhere/schema"}}},
    ]
    for each in wrong:
        for stream in (False, True):
            body = {"messages": MESSAGES, "response_format": each, "stream": stream, "max_tokens": 4}
            refused = http.post("/v1/chat/completions", json=body)
            assert refused.status_code == 400 and refused.json()["error"]["type"] == "invalid_request_error"
    served.settle()


def test_each_key_prepares_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the time to the first token tells which schemas others use."""
    made: list[str | None] = []
    compiled = Grammars._compile
    monkeypatch.setattr(
        Grammars, "_compile", lambda self, grammar, tenant: made.append(tenant) or compiled(self, grammar, tenant)
    )
    body = {"messages": MESSAGES, "response_format": FORMAT, "max_tokens": 2}
    with serving(fake_llm(), api_key=("one", "two")) as served:
        numbers = []
        for key in ("one", "one", "two", "two"):
            headers = {"authorization": f"Bearer {key}"}
            assert httpx.post(f"{served.url}/v1/chat/completions", json=body, headers=headers).status_code == 200
            numbers.append(len(made))
    assert numbers == [1, 1, 2, 2]
