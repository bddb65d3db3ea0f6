"""Tools: what templates are told, and the calls that are read from answers, whole or in pieces."""

from __future__ import annotations

import json
from typing import Any

import pytest

from doubles import FakeModel
from forerun import LLM
from forerun.engine.results import Choice, Generation, SequenceStats, StepOutput, StreamChunk
from forerun.errors import RequestBodyError
from forerun.server.protocol.answers import Asked, Chunks
from forerun.server.protocol.model_texts import ModelTexts
from forerun.server.protocol.requests import CHAT_URL, CompletionRequest, parse_body
from small_tokenizers import byte_level

TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool.function.name }};{% endfor %}"
    "{% for m in messages %}{{ m.role }}:{{ m.content }}"
    "{% for c in m.tool_calls %}<tool_call>{{ c.function.name }} {{ c.function.arguments.city }}</tool_call>"
    "{% endfor %}|{% endfor %}"
)
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]
TALK = [{"role": "user", "content": "hello"}]
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln"}}\n</tool_call>'


def tokenizer(template: str = TEMPLATE) -> Any:
    made = byte_level()
    made.chat_template = template
    return made


def asked(**fields: Any) -> CompletionRequest:
    return parse_body(CHAT_URL, {"messages": TALK, "tools": TOOLS, **fields}, 4096)


def prompt(request: CompletionRequest, template: str = TEMPLATE) -> str:
    fake: Any = FakeModel(vocab_size=len(made := tokenizer(template)))
    (one,) = request.requests(LLM(fake, None, tokenizer=made), ModelTexts(made))
    text: str = made.decode(one.prompt_token_ids)
    return text


def test_the_template_is_told() -> None:
    assert prompt(asked()) == "weather;user:hello|"
    assert prompt(asked(tool_choice="none")) == "user:hello|"
    called = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
    messages = [*TALK, {"role": "assistant", "tool_calls": [called]}, {"role": "tool", "content": "dry"}]
    told = prompt(asked(messages=messages))
    assert told == "weather;user:hello|assistant:<tool_call>weather Rome</tool_call>|tool:dry|"


@pytest.mark.parametrize("fields", [{}, {"tools": None, "messages": [{"role": "tool", "content": "dry"}]}], ids=str)
def test_a_template_without_tools(fields: dict[str, Any]) -> None:
    with pytest.raises(RequestBodyError, match="does not carry tools"):
        prompt(asked(**fields), "{{ messages[0].content }}")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tool_choice": "required", "tools": None}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {}}}, "tool_choice"),
        ({"tool_choice": {"type": "allowed_tools"}}, "tool_choice"),
        ({"tools": [{"type": "web_searching"}]}, "tools"),
        ({"tools": [{"type": "custom", "custom": {"name": "a"}}], "tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "custom", "custom": {"name": "a"}}}, "tool_choice"),
        ({"tools": [{"type": "function", "function": {"name": 3}}]}, "tools"),
        ({"tools": "all"}, "tools"),
        ({"messages": [{"role": "assistant", "tool_calls": "a"}]}, "messages"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"function": {}}]}]}, "messages"),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "a", "arguments": "{"}}]}]},
            "messages",
        ),
    ],
    ids=str,
)
def test_what_is_refused(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestBodyError) as caught:
        asked(**fields)
    assert caught.value.param == param


TEXTS: list[tuple[str, str | None, int]] = [
    ("hello", "hello", 0),
    (CALL, None, 1),
    (f"Let me see.\n{CALL}\n{CALL}", "Let me see.", 2),
    ("<tool_call>{</tool_call>", "<tool_call>{</tool_call>", 0),
    ('<tool_call>{"name": 3}</tool_call>', '<tool_call>{"name": 3}', 0),
    ("<tool_call>[1]</tool_call>", "<tool_call>[1]", 0),
    (f"{CALL}<tool_ca", "<tool_ca", 1),
    (CALL[:-14], CALL[:-14], 0),
    ("<tool_call>" + "[" * 100_000 + "</tool_call>", "<tool_call>" + "[" * 100_000 + "</tool_call>", 0),
]


def chunks(request: CompletionRequest) -> Chunks:
    return Chunks(Asked(ModelTexts(tokenizer()), request, [[1]], "it", "7", created=3))


def answer(text: str) -> Generation:
    choice = Choice(0, text, [1], None, "stop", SequenceStats())
    return Generation([1], [choice])


@pytest.mark.parametrize(("text", "content", "count"), TEXTS, ids=lambda value: str(value)[:20])
def test_a_whole_answer(text: str, content: str | None, count: int) -> None:
    (choice,) = chunks(asked()).whole([answer(text)])["choices"]
    assert choice["message"]["content"] == content and choice["finish_reason"] == ("tool_calls" if count else "stop")
    calls = choice["message"].get("tool_calls", [])
    assert len(calls) == count == len({call["id"] for call in calls})
    for call in calls:
        assert call["function"]["name"] == "weather" and json.loads(call["function"]["arguments"]) == {"city": "Köln"}


def test_one_call_at_most() -> None:
    (choice,) = chunks(asked(parallel_tool_calls=False)).whole([answer(CALL + CALL)])["choices"]
    assert len(choice["message"]["tool_calls"]) == 1


def test_an_answer_by_a_grammar_of_its_own_is_content() -> None:
    (choice,) = chunks(asked(structured_outputs={"regex": ".*"})).whole([answer(CALL)])["choices"]
    assert choice["message"]["content"] == CALL and "tool_calls" not in choice["message"]


@pytest.mark.parametrize("size", [1, 3, 1000])
@pytest.mark.parametrize(("text", "content", "count"), TEXTS[:7], ids=lambda value: str(value)[:20])
def test_a_stream(text: str, content: str | None, count: int, size: int) -> None:
    made = chunks(asked(stream=True))
    pieces = [text[at : at + size] for at in range(0, len(text), size)]
    told, reasons, calls = "", [], dict[int, list[str]]()
    for place, piece in enumerate(pieces):
        last = place == len(pieces) - 1
        chunk = StreamChunk(piece, [1], finish_reason="stop" if last else None)
        choice = Choice(0, text, [1], None, "stop", SequenceStats()) if last else None
        for body in made.of(0, StepOutput(1, chunk, choice)):
            delta = body["choices"][0]["delta"]
            told += delta["content"]
            indices = [call["index"] for call in delta.get("tool_calls", [])]
            assert len({*indices}) == len(indices)
            for call in delta.get("tool_calls", []):
                if "id" in call:
                    calls[call["index"]] = [call["function"]["name"], ""]
                calls[call["index"]][1] += call["function"]["arguments"]
            reasons.append(body["choices"][0]["finish_reason"])
    assert told.strip() == (content or "") and reasons[-1] == ("tool_calls" if count else "stop")
    assert [*calls] == list(range(count))
    assert all(name == "weather" and json.loads(text) == {"city": "Köln"} for name, text in calls.values())
