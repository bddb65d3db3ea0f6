"""Calls as published models write them beside their format: in fences and tags, bare, several in a row, amid text."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any, NamedTuple

import pytest
from hypothesis import given, strategies as st

from family_answers import CASES, called, form, joined, read
from forerun.chat.response_parser import ResponseParser
from fuzzing import examples


class Written(NamedTuple):
    """What a model has written, the family of its chat template, and what is read of it."""

    family: str
    text: str
    calls: list[tuple[str, dict[str, Any]]]
    content: str | None = None


def function(name: str, **properties: str) -> dict[str, Any]:
    schema = {"type": "object", "properties": {key: {"type": kind} for key, kind in properties.items()}}
    return {"type": "function", "function": {"name": name, "parameters": schema}}


TOOLS = [
    function("get_weather", city="string", unit="string"),
    function("current_time"),
    function("read_file", path="string"),
    function("edit_file", path="string", old="string", new="string"),
    function("send_email", to="array", subject="string", body="string"),
]
PARIS = ("get_weather", {"city": "Paris", "unit": "celsius"})
ROME = ("get_weather", {"city": "Rome", "unit": "celsius"})
NOW: tuple[str, dict[str, Any]] = ("current_time", {})
CODE = "Here is the function:\n\n```python\ndef add(a, b):\n    return {a: b}\n```\n\nIt adds two numbers."


def fenced(name: str, arguments: Any, indent: int = 2, language: str = "json") -> str:
    return f"```{language}\n{json.dumps({'name': name, 'arguments': arguments}, indent=indent)}\n```"


TEXTS = {
    # Qwen2.5-Coder-Instruct of 0.5 and 1.5 billion parameters (Q4_K_M, greedy)
    "coder, one": Written("hermes", fenced(*PARIS, indent=4), [PARIS]),
    "coder, parallel": Written(
        "hermes",
        f'{fenced(*PARIS)}\n\n{fenced(*ROME)}\n\n```json\n{{\n  "name": "current_time"\n}}\n```',
        [PARIS, ROME, NOW],
    ),
    "coder, quotes in an argument": Written(
        "hermes",
        fenced("edit_file", edit := {"path": "hello.py", "old": "print(1)", "new": 'print("hello")'}),
        [("edit_file", edit)],
    ),
    "coder, a list in an argument": Written(
        "hermes",
        fenced("send_email", mail := {"to": ["bob@example.com", "ann@example.com"], "subject": "At 3", "body": "."}),
        [("send_email", mail)],
    ),
    "coder, a tool of its own": Written("hermes", other := fenced("add", {"a": 2, "b": 2}), [], other),
    "coder, none": Written("hermes", "Sea whispers,\nWhispers of waves,\nSilent peace.", [], None),
    "coder, code": Written("hermes", CODE, [], CODE),
    # Qwen2.5-Coder of 7 to 32 billion: reports of ollama, Codex and vLLM
    "coder 14b": Written("hermes", '{"name": "read_file", "arguments": {"path": "."}}', [("read_file", {"path": "."})]),
    "coder 7b, lines": Written(
        "hermes",
        '{"name": "read_file", "arguments": {"path": "a"}}\n{"name": "current_time", "arguments": {}}',
        [("read_file", {"path": "a"}), NOW],
    ),
    "coder 7b, lines of one object": Written(
        "hermes", '{\n"name": "read_file",\n"arguments": {\n"path": "a"\n}\n}', [("read_file", {"path": "a"})]
    ),
    "coder, tools as a tag": Written("hermes", '<tools>\n{"name": "current_time", "arguments": {}}\n</tools>', [NOW]),
    "coder, text around": Written(
        "hermes", f"I will look.\n\n{fenced(*PARIS)}\n\nThen I answer.", [PARIS], "I will look.\n\nThen I answer."
    ),
    "coder, two in one fence": Written(
        "hermes",
        '```json\n{"name": "current_time", "arguments": {}}\n{"name": "read_file", "arguments": {"path": "a"}}\n```',
        [NOW, ("read_file", {"path": "a"})],
    ),
    "coder, a fence around the format": Written(
        "hermes",
        '```xml\n<tool_call>\n{"name": "read_file", "arguments": {"path": "a"}}\n</tool_call>\n```\nDone.',
        [("read_file", {"path": "a"})],
        "```xml\n```\nDone.",
    ),
    # SmolLM2 (the format of its card) and xLAM: lists
    "smollm2": Written(
        "hermes",
        '<tool_call>[\n{"name": "current_time", "arguments": {}},\n{"name": "read_file", "arguments": {"path": "a"}}\n]'
        "</tool_call>",
        [NOW, ("read_file", {"path": "a"})],
    ),
    "smollm2, none": Written("hermes", "<tool_call>[]</tool_call>", [], "<tool_call>[]"),
    "xlam": Written(
        "hermes",
        json.dumps([{"name": name, "arguments": arguments} for name, arguments in (PARIS, NOW)]),
        [PARIS, NOW],
    ),
    # Llama 3.2: arguments are parameters, or are not; a type, a fence, several by semicolons or lines
    "llama": Written("llama3", '{"name": "current_time", "parameters": {}}', [NOW]),
    "llama, arguments": Written(
        "llama3", '{"name": "read_file", "arguments": {"path": "a"}}', [("read_file", {"path": "a"})]
    ),
    "llama, typed": Written(
        "llama3",
        '{"type": "function", "name": "read_file", "parameters": {"path": "a"}}\n'
        '{"type": "function", "function": {"name": "current_time", "parameters": {}}}',
        [("read_file", {"path": "a"}), NOW],
    ),
    "llama, fenced": Written(
        "llama3",
        'I call it:\n```\n{"name": "read_file", "parameters": {"path": "a"}}\n```',
        [("read_file", {"path": "a"})],
        "I call it:",
    ),
    "llama, no tool": Written("llama3", '{"name": "Bob", "parameters": {}}', [], '{"name": "Bob", "parameters": {}}'),
    # Mistral without its mark (mistral-large, Mistral Small 3.1)
    "mistral": Written(
        "mistral, a list",
        json.dumps([{"name": name, "arguments": arguments} for name, arguments in (PARIS, ROME)]),
        [PARIS, ROME],
    ),
    "mistral, fenced": Written("mistral", f"Sure.\n{fenced(*PARIS, language='')}", [PARIS], "Sure."),
    # LFM2 and Qwen3-Coder
    "lfm2": Written("lfm2", fenced(*PARIS, language="tool_call"), [PARIS]),
    "qwen3-coder": Written(
        "qwen3-coder", '{"arguments": {"path": "a"}, "name": "read_file"}', [("read_file", {"path": "a"})]
    ),
    # what only looks like calls
    "a definition": Written("hermes", shown := f"```json\n{json.dumps(TOOLS[0], indent=2)}\n```\n", [], shown),
    "a list of definitions": Written("hermes", shown := json.dumps([each["function"] for each in TOOLS]), [], shown),
    "a schema of parameters": Written(
        "hermes", shown := json.dumps({"name": "get_weather", "description": "?", "parameters": {}}), [], shown
    ),
    "within JSON": Written(
        "hermes", shown := '{"plan": [{"name": "current_time", "arguments": {}}], "done": true}', [], shown
    ),
    "in a sentence": Written("hermes", shown := 'Use `{"name": "current_time", "arguments": {}}`.', [], shown),
    "not closed": Written("hermes", shown := '```json\n{"name": "read_file", "arguments": {"path": "a"}', [], shown),
    "no JSON": Written("hermes", shown := '```json\n{"name": "read_file", "arguments": {"path": a}}\n```\n', [], shown),
    "half a fence": Written("hermes", shown := "Text.\n\n  ```json\n  {\n", [], shown),
    "arguments are a list": Written("hermes", shown := '{"name": "read_file", "arguments": ["a"]}', [], shown),
    "arguments as text": Written(
        "hermes", '{"name": "read_file", "arguments": "{\\"path\\": \\"a\\"}"}', [("read_file", {"path": "a"})]
    ),
}


@pytest.mark.parametrize("name", TEXTS)
def test_calls_that_models_write_beside_their_format(name: str) -> None:
    written = TEXTS[name]
    case = CASES[written.family]._replace(prompt="")
    content = written.text if written.content is None and not written.calls else written.content
    whole = read(case, [written.text], TOOLS)
    assert (called(whole[1]), whole[1].content) == (written.calls, content)
    streamed = read(case, written.text, TOOLS)
    assert (joined(streamed[0]), streamed[1]) == (joined(whole[0]), whole[1])
    said = joined(streamed[0]).get(("content", 0), "")
    assert said.rstrip() == (content or "").rstrip()  # nothing of a call was sent as text
    assert read(case, [written.text], [])[1].content == written.text  # without tools


def test_what_a_stream_holds_back() -> None:
    """Text is held back while it may be the beginning of a call, and arguments come while they are written."""
    case = CASES["hermes"]._replace(prompt="")
    call, other = fenced(*PARIS), fenced("add", {"a": 2})
    for text, pushed, kind, told in (
        (f"Well.\n{call}", "Well.\n```json", "content", "Well."),
        (call, '```json\n{\n  "name": "get_weather"', "tool_call", None),
        (call, '```json\n{\n  "name": "get_weather",\n  "arguments": {\n', "tool_call", "{\n"),
        (other, '```json\n{\n  "name": "add"', "content", '```json\n{\n  "name": "add"'),
        ("```json\n[1, 2]\n```", "```json\n[1", "content", "```json\n[1"),
        ('{"name": 3}', '{"name": 3', "content", '{"name": 3'),
    ):
        assert text.startswith(pushed)
        parser = ResponseParser(form(case.written), "", TOOLS, "request")
        deltas = [delta for character in pushed for delta in parser.push(character)]
        assert ("".join(delta.text for delta in deltas if delta.kind == kind) or None) == told, pushed
        assert {delta.kind for delta in deltas if delta.text} <= {kind}


MARKS = [
    *("```json\n", "```\n", "```", "\n", " ", "<tools>", "</tools>", "<json>", "[", "]", ",", ";", "{", "}", "Well. "),
    *('{"name": "current_time"}', '{"name": "current_time", "arguments": {}}', '{"name": "add", "arguments": {}}'),
    *(
        '{"type": "function", "function": ',
        '{"arguments": {"a": "b\\n"}, "name": "read_file"}',
        '{"name": "read_file", ',
    ),
    *('"arguments": {"path": "', '"}}', '"arguments": 3}', "<tool_call>", "</tool_call>", "<think>", "</think>", "{}"),
]


@examples(150)
@given(st.lists(st.sampled_from(MARKS), max_size=12), st.lists(st.integers(0, 10_000), max_size=6))
def test_cuts_change_nothing_of_what_only_looks_like_calls(pieces: list[str], places: list[int]) -> None:
    """Without words between them, so that fences, tags and objects come in any order."""
    text = "".join(pieces)
    bounds = [0, *sorted(place % (len(text) + 1) for place in places), len(text)]
    for family in ("hermes", "llama3", "mistral, a list", "qwen3-coder"):
        case = CASES[family]._replace(prompt="")
        whole = read(case, [text], TOOLS)
        for cuts in (text, [text[begin:end] for begin, end in pairwise(bounds)]):
            found = read(case, cuts, TOOLS)
            assert (joined(found[0]), found[1]) == (joined(whole[0]), whole[1])
