"""/v1/messages: the answers of the chat's offline twin, in Anthropic's form, whole and as events."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from forerun import Generation, Grammar, SamplingParams
from forerun.engine.results import Choice, SequenceStats, StepOutput, StreamChunk
from forerun.server.protocol.answers import Asked
from forerun.server.protocol.bodies import validated
from forerun.server.protocol.messages_api import MessageEvents, MessagesBody
from forerun.server.protocol.model_texts import ModelTexts
from serving import NAME, Served, failing_forwards, fake_llm, serving
from small_tokenizers import byte_level

URL = "/v1/messages"
TALK: dict[str, Any] = {"max_tokens": 9, "messages": [{"role": "user", "content": "hello"}], "temperature": 0}
TOOL = {"name": "weather", "description": "Tell.", "input_schema": {"type": "object"}}


def events_of(text: str) -> list[dict[str, Any]]:
    """The events of a stream, each named by its type."""
    found = []
    for part in text.strip().split("\n\n"):
        if part.startswith(": progress "):
            continue
        name, data = part.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found


def joined(events: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The content blocks that events make, and how the answer ends."""
    blocks: list[dict[str, Any]] = []
    is_open, pieces = False, ""
    for event in events:
        if event["type"] == "content_block_start":
            assert not is_open and event["index"] == len(blocks)
            blocks.append(dict(event["content_block"]))
            is_open, pieces = True, ""
        elif event["type"] == "content_block_delta":
            assert is_open and event["index"] == len(blocks) - 1
            delta = event["delta"]
            pieces += delta.get("text") or delta.get("thinking") or delta.get("partial_json", "")
        elif event["type"] == "content_block_stop":
            kind = blocks[-1]["type"]
            blocks[-1] |= {"input": json.loads(pieces)} if kind == "tool_use" else {kind: pieces}
            is_open = False
    assert not is_open
    kinds = [event["type"] for event in events]
    assert kinds[0] == "message_start" and kinds[-2:] == ["message_delta", "message_stop"]
    return blocks, events[-2]["delta"]


@pytest.mark.parametrize("speculative", [True, False])
def test_an_answer(served: Served, http: httpx.Client, speculative: bool) -> None:
    body = {**TALK, "model": NAME, "system": [{"type": "text", "text": "a"}], "speculative": speculative}
    twin = served.llm.generate(
        [{"role": "system", "content": "a"}, *TALK["messages"]], SamplingParams(temperature=0, max_tokens=9)
    )
    answer = http.post(URL, json=body).json()
    assert answer["content"] == [{"type": "text", "text": twin.text}] and answer["stop_reason"] == "max_tokens"
    assert answer["type"] == "message" and answer["role"] == "assistant" and answer["id"].startswith("msg_")
    usage = answer["usage"]
    assert usage["output_tokens"] == 9
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == len(twin.prompt_token_ids)
    events = events_of(http.post(URL, json={**body, "stream": True}).text)
    assert joined(events) == (answer["content"], {"stop_reason": "max_tokens", "stop_sequence": None})
    counted = http.post(f"{URL}/count_tokens", json={"messages": body["messages"], "system": "a"}).json()
    assert counted == {"input_tokens": len(twin.prompt_token_ids)}
    amid = [{"role": "system", "content": [{"type": "text", "text": "a"}]}, *TALK["messages"]]  # as Claude Code's
    assert http.post(f"{URL}/count_tokens", json={"messages": amid}).json() == counted


