"""Thinking and calls over HTTP, in formats whose markup is text or special tokens; calls that are forced."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from family_answers import CALLS, CASES, TOOLS, Case
from forerun.engine.text import Detokenizer, TokenTexts
from forerun.errors import ConfigError
from forerun.server.kept_responses import KeptResponses
from forerun.server.protocol.bodies import validated
from forerun.server.protocol.responses_api import ResponseBody
from serving import LIMIT, NAME
from small_tokenizers import ids_of
from written_answers import TALK, answered, called, tokenizer_of, written


@pytest.fixture(scope="module", params=["hermes, thinking begun by the prompt", "hermes", "harmony", "mistral"])
def family(request: pytest.FixtureRequest) -> Iterator[tuple[Case, httpx.Client]]:
    with written(request.param) as client:
        yield CASES[request.param], client


@pytest.mark.parametrize("speculative", [True, False])
def test_a_chat(family: tuple[Case, httpx.Client], speculative: bool) -> None:
    case, client = family
    body = answered(client, tools=TOOLS, speculative=speculative)
    (choice,) = body["choices"]
    message = choice["message"]
    assert message["content"] == case.content and choice["finish_reason"] == "tool_calls"
    assert message["reasoning_content"] == message["reasoning"] == case.reasoning
    assert called(message["tool_calls"]) == [*case.calls]
    assert body["usage"]["completion_tokens_details"]["reasoning_tokens"] == 3


def test_a_stream(family: tuple[Case, httpx.Client]) -> None:
    case, client = family
    told: dict[str, str] = {"content": "", "reasoning_content": "", "reasoning": ""}
    calls: list[dict[str, Any]] = []
    events = answered(client, tools=TOOLS, stream=True, stream_options={"include_usage": True})
    for delta in (choice["delta"] for event in events for choice in event["choices"]):
        for kind in told:
            told[kind] += delta.get(kind) or ""
        for call in delta.get("tool_calls", ()):
            if call["index"] == len(calls):
                calls.append(call)
            else:
                calls[call["index"]]["function"]["arguments"] += call["function"]["arguments"]
    assert told["content"] == (case.content or "") and called(calls) == [*case.calls]
    assert told["reasoning"] == told["reasoning_content"] == case.reasoning
    assert events[-2]["choices"][0]["finish_reason"] == "tool_calls"
    assert events[-1]["usage"]["completion_tokens_details"]["reasoning_tokens"] == 3


def test_the_stock_client_joins_a_stream(family: tuple[Case, httpx.Client]) -> None:
    case, client = family
    with openai.OpenAI(base_url=f"{client.base_url}/v1", api_key="none", max_retries=0, timeout=LIMIT) as stock:
        given: Any = {"model": NAME, "messages": TALK["messages"], "tools": TOOLS, "temperature": 0}
        with stock.chat.completions.stream(**given) as stream:
            message = stream.get_final_completion().choices[0].message
    found = [(call.function.name, json.loads(call.function.arguments)) for call in message.tool_calls or ()]
    assert found == [*case.calls] and (message.content or "") == (case.content or "")


def test_messages(family: tuple[Case, httpx.Client]) -> None:
    case, client = family
    tools = [{"name": tool["function"]["name"], "input_schema": {"type": "object"}} for tool in TOOLS]
    fields = {"tools": tools, "max_tokens": 300}
    body = answered(client, "/v1/messages", **fields)
    of: dict[str, list[Any]] = {"thinking": [], "text": [], "tool_use": []}
    for block in body["content"]:
        of[block["type"]].append(block)
    assert [block["thinking"] for block in of["thinking"]] == [case.reasoning] and body["stop_reason"] == "tool_use"
    assert [block["text"] for block in of["text"]] == ([] if case.content is None else [case.content])
    assert [(block["name"], block["input"]) for block in of["tool_use"]] == [*case.calls]
    events = answered(client, "/v1/messages", stream=True, **fields)
    pieces = [event["delta"] for event in events if event["type"] == "content_block_delta"]
    assert "".join(piece.get("thinking", "") for piece in pieces) == case.reasoning
    assert "".join(piece.get("text", "") for piece in pieces).strip() == (case.content or "")
    starts = [event["content_block"] for event in events if event["type"] == "content_block_start"]
    assert [start["name"] for start in starts if start["type"] == "tool_use"] == [name for name, _ in CALLS]


def test_responses(family: tuple[Case, httpx.Client]) -> None:
    case, client = family
    tools: Any = [{"type": "function", **tool["function"], "strict": False} for tool in TOOLS]
    with openai.OpenAI(base_url=f"{client.base_url}/v1", api_key="none", max_retries=0, timeout=LIMIT) as stock:
        given: Any = {"model": NAME, "input": "hello", "tools": tools, "temperature": 0}
        whole = stock.responses.create(**given)
        with stock.responses.stream(**given) as stream:
            events = [*stream]
            final = stream.get_final_response()
    assert [event.sequence_number for event in events] == list(range(len(events)))
    for answer in (whole, final):
        of: dict[str, list[Any]] = {"reasoning": [], "message": [], "function_call": []}
        for item in answer.output:
            of[item.type].append(item)
        assert [item.content[0].text for item in of["reasoning"]] == [case.reasoning] and answer.status == "completed"
        assert "".join(item.content[0].text for item in of["message"]).split() == (case.content or "").split()
        assert [(item.name, json.loads(item.arguments)) for item in of["function_call"]] == [*case.calls]
        assert answer.usage is not None and answer.usage.output_tokens_details.reasoning_tokens == 3
    output = [
        {"type": "function_call_output", "call_id": item.call_id, "output": "dry"} for item in of["function_call"]
    ]
    turns = [{"role": "user", "content": "hello"}, *(item.to_dict() for item in whole.output), *output]
    sent, kept = (
        answered(client, "/v1/responses", messages=None, tools=tools, **given)
        for given in ({"input": turns}, {"input": output, "previous_response_id": whole.id})
    )
    assert sent["status"] == "completed" and sent["usage"]["input_tokens"] == kept["usage"]["input_tokens"]
    assert [item.get("content") for item in sent["output"]] == [item.get("content") for item in kept["output"]]


def test_turns_of_responses_are_messages_of_a_chat() -> None:
    call = {"type": "function_call", "call_id": "1", "name": "weather", "arguments": '{"city": "Rome"}'}
    turns = [
        {"role": "user", "content": "hello"},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        call,
        {**call, "call_id": "2"},
        {"type": "function_call_output", "call_id": "1", "output": [{"type": "input_text", "text": "dry"}]},
    ]
    request = validated(ResponseBody, {"input": turns}).request(4096, {}, KeptResponses(0, 0))
    function = {"name": "weather", "arguments": {"city": "Rome"}}
    calls = [{"id": each, "type": "function", "function": function} for each in ("1", "2")]
    assert request.prompts == [
        [
            {"role": "user", "content": "hello"},
            {"role": "assistant", "content": "", "reasoning_content": "hm", "tool_calls": calls},
            {"role": "tool", "tool_call_id": "1", "content": "dry"},
        ]
    ]


def test_developers_and_thinking_that_was_cut() -> None:
    thought = {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "hm"}]}
    turns = [{"role": "developer", "content": "a"}, thought, {"role": "user", "content": "b"}, thought]
    (chat,) = validated(ResponseBody, {"input": turns}).request(4096, {}, KeptResponses(0, 0)).prompts
    cut = {"role": "assistant", "content": "", "reasoning_content": "hm"}
    assert chat == [{"role": "developer", "content": "a"}, cut, {"role": "user", "content": "b"}, cut]


def test_a_response_template_of_ones_own(tmp_path: Path) -> None:
    path = tmp_path / "template.json"
    path.write_text('{"fields": {"thinking": {"open": "[[", "close": "]]"}, "content": {}}}')
    with written("hermes", "[[Hm.]] Sure.", response_template=path) as client:
        message = answered(client)["choices"][0]["message"]
        assert (message["reasoning"], message["content"]) == ("Hm.", "Sure.")
        refused = client.post("/v1/chat/completions", json={**TALK, "tools": TOOLS})
        assert refused.status_code == 400 and refused.json()["error"]["param"] == "tools"
    path.write_text("{}")
    with pytest.raises(ConfigError, match="no response template"), written("hermes", response_template=path):
        raise AssertionError("it is served")


def test_thinking_without_tools(family: tuple[Case, httpx.Client]) -> None:
    case, client = family
    message = answered(client)["choices"][0]["message"]
    assert message["reasoning_content"] == case.reasoning and "tool_calls" not in message
    assert "Hm." not in message["content"] and "weather" in message["content"]


@pytest.mark.parametrize("name", ["hermes", "harmony"])
def test_a_call_that_the_limit_cuts(name: str) -> None:
    with written(name) as client:
        length, cut = answered(client, tools=TOOLS)["usage"]["completion_tokens"], 0
        for max_tokens in range(1, length, 23):
            choice = answered(client, tools=TOOLS, max_tokens=max_tokens)["choices"][0]
            assert choice["finish_reason"] == "length"
            cut += '"city"' in (choice["message"]["content"] or "") and "tool_calls" not in choice["message"]
        assert cut


EMPTY = {"type": "object", "properties": {}, "additionalProperties": False}
CITY = EMPTY | {"properties": {"city": {"type": "string", "maxLength": 4}, "days": {"enum": [1, 2]}}}
WEATHER = {"name": "weather", "parameters": CITY | {"required": ["city", "days"]}}
FUNCTIONS = [{"type": "function", "function": each} for each in (WEATHER, {"name": "now", "parameters": EMPTY})]


@pytest.mark.parametrize("name", ["llama3", "mistral"])
def test_forced_calls(name: str) -> None:
    """The model wants to say something else, and must call."""
    pytest.importorskip("llguidance")
    tokenizer = tokenizer_of(name, CASES[name])
    bias = {str(ids_of(tokenizer, "[TOOL_CALLS]")[0]): 100} if name == "mistral" else {}
    named = {"type": "function", "function": {"name": "weather"}}
    with written(name, "hello world!") as client:
        said = answered(client, tools=FUNCTIONS, max_tokens=99)["choices"][0]["message"]
        assert (said["content"], said.get("tool_calls")) == ("hello world!", None)
        texts = []
        fields = {"tools": FUNCTIONS, "tool_choice": named, "seed": 3, "temperature": 1, "logit_bias": bias}
        for speculative in (True, False):
            choice = answered(client, speculative=speculative, max_tokens=200, **fields)["choices"][0]
            ((function, arguments),) = called(choice["message"]["tool_calls"])
            assert function == "weather" and arguments["days"] in (1, 2) and len(arguments["city"]) <= 4
            assert choice["finish_reason"] == "tool_calls"
            texts.append([{**call, "id": None} for call in choice["message"]["tool_calls"]])
        assert texts[0] == texts[1]
        required = answered(client, max_tokens=99, **{**fields, "tool_choice": "required", "temperature": 0})
        ((function, _), *_) = called(required["choices"][0]["message"]["tool_calls"])
        assert function in ("weather", "now")
        flat = [{"type": "function", **each} for each in (WEATHER,)]
        fields |= {"tools": flat, "tool_choice": {"type": "function", "name": "weather"}}
        response = answered(client, "/v1/responses", messages=None, input="hello", max_output_tokens=200, **fields)
        assert [item["type"] for item in response["output"]] == ["function_call"]
        tools = [{"name": each["name"], "input_schema": each["parameters"]} for each in (WEATHER,)]
        fields = {"tools": tools, "tool_choice": {"type": "tool", "name": "weather"}, "logit_bias": bias, "seed": 3}
        body = answered(client, "/v1/messages", max_tokens=200, **{**fields, "temperature": 1})
        assert [block["name"] for block in body["content"]] == ["weather"] and body["stop_reason"] == "tool_use"


@pytest.mark.parametrize("name", sorted({*CASES} - {"thinking"}))
def test_a_forced_call_begins_at_once(name: str) -> None:
    """The model wants to say a lot first. It may think, but no longer than its budget."""
    pytest.importorskip("llguidance")
    chosen = {"city": {"enum": ["a", "b"]}, "days": {"enum": ["1", "2"]}}
    tools = [{"name": "weather", "input_schema": EMPTY | {"properties": chosen, "required": [*chosen]}}]
    with written(name, "hello world! " * 20) as client:
        fields: dict[str, Any] = {"tools": tools, "tool_choice": {"type": "any", "disable_parallel_tool_use": True}}
        fields |= {"max_tokens": 500, "thinking": {"type": "enabled", "budget_tokens": 50}}
        answers = []
        for speculative in (True, False):
            body = answered(client, "/v1/messages", speculative=speculative, **fields)
            *thoughts, use = body["content"]
            assert body["stop_reason"] == "tool_use" and use["name"] == "weather" and {*use["input"]} == {*chosen}
            answers.append([[each["thinking"] for each in thoughts], use["input"]])
            events = answered(client, "/v1/messages", speculative=speculative, stream=True, **fields)
            pieces = [event["delta"] for event in events if event["type"] == "content_block_delta"]
            assert not any("text" in piece for piece in pieces)
            thought, call = ("".join(each.get(key, "") for each in pieces) for key in ("thinking", "partial_json"))
            answers.append([[thought] if thought else [], json.loads(call)])
        assert all(each == answers[0] for each in answers)
        assert len(answers[0][0]) >= CASES[name].prompt.endswith(("<think>\n", "<think>"))
        assert all(100 < len(each) <= 150 for each in answers[0][0])


def test_calls_beside_the_format() -> None:
    """In fences, twice, with text around: the same with and without drafts, whole and streamed; not of other tools."""
    call = '```json\n{\n  "name": "weather",\n  "arguments": {"city": "a", "days": 1}\n}\n```'
    other = call.replace("weather", "whether")
    with written("hermes", f"Two:\n{call}\n\n{call}\nDone.\n{other}") as client:
        for speculative in (True, False):
            fields = {"tools": FUNCTIONS, "max_tokens": 300, "speculative": speculative}
            (choice,) = answered(client, **fields)["choices"]
            assert choice["finish_reason"] == "tool_calls"
            assert called(choice["message"]["tool_calls"]) == [("weather", {"city": "a", "days": 1})] * 2
            assert choice["message"]["content"] == f"Two:\nDone.\n{other}"
            deltas = [event["choices"][0]["delta"] for event in answered(client, stream=True, **fields)]
            assert "".join(each["content"] for each in deltas) == choice["message"]["content"]
            names = [call["function"].get("name") for each in deltas for call in each.get("tool_calls", ())]
            assert [name for name in names if name] == ["weather", "weather"]
            for more in ({"tools": None}, {"tool_choice": "none"}):
                assert "tool_calls" not in answered(client, **{**fields, **more})["choices"][0]["message"]
        tools = [{"name": each["name"], "input_schema": each["parameters"]} for each in (WEATHER,)]
        blocks = answered(client, "/v1/messages", tools=tools, max_tokens=300)["content"]
        assert [block["type"] for block in blocks] == ["text", "tool_use", "tool_use"]


def test_strict_calls() -> None:
    """The model writes arguments that the schema does not know; without a call, it may say what it likes."""
    pytest.importorskip("llguidance")
    strict = [{"type": "function", "function": {**WEATHER, "strict": True}}]
    call = '<tool_call>\n{"name": "weather", "arguments": {"town": "a", "days": 1}}\n</tool_call>'
    with written("hermes", call) as client:
        texts = []
        for tools, speculative in ((FUNCTIONS, True), (strict, True), (strict, False)):
            message = answered(client, tools=tools, max_tokens=300, speculative=speculative)["choices"][0]["message"]
            texts.append(next(arguments for _, arguments in called(message["tool_calls"])))
        assert texts[0] == {"town": "a", "days": 1} and texts[1] == texts[2] and [*texts[1]] == ["city", "days"]
    with written("hermes", "hello world!") as client:
        assert answered(client, tools=strict, max_tokens=99)["choices"][0]["message"]["content"] == "hello world!"
    with written("llama3") as client:  # whose calls begin like any JSON
        refused = client.post("/v1/chat/completions", json={**TALK, "tools": strict})
        assert refused.status_code == 400 and refused.json()["error"]["param"] == "tools"


REFUSED: dict[str, dict[str, Any]] = {
    "no such tool": {"tool_choice": {"type": "function", "function": {"name": "then"}}},
    "no schema": {
        "tool_choice": "required",
        "tools": [{"type": "function", "function": {"name": "a", "parameters": 3}}],
    },
    "a wrong schema": {
        "tool_choice": "required",
        "tools": [{"type": "function", "function": {"name": "a", "parameters": {"type": "nonsense"}}}],
    },
    "arguments that are no JSON": {
        "messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "a", "arguments": "{"}}]}]
    },
}


def test_calls_or_an_answer_by_a_schema() -> None:
    """A required call has no answer beside it; else the schema holds for what is no call."""
    pytest.importorskip("llguidance")
    strict = [{"type": "function", "function": {**WEATHER, "strict": True}}]
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": CITY | {"required": ["days"]}}}
    fields = {"tools": strict, "response_format": form, "max_tokens": 300}
    tools = [{"name": "weather", "input_schema": WEATHER["parameters"], "strict": True}]
    config = {"format": {"type": "json_schema", "schema": form["json_schema"]["schema"]}}
    call = '<tool_call>\n{"name": "weather", "arguments": {"city": "a", "days": 1}}\n</tool_call>'
    for text in (call, '{"days": 2}', "hello world!"):
        with written("hermes", text) as client:
            for speculative in (True, False):
                message = answered(client, speculative=speculative, **fields)["choices"][0]["message"]
                if text == call:
                    assert called(message["tool_calls"]) == [("weather", {"city": "a", "days": 1})]
                    assert message["content"] is None
                else:
                    assert json.loads(message["content"])["days"] in (1, 2) and "tool_calls" not in message
            (block,) = answered(client, "/v1/messages", tools=tools, output_config=config, max_tokens=300)["content"]
            assert block.get("input") == ({"city": "a", "days": 1} if text == call else None)
            assert text == call or json.loads(block["text"]) == json.loads(message["content"])
    with written("hermes", f"{call}\n{call}") as client:
        for more in ({}, {"parallel_tool_calls": False}):
            choice = answered(client, tool_choice="required", **fields, **more)
            assert len(choice["choices"][0]["message"]["tool_calls"]) == (1 if more else 2)
        assert choice["usage"]["completion_tokens"] < 100  # of the only call


def test_bad_input() -> None:
    pytest.importorskip("llguidance")
    with written("hermes", "hello") as client:
        for name, fields in REFUSED.items():
            for stream in (False, True):
                body = {**TALK, "tools": TOOLS, "max_tokens": 9, "stream": stream, **fields}
                response = client.post("/v1/chat/completions", json=body)
                assert response.status_code == 400, (name, response.text)
        many = [{"type": "function", "function": {"name": f"f{i}", "parameters": EMPTY}} for i in range(1000)]
        for tools in (many, [*TOOLS, *TOOLS], many[:1] * 3):
            for choice in ("auto", "required"):
                body = {**TALK, "tools": tools, "tool_choice": choice, "max_tokens": 5}
                response = client.post("/v1/chat/completions", json=body)
                assert response.status_code in (200, 400), response.text
                assert choice == "required" or response.status_code == 200 or "context" in response.text


def test_marks_are_shown_between_what_is_shown_anyway() -> None:
    tokenizer = tokenizer_of("harmony", CASES["harmony"])
    texts = TokenTexts(tokenizer)
    ids = tokenizer(CASES["harmony"].text, add_special_tokens=False)["input_ids"]
    marks = {token_id: text for text, token_id in texts.special.items()}
    assert Detokenizer(texts, [], marks).push(ids) == CASES["harmony"].text
    plain = Detokenizer(texts, [])
    assert plain.push(ids) + plain.flush() == tokenizer.decode(ids, skip_special_tokens=True)
