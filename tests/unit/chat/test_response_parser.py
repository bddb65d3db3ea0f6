"""Answers as each family writes them, read at once and in pieces."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, strategies as st

from family_answers import CASES, CHATML, TOOLS, ParsedMessage, called, form, joined, read
from forerun.chat.response_parser import Delta, ResponseParser
from fuzzing import examples


def cut(text: str, places: Iterable[int]) -> list[str]:
    bounds = [0, *sorted(place % (len(text) + 1) for place in places), len(text)]
    return [text[begin:end] for begin, end in pairwise(bounds)]


@pytest.mark.parametrize("name", CASES)
def test_an_answer_of_each_family(name: str) -> None:
    case = CASES[name]
    deltas, message = read(case, [case.text])
    assert (message.reasoning, message.content, called(message)) == (case.reasoning, case.content, list(case.calls))
    streamed, again = read(case, case.text)  # one character at a time
    assert (joined(streamed), again) == (joined(deltas), message)
    texts = joined(streamed)
    assert texts.get(("reasoning", 0)) == message.reasoning and texts.get(("content", 0)) == message.content
    for index, call in enumerate(message.tool_calls):
        function = call["function"]
        assert texts["tool_call", index] == f"{function['name']} {call['id']} {function['arguments']}"
        assert len(call["id"]) == 9 and call["id"].isalnum()


@pytest.mark.parametrize("name", CASES)
@examples(10)
@given(places=st.lists(st.integers(0, 10_000), max_size=12))
def test_cuts_change_nothing(name: str, places: list[int]) -> None:
    case = CASES[name]
    whole, cuts = read(case, [case.text]), read(case, cut(case.text, places))
    assert (joined(cuts[0]), cuts[1]) == (joined(whole[0]), whole[1])


def test_arguments_come_while_they_are_written() -> None:
    case = CASES["hermes"]
    parser, text = ResponseParser(form(case.written), case.prompt, TOOLS, "request"), case.text
    pushed = text[: text.index("Paris") + 3]
    found = joined(delta for character in pushed for delta in parser.push(character))
    assert found["tool_call", 0].endswith('{"city": "Par') and found["tool_call", 0].startswith("weather ")
    assert parser.kind != "reasoning"


@pytest.mark.parametrize("name", CASES)
def test_an_answer_that_ends_anywhere(name: str) -> None:
    """An answer that ends within a call keeps the text of the call, and loses nothing else."""
    case = CASES[name]
    for size in range(len(case.text)):
        text = case.text[:size]
        deltas, message = read(case, [text])
        assert called(message) == list(case.calls)[: len(message.tool_calls)]
        if len([delta for delta in deltas if delta.name]) > len(message.tool_calls):  # a call that is not closed
            assert message.content is not None and message.content.endswith(text[-10:])
        for kind in ("content", "reasoning"):
            said = "".join(delta.text for delta in deltas if delta.kind == kind)
            assert said == (getattr(message, kind) or "")


UNREADABLE = [
    '<tool_call>\n{"name": "weather", "arguments": {"city": }}\n</tool_call>',
    '<tool_call>\n{"name": "weather", "arguments": {"city": "a\nb"}}\n</tool_call>',
    '<tool_call>\n{"name": "weather", "arguments": {"city": "a"}\n</tool_call>',
    '<tool_call>\n{"name": "weather", "arguments": [1]}\n</tool_call>',
    '<tool_call>\n{"name": 3, "arguments": {}}\n</tool_call>',
    '<tool_call>\n{"name": "weather", "arguments": {"days": NaN}}\n</tool_call>',
    '<tool_call>\n{"name": "weather", "arguments": {"days": ' + "9" * 5000 + "}}\n</tool_call>",
    "<tool_call>\nweather\n</tool_call>",
    "<tool_call>\n" + "[" * 3000 + "]" * 3000 + "\n</tool_call>",
    "<tool_call></tool_call>",
]


@pytest.mark.parametrize("text", UNREADABLE, ids=range(len(UNREADABLE)))
def test_what_is_no_call_is_text(text: str) -> None:
    good = '<tool_call>{"name": "now", "arguments": {}}</tool_call>'
    case = CASES["hermes"]._replace(text=f"Sure.\n{text}\nWell.{good}")
    _, message = read(case, [case.text])
    body = text.removesuffix("\n</tool_call>")  # where the JSON ends, its end mark is no part of it
    assert called(message) == [("now", {})]
    assert message.content is not None and message.content.startswith(f"Sure.\n{body}")
    assert message.content.endswith("\nWell.") and read(case, case.text)[1] == message


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("lfm2", '<|tool_call_start|>[weather(city="\\ud800")]<|tool_call_end|>'),
        ("mistral, a list", '[TOOL_CALLS][{"name": "weather", "arguments": {"city": "\\ud800"}}]'),
        ("hermes", '<tool_call>{"name": "weather", "arguments": {"city": "\\ud800"}}</tool_call>'),
    ],
)
def test_half_a_character_is_no_argument(name: str, text: str) -> None:
    """No answer can hold it: UTF-8 does not have it."""
    case = CASES[name]
    for pieces in ([text], text):
        _, message = read(case._replace(prompt=""), pieces)
        assert not message.tool_calls and "ud800" in (message.content or "")


def test_a_line_break_in_a_string_costs_one_call_alone() -> None:
    broken = '<tool_call>{"name": "weather", "arguments": {"city": "a\nb"}}</tool_call>'
    text = broken + '<tool_call>{"name": "now", "arguments": {}}</tool_call>'
    assert read(CASES["hermes"], text)[1].content == broken and called(read(CASES["hermes"], [text])[1]) == [
        ("now", {})
    ]


MARKS = (
    "<think> </think> <tool_call> </tool_call> <function=now> </function> [TOOL_CALLS] now[ARGS]{} [THINK] <|channel|>"
    "final<|message|> <|end|> <|call|> <tool_call|> <|tool_call_start|> <|tool_call_end|> <｜tool▁call▁end｜> ``` }}; ]"
)


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.calls])
def test_marks_in_a_string_are_text(name: str) -> None:
    case = CASES[name]
    replaced = re.compile(r"Paris|Pa\{r|a < b")
    assert replaced.search(case.text)
    text, calls = (replaced.sub(lambda _: MARKS, each) for each in (case.text, json.dumps(case.calls)))
    for pieces in ([text], text):
        deltas, message = read(case, pieces)
        assert (message.reasoning, message.content) == (case.reasoning, case.content)
        assert [[*call] for call in called(message)] == json.loads(calls)
        assert joined(deltas).get(("content", 0)) == case.content


ESCAPES = {
    "hermes": '<tool_call>{"name": "weather", "arguments": {"city": "\\"</tool_call>\\\\"}}</tool_call>',
    "lfm2": "<|tool_call_start|>[weather(city='\"<|tool_call_end|>\\\\')]<|tool_call_end|>",
    "lfm2, three quotes": '<|tool_call_start|>[weather(city="""\\"\n<|tool_call_end|>\\\\""")]<|tool_call_end|>',
}