def test_a_last_message_of_the_assistant_goes_on(served: Served, http: httpx.Client) -> None:
    messages = [*TALK["messages"], {"role": "assistant", "content": "a wor"}]
    params = SamplingParams(temperature=0, max_tokens=9)
    twin = served.llm.chat(messages, params, continue_final_message=True)
    assert served.llm.tokenizer.decode(twin.prompt_token_ids) == "user: hello\nassistant: a wor"
    in_blocks = [*TALK["messages"], {"role": "assistant", "content": [{"type": "text", "text": "a wor"}]}]
    for given in (messages, in_blocks):
        answer = http.post(URL, json={**TALK, "messages": given}).json()
        assert answer["content"] == [{"type": "text", "text": twin.text}]
        assert (
            joined(events_of(http.post(URL, json={**TALK, "messages": given, "stream": True}).text))[0]
            == answer["content"]
        )
        counted = http.post(f"{URL}/count_tokens", json={"messages": given}).json()
        assert counted == {"input_tokens": len(twin.prompt_token_ids)}
    chat = {**TALK, "messages": messages, "continue_final_message": True}
    for fields in ({}, {"add_generation_prompt": False}):
        answer = http.post("/v1/chat/completions", json={**chat, **fields}).json()
        assert answer["choices"][0]["message"]["content"] == twin.text
    told = http.post("/tokenize", json={"messages": messages, "continue_final_message": True}).json()
    assert told["tokens"] == twin.prompt_token_ids
    anew = http.post("/v1/chat/completions", json={**chat, "continue_final_message": False}).json()
    assert anew["usage"]["prompt_tokens"] == len(served.llm.encode(messages)) > len(twin.prompt_token_ids)
    refused = http.post("/v1/chat/completions", json={**chat, "messages": TALK["messages"]})
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "messages"
    both = http.post("/v1/chat/completions", json={**chat, "add_generation_prompt": True})
    assert both.status_code == 400 and both.json()["error"]["param"] == "continue_final_message"


def test_a_result_that_is_an_error_is_told_as_one() -> None:
    results: list[dict[str, Any]] = [{"is_error": True, "content": "no city"}, {"is_error": True}, {"content": "dry"}]
    blocks = [{"type": "tool_result", "tool_use_id": "1", **result} for result in results]
    body = validated(MessagesBody, {**TALK, "messages": [{"role": "user", "content": blocks}]})
    (chat,) = body.request(4096, {}).prompts
    assert [message["content"] for message in chat] == ["Error: no city", "Error", "dry"]


def test_an_answer_by_a_schema(served: Served, http: httpx.Client) -> None:
    pytest.importorskip("llguidance")
    schema = {"type": "object", "properties": {"city": {"enum": ["Oslo", "Lima"]}}, "required": ["city"]}
    config = {"format": {"type": "json_schema", "schema": schema | {"additionalProperties": False}}}
    body = {**TALK, "max_tokens": 99, "output_config": config}
    params = SamplingParams(temperature=0, max_tokens=99, grammar=Grammar.json_schema(config["format"]["schema"]))
    answer = http.post(URL, json=body).json()
    assert answer["content"] == [{"type": "text", "text": served.llm.generate(TALK["messages"], params).text}]
    assert json.loads(answer["content"][0]["text"])["city"] in ("Oslo", "Lima") and answer["stop_reason"] == "end_turn"
    assert joined(events_of(http.post(URL, json={**body, "stream": True}).text))[0] == answer["content"]


def test_which_stop_sequence_it_was(http: httpx.Client) -> None:
    text = http.post(URL, json=TALK).json()["content"][0]["text"]
    stopped = http.post(URL, json={**TALK, "stop_sequences": ["nowhere", text[3:5]]}).json()
    assert (stopped["stop_reason"], stopped["stop_sequence"]) == ("stop_sequence", text[3:5])
    ended = http.post(URL, json={**TALK, "stop_token_ids": list(range(250))}).json()
    assert (ended["stop_reason"], ended["stop_sequence"]) == ("end_turn", None)


