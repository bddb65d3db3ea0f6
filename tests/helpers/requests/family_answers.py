"""Answers with thinking and calls of tools as each family writes them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence as Seq
from typing import Any, NamedTuple

from forerun.chat.response_format import ResponseFormat, find_format
from forerun.chat.response_parser import Delta, ResponseParser

WEATHER = {
    "city": {"type": "string"},
    "days": {"type": "integer"},
    "exact": {"anyOf": [{"type": "boolean"}, {"type": "null"}]},
    "places": {"type": "array"},
}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": WEATHER}}},
    {"type": "function", "function": {"name": "now"}},
]
CALLS = [("weather", {"city": "Paris", "days": 3}), ("now", {})]
CHATML = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"


class Case(NamedTuple):
    """An answer, what stands in the family's chat template, and what the answer holds."""

    written: str
    text: str
    prompt: str = ""
    reasoning: str | None = "Hm."
    content: str | None = "Sure."
    calls: Seq[tuple[str, dict[str, Any]]] = CALLS


CASES = {
    "hermes": Case(
        "<tool_call>\n{...}\n</tool_call> <think></think>",
        '<think>\nHm.\n</think>\n\nSure.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Paris", "days": 3}}\n'
        '</tool_call>\n<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>\nDone.',
        CHATML,
        content="Sure.\nDone.",
    ),
    "hermes, thinking begun by the prompt": Case(
        "<tool_call>\n{...}\n</tool_call> <think></think>",
        'Hm.\n</think>\n\n<tool_call>{"name": "weather", "arguments": {"city": "Paris", "days": 3}}</tool_call>'
        '<tool_call>{"arguments": {}, "name": "now"}</tool_call>',
        CHATML + "<think>\n",
        content=None,
    ),
    "qwen3-coder": Case(
        "<tool_call>\n<function=' + name + '>\n</function>\n</tool_call>",
        "Sure.\n\n<tool_call>\n<function=weather>\n<parameter=city>\nParis\n</parameter>\n<parameter=days>\n3\n"
        "</parameter>\n</function>\n</tool_call>\n<tool_call>\n<function=now>\n</function>\n</tool_call>",
        CHATML,
        reasoning=None,
    ),
    "qwen3.5, code as an argument": Case(
        "<tool_call>\n<function=' + name + '>\n</function>\n</tool_call><think></think>",
        "Hm.\n</think>\n\n<tool_call>\n<function=weather>\n<parameter=city>\n    if a < b:\n\n        return {}\n"
        '</parameter>\n<parameter=places>\n["a", {"b": null}]\n</parameter>\n<parameter=exact>\nTrue\n</parameter>\n'
        "</function>\n</tool_call>",
        CHATML + "<think>\n",
        content=None,
        calls=[
            ("weather", {"city": "    if a < b:\n\n        return {}", "places": ["a", {"b": None}], "exact": True})
        ],
    ),
    "glm": Case(
        "<tool_call>{name}<arg_key></arg_key></tool_call></think>",
        "\n<think>Hm.</think>\nSure.\n<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Paris</arg_value>\n"
        "<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n</tool_call><tool_call>now</tool_call>",
        "[gMASK]<sop><|user|>\nHi<|assistant|>",
    ),
    "llama3": Case(
        '{"name": function name, "parameters": dictionary of argument name and its value}',
        '{"name": "weather", "parameters": {"city": "Paris", "days": 3}}; {"type": "function", "name": "now", '
        '"parameters": {}}',
        "<|start_header_id|>assistant<|end_header_id|>\n\n",
        reasoning=None,
        content=None,
    ),
    "mistral": Case(
        "[TOOL_CALLS] [ARGS] [THINK] [/THINK]",
        '[THINK]Hm.[/THINK]Sure.[TOOL_CALLS]weather[ARGS]{"city": "Paris", "days": 3}[TOOL_CALLS]now[CALL_ID]abcdefghi'
        "[ARGS]{}",
        "<s>[INST]Hi[/INST]",
    ),
    "mistral, a list": Case(
        "[TOOL_CALLS] [",
        '[TOOL_CALLS] [{"name": "weather", "arguments": {"city": "Paris", "days": 3}, "id": "abcdefghi"}, '
        '{"name": "now", "arguments": {}}]',
        "<s>[INST] Hi[/INST]",
        reasoning=None,
        content=None,
    ),
    "harmony": Case(
        "<|start|>assistant<|channel|>final<|message|>",
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary<|message|>Sure.<|end|>"
        "<|start|>assistant<|channel|>commentary to=functions.weather <|constrain|>json<|message|>"
        '{"city": "Paris", "days": 3}<|call|><|start|>assistant to=functions.now<|channel|>commentary json<|message|>{}'
        "<|call|><|start|>assistant<|channel|>final<|message|>Done.",
        "<|start|>user<|message|>Hi<|end|><|start|>assistant",
        content="Sure.\n\nDone.",
    ),
    "deepseek": Case(
        "<think></think><｜tool▁calls▁begin｜><｜tool▁call▁begin｜><｜tool▁sep｜>",
        'Hm.</think>Sure.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>{"city": "Paris", "days": 3}'
        "<｜tool▁call▁end｜><｜tool▁call▁begin｜>now<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        "<｜User｜>Hi<｜Assistant｜><think>",
    ),
    "deepseek v3": Case(
        "<think></think><｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' + type + '<｜tool▁sep｜>",
        "Sure.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n"
        '{"city": "Paris", "days": 3}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n'
        "```json\n{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        "<｜User｜>Hi<｜Assistant｜>",
        reasoning=None,
    ),
    "gemma4": Case(
        "<|tool_call>call:' + name + '<tool_call|><channel|>",
        '<|channel>thought\nHm.\n<channel|>Sure.<|tool_call>call:weather{city:<|"|>Pa{r,b:is "\\<|"|>,days:3,'
        'places:[<|"|>a<|"|>,{b_c:null}]}<tool_call|><|tool_call>call:now{}<tool_call|>',
        "<|turn>user\nHi<turn|>\n<|turn>model\n",
        calls=[("weather", {"city": 'Pa{r,b:is "\\', "days": 3, "places": ["a", {"b_c": None}]}), ("now", {})],
    ),
    "lfm2": Case(
        "List of tools: <|tool_list_start|>[",
        "Sure.<|tool_call_start|>[weather(city='Paris', days=3), now()]<|tool_call_end|>",
        CHATML,
        reasoning=None,
    ),
    "thinking": Case("{% if '</think>' in content %}", "Hm.\n</think>\n\nSure.", "[BOT]<think>\n", calls=[]),
}