@pytest.mark.parametrize("name", ESCAPES)
def test_where_a_string_ends(name: str) -> None:
    for pieces in ([ESCAPES[name]], ESCAPES[name]):
        _, message = read(CASES[name.partition(",")[0]], pieces)
        (call,) = called(message)
        assert call[0] == "weather" and call[1]["city"].endswith("\\") and call[1]["city"][0] == '"'
        assert message.content is None


def test_thinking_that_never_ends() -> None:
    deltas, message = read(CASES["thinking"], "Hm. <tool_call>{} \n")
    assert message == ParsedMessage("", "Hm. <tool_call>{} \n", []) and len(deltas) > 3


def test_without_markup_nothing_is_changed() -> None:
    for text in ("  Hello,\n\n", " \n ", "", "a < b <think", "<tool_call", "\0 \ud7ff <|", "</s>"):
        assert read(CASES["hermes"], text)[1] == ParsedMessage(text, None, [])


def test_without_tools_a_call_is_text() -> None:
    case = CASES["hermes"]
    _, message = read(case, [case.text], tools=[])
    assert message.content == case.text.partition("</think>")[2].lstrip() and not message.tool_calls


def test_a_former_answer_in_the_prompt_is_none_of_this_one() -> None:
    case = CASES["mistral"]
    before = case.text + "</s>[TOOL_RESULTS]12[/TOOL_RESULTS]"
    for prompt in (case.prompt + before, case.prompt + before.replace("[/TOOL_RESULTS]", "")):
        _, message = read(case._replace(prompt=prompt), ["Good."])
        assert message == ParsedMessage("Good.", None, [])