def test_turns_are_messages_of_a_chat() -> None:
    use = {"type": "tool_use", "id": "1", "name": "weather", "input": {"city": "Rome"}}
    messages = [
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": [{"type": "thinking", "thinking": "hm", "signature": ""}, use]},
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "1", "content": [{"type": "text", "text": "dry"}]},
                {"type": "text", "text": "so?", "cache_control": {"type": "ephemeral"}},
            ],
        },
    ]
    request = validated(
        MessagesBody,
        {
            **TALK,
            "messages": messages,
            "tools": [TOOL],
            "system": "a",
            "thinking": {"type": "disabled"},
            "output_config": {"effort": "low"},
        },
    ).request(4096, {})
    call = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": {"city": "Rome"}}}
    assert request.prompts == [
        [
            {"role": "system", "content": "a"},
            {"role": "user", "content": "hello"},
            {"role": "assistant", "content": "", "reasoning_content": "hm", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "1", "content": "dry"},
            {"role": "user", "content": "so?"},
        ]
    ]
    function = {"name": "weather", "description": "Tell.", "parameters": {"type": "object"}}
    assert request.tools == ({"type": "function", "function": function},)
    assert request.template_options == {"enable_thinking": False, "reasoning_effort": "low"}


@pytest.mark.parametrize("size", [1, 3, 1000])
def test_calls_and_text_around_them(size: int) -> None:
    call = '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln"}}\n</tool_call>'
    text = f" Let me see.\n{call}\n{call}"
    request = validated(MessagesBody, {**TALK, "tools": [TOOL]}).request(4096, {})

    tokenizer = byte_level()
    tokenizer.chat_template = "{{ tools }} <tool_call> </tool_call>"

    def form() -> MessageEvents:
        return MessageEvents(Asked(ModelTexts(tokenizer), request, [[1]], "it", "7", created=3))

    choice = Choice(0, text, [1], None, "stop", SequenceStats())
    generations = [Generation([1], [choice])]
    whole = form().whole(generations)
    assert len({use.get("id") for use in whole["content"]}) == 3
    use = {"type": "tool_use", "name": "weather", "input": {"city": "Köln"}}
    assert [{**each, "id": None} for each in whole["content"][1:]] == [{**use, "id": None}] * 2
    assert whole["content"][0] == {"type": "text", "text": " Let me see."}
    assert whole["stop_reason"] == "tool_use"
    streamed = form()
    events = [*streamed.begun()]
    for at in range(0, len(text), size):
        ends = at + size >= len(text)
        chunk = StreamChunk(text[at : at + size], [1], finish_reason="stop" if ends else None)
        events += streamed.of(0, StepOutput(1, chunk, choice if ends else None))
    blocks, end = joined([*events, *streamed.last(generations)])
    assert blocks == whole["content"]
    assert end == {"stop_reason": "tool_use", "stop_sequence": None}


REFUSED: dict[str, dict[str, Any]] = {
    "max_tokens": {"max_tokens": None},
    "messages": {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
    "tools": {"tools": [{"type": "web_20250305", "name": "web_search"}]},
    "tool_choice": {"tool_choice": {"type": "tool"}},
    "tools, without a schema": {"tools": [{"type": "custom", "name": "search"}]},
    "tool_choice, of a tool that is left out": {
        "tools": [{"type": "web_search_20250305", "name": "web_search"}],
        "tool_choice": {"type": "tool", "name": "web_search"},
    },
    "n": {"n": 2},
    "container": {"container": "x"},
    "output_config": {"output_config": {"format": {"type": "json_schema"}}},
}


@pytest.mark.parametrize(("param", "fields"), REFUSED.items(), ids=REFUSED.keys())
def test_what_is_refused(http: httpx.Client, param: str, fields: dict[str, Any]) -> None:
    response = http.post(URL, json={**TALK, **fields})
    assert response.status_code == 400 and response.json()["type"] == "error"
    assert response.json()["error"]["param"] == param.partition(",")[0]
    assert param != "messages" or "only text is read" in response.json()["error"]["message"]


def test_the_key_may_come_in_a_header_of_its_own() -> None:
    with serving(fake_llm(), api_key=("one",)) as served:
        for key, status in (("one", 200), ("two", 401)):
            assert httpx.post(served.url + URL, json=TALK, headers={"x-api-key": key}).status_code == status


def test_a_failure_in_a_stream(served: Served, http: httpx.Client) -> None:
    with failing_forwards(served.llm):
        told = events_of(http.post(URL, json={**TALK, "stream": True}).text)
    assert told[-1]["type"] == "error" and "secret" not in str(told)