class ParsedMessage(NamedTuple):
    """A whole answer."""

    content: str | None
    reasoning: str | None
    tool_calls: list[dict[str, Any]]


def parsed(parser: ResponseParser) -> ParsedMessage:
    return ParsedMessage(parser.content, parser.reasoning or None, parser.calls)


def form(written: str) -> ResponseFormat:
    found = find_format(written)
    assert found is not None
    return found


def read(case: Case, pieces: Iterable[str], tools: Any = TOOLS) -> tuple[list[Delta], ParsedMessage]:
    parser = ResponseParser(form(case.written), case.prompt, tools, "request")
    deltas = [delta for piece in pieces for delta in parser.push(piece)]
    return [*deltas, *parser.push("", last=True)], parsed(parser)


def called(message: ParsedMessage) -> list[tuple[str, dict[str, Any]]]:
    functions = [call["function"] for call in message.tool_calls]
    return [(function["name"], json.loads(function["arguments"])) for function in functions]


def joined(deltas: Iterable[Delta]) -> dict[tuple[str, int], str]:
    """The texts by kind and call, each with the name and id that were announced first."""
    texts: dict[tuple[str, int], str] = {}
    for delta in deltas:
        is_known = (delta.kind, delta.index) in texts
        assert is_known or delta.kind != "tool_call" or (delta.name and delta.id and not delta.text)
        begun = f"{delta.name} {delta.id} " if delta.name else ""
        texts[delta.kind, delta.index] = texts.get((delta.kind, delta.index), "") + begun + delta.text
    return texts