@pytest.mark.parametrize("end", ["", "\n", "Well, "])
def test_thinking_that_the_prompt_begins(end: str) -> None:
    parser = ResponseParser(form(CASES["hermes"].written), CHATML + "<think>" + end, TOOLS, "request")
    assert parser.kind == "reasoning" and parser.push("Hm. ") == [Delta("reasoning", "Hm.")]


@pytest.mark.parametrize("size", [1, 5, 99])
@pytest.mark.parametrize(
    ("written", "begun", "text", "expected"),
    [
        (CASES["hermes"].written, "one, two", " three <x", (" three <x", None, [])),
        (CASES["hermes"].written, "if a <", " b: c", (" b: c", None, [])),
        (CASES["hermes"].written, "<think>\nHm, a", " b\n</think>\n\nSo.", ("So.", " b", [])),
        ("<think></think>", "<think>\nHm, a", " b\n</think>\n\nSo.", ("So.", " b", [])),
        (
            CASES["hermes"].written,
            'See:\n<tool_call>\n{"name": "weather", "arguments": {"city": "Pa',
            'ris", "days": 3}}\n</tool_call>',
            (None, None, [("weather", {"city": "Paris", "days": 3})]),
        ),
    ],
    ids=["text", "half a mark", "thinking", "thinking without an anchor", "a call"],
)
def test_a_message_that_goes_on(written: str, begun: str, text: str, expected: tuple[Any, ...], size: int) -> None:
    thinks = begun.startswith("<think>")
    parser = ResponseParser(form(written), CHATML + begun, TOOLS, "request", goes_on_thinking=thinks)
    deltas = [delta for at in range(0, len(text), size) for delta in parser.push(text[at : at + size])]
    deltas += parser.push("", last=True)
    message = ParsedMessage(parser.content, parser.reasoning or None, parser.calls)
    assert (message.content, message.reasoning, called(message)) == expected
    told = joined(deltas)
    assert told.get(("content", 0)) == expected[0] and told.get(("reasoning", 0)) == expected[1]


def test_thinking_that_the_prompt_has_ended() -> None:
    parser = ResponseParser(form(CASES["hermes"].written), CHATML + "<think>\n\n</think>\n\n", TOOLS, "request")
    assert parser.kind != "reasoning" and parser.push("Good. ") == [Delta("content", "Good.")]


PIECES = [
    *("<think>", "</think>", "<tool_call>", "</tool_call>", "<function=now>", "</function>", "<parameter=city>"),
    *("</parameter>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "[TOOL_CALLS]", "[ARGS]", "[THINK]"),
    *("[/THINK]", "<|channel|>analysis<|message|>", "<|end|>", "<|start|>assistant", "<|call|>", "weather", "now"),
    *("<|channel|>commentary to=functions.now <|constrain|>json<|message|>", "<|channel|>final<|message|>"),
    *("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>", "```json\n", "```"),
    *("<|tool_call>call:now", "<tool_call|>", '<|"|>', "<|tool_call_start|>", "<|tool_call_end|>", "[now()]"),
    *('{"name": "now", ', '"arguments": {}}', '"parameters": {}}', "{", "}", "[", "]", '"', "\\", ":", ",", "\n", " "),
    *("\n", "```json\n", "<tools>", "</tools>", "[", '{"name": "now", "arguments": {}}', '{"name": "then", "a": {}}'),
    *('{"name": "now", "arguments": {"a": 1}}', "{}", "<", "; ", "é", "\U0001f600"),
]


@examples(150)
@given(st.sampled_from(sorted(CASES)), st.lists(st.sampled_from(PIECES), max_size=25), st.booleans())
def test_what_contradicts_the_template(name: str, pieces: list[str], has_tools: bool) -> None:
    """Nothing fails, cuts change nothing, and every word that stands between marks is found again."""
    words = [f"w{index}w" for index in range(len(pieces) + 1)]
    text = words[0] + "".join(piece + word for piece, word in zip(pieces, words[1:]))
    case, tools = CASES[name], TOOLS if has_tools else []
    whole, letters = read(case, [text], tools), read(case, text, tools)
    assert (joined(letters[0]), letters[1]) == (joined(whole[0]), whole[1])
    _, message = whole
    found = f"{message.content} {message.reasoning} {json.dumps(message.tool_calls)}"
    assert [word for word in words if word not in found] == []
