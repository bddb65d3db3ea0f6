"""Grammars of calls: right ones are followed, and others are not."""

from __future__ import annotations

from typing import Any

import pytest

from family_answers import CASES, called, form, read
from forerun.chat.forced_calls import Forced, call_grammar
from forerun.config import Grammar
from forerun.errors import GrammarError
from forerun.sampling.grammar import Grammars
from small_tokenizers import byte_level, bytes_of

pytest.importorskip("llguidance")

PROPERTIES = {"city": {"type": "string"}, "days": {"type": "integer"}, "unit": {"enum": ["C", "F"]}}
WEATHER = {"type": "object", "properties": PROPERTIES, "required": ["city", "days"], "additionalProperties": False}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "parameters": WEATHER}},
    {"type": "function", "function": {"name": "now"}},
]
SPECIAL = [
    *("<tool_call>", "</tool_call>", "<think>", "</think>", "[TOOL_CALLS]", "[ARGS]", "[THINK]", "[/THINK]"),
    *("<|channel|>", "<|message|>", "<|end|>", "<|start|>", "<|constrain|>", "<|call|>"),
    *(
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁call▁begin｜>",
        "<｜tool▁sep｜>",
        "<｜tool▁call▁end｜>",
        "<｜tool▁calls▁end｜>",
    ),
    *("<|tool_call_start|>", "<|tool_call_end|>", "<|tool_call>", "<tool_call|>", '<|"|>', "<channel|>"),
]
WRITTEN = {
    "hermes": '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris", "days": 3}}\n</tool_call>',
    "qwen3-coder": "<tool_call>\n<function=weather>\n<parameter=city>\nParis\n</parameter>\n<parameter=days>\n3\n"
    "</parameter>\n</function>\n</tool_call>",
    "glm": "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Paris</arg_value>\n<arg_key>days</arg_key>\n"
    "<arg_value>3</arg_value>\n</tool_call>",
    "llama3": '{"name": "weather", "parameters": {"city": "Paris", "days": 3}}',
    "mistral": '[TOOL_CALLS]weather[ARGS]{"city": "Paris", "days": 3}',
    "mistral, a list": '[TOOL_CALLS] [{"name": "weather", "arguments": {"city": "Paris", "days": 3}}]',
    "harmony": '<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{"city": "Paris", "days": 3}',
    "deepseek": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>"
    '{"city": "Paris", "days": 3}<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
    "lfm2": '<|tool_call_start|>[weather(city="Paris", days=3)]<|tool_call_end|>',
    "gemma4": '<|tool_call>call:weather{city:<|"|>Paris<|"|>,days:3}<tool_call|>',
}
THOUGHTS = {
    "harmony": "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant",
    "mistral": "[THINK]Hm.[/THINK]",
    "hermes": "<think>\nHm.\n</think>\n\n",
    "glm": "<think>Hm.</think>\n",
    "deepseek": "<think>\nHm.\n</think>\n\n",
    "gemma4": "<|channel>thought\nHm.\n<channel|>",
}
"""What may come before a call that is required: nothing else may."""


@pytest.fixture(scope="module", params=["text", "special", "added"])
def tokenizer(request: pytest.FixtureRequest) -> Any:
    """Markup is text like any other, special tokens, or added tokens, as Qwen's: those of the form <...> are no text
    to llguidance either."""
    made = byte_level()
    if request.param == "special":
        made.add_special_tokens({"additional_special_tokens": SPECIAL})
    if request.param == "added":
        made.add_tokens(SPECIAL)
    return made


def special_of(tokenizer: Any) -> dict[str, int]:
    return Grammars(tokenizer, "m", len(tokenizer)).special()


def follows(tokenizer: Any, grammar: str | None, text: str) -> bool:
    """Whether a text is all that a grammar allows, and may end there."""
    assert grammar is not None
    matcher = Grammars(tokenizer, "m", len(tokenizer)).prepare(Grammar.lark(grammar))()
    return all(map(matcher.accept, tokenizer(text, add_special_tokens=False)["input_ids"])) and matcher.allowed()[1]


@pytest.mark.parametrize("name", WRITTEN)
def test_calls_of_each_family(name: str, tokenizer: Any) -> None:
    case, call, before = CASES[name]._replace(prompt=""), WRITTEN[name], THOUGHTS.get(name, "")
    required = call_grammar(form(case.written), TOOLS, special_of(tokenizer))
    by_name = call_grammar(form(case.written), TOOLS, special_of(tokenizer), name="now")
    assert follows(tokenizer, required, call) and follows(tokenizer, required, before + call)
    assert called(read(case, before + call, TOOLS)[1])[-1] == ("weather", {"city": "Paris", "days": 3})
    wrong = [before, "", call[:-1], call.replace("3", '"3"').replace(">\n3\n", ">\nx\n").replace(">3<", ">x<")]
    wrong += [f"Sure. {call}", f"{before}Sure.{call}", f"\n{call}"]
    wrong += [call.replace("weather", "whether"), call.replace("city", "town"), call.replace("days", "city")]
    assert [text for text in wrong if follows(tokenizer, required, text)] == []
    assert not follows(tokenizer, by_name, call)
    no_arguments = _without_arguments(name, call)
    assert follows(tokenizer, by_name, before + no_arguments) and follows(tokenizer, required, no_arguments)
    assert called(read(case, no_arguments, TOOLS)[1]) == [("now", {})]


def _without_arguments(name: str, call: str) -> str:
    call = call.replace("weather", "now").replace('{"city": "Paris", "days": 3}', "{}")
    ends = {"<parameter=city>": "</function>", "<arg_key>": "</tool_call>", "city=": ")]", "city:": "}<"}
    for begin, end in ends.items():
        if begin in call:
            call = call[: call.index(begin)] + call[call.index(end) :]
    return call


def test_thinking_ends_before_a_call(tokenizer: Any) -> None:
    special, call = special_of(tokenizer), WRITTEN["hermes"]
    begun = call_grammar(form(CASES["hermes"].written), TOOLS, special, is_thinking=True)
    assert follows(tokenizer, begun, f"Hm.\n</think>{call}") and not follows(tokenizer, begun, call)
    grammar = call_grammar(form(CASES["hermes"].written), TOOLS, special)
    assert not follows(tokenizer, grammar, f"<think>{call}")
    mentions = f"<think> <tool_call> </think>{call}"
    assert follows(tokenizer, grammar, mentions) == ("<tool_call>" not in special)


@pytest.mark.parametrize("name", ["hermes", "harmony"])
def test_thinking_before_a_required_call_ends_with_its_budget(name: str, tokenizer: Any) -> None:
    special, call, thought = special_of(tokenizer), WRITTEN[name], THOUGHTS[name].replace("Hm.", "a" * 30)
    for budget, fits in ((11, True), (9, False)):  # of three characters a token, line breaks too
        grammar = call_grammar(form(CASES[name].written), TOOLS, special, budget=budget)
        assert follows(tokenizer, grammar, thought + call) == fits
    free = call_grammar(form(CASES[name].written), TOOLS, special, budget=1, is_required=False)
    assert follows(tokenizer, free, thought + call)


@pytest.mark.parametrize("name", WRITTEN)
def test_strict_schemas_without_force(name: str, tokenizer: Any) -> None:
    call = WRITTEN[name]
    grammar = call_grammar(form(CASES[name].written), TOOLS, special_of(tokenizer), is_required=False)
    if name == "llama3":  # its calls begin like any JSON
        assert grammar is None
        return
    assert follows(tokenizer, grammar, call)
    assert not follows(tokenizer, grammar, call.replace("city", "town"))
    said = "<|channel|>final<|message|>Sure." if name == "harmony" else "Sure."
    assert follows(tokenizer, grammar, said)


@pytest.mark.parametrize("name", WRITTEN)
def test_calls_or_json(name: str, tokenizer: Any) -> None:
    call, written = WRITTEN[name], form(CASES[name].written)
    grammar = call_grammar(
        written, TOOLS, special_of(tokenizer), is_required=False, one_call=True, answer={"enum": [{"a": 1}]}
    )
    head = "<|channel|>final<|message|>" if name == "harmony" else ""
    if name == "llama3":  # its calls begin like any JSON
        assert grammar is None
        return
    assert follows(tokenizer, grammar, call) and follows(tokenizer, grammar, head + '{"a": 1}')
    for text in (f"{head}Sure.", f'{head}{{"a": 2}}', f"Sure. {call}", f"{call}\n{call}", f'{head}{{"a": 1}}{call}'):
        assert not follows(tokenizer, grammar, text), text
    if name == "hermes":
        assert follows(tokenizer, grammar, '<think>\nHm.\n</think>\n\n{"a": 1}')


@pytest.mark.parametrize("name", ["hermes", "mistral"])
def test_a_call_is_not_spelled_in_free_text(name: str, tokenizer: Any) -> None:
    special, written, trigger = special_of(tokenizer), form(CASES[name].written), WRITTEN[name].partition("weather")[0]
    for is_required in (False, True):
        grammar = call_grammar(written, TOOLS, special, is_required=is_required)
        matcher = Grammars(tokenizer, "m", len(tokenizer)).prepare(Grammar.lark(grammar or ""))()
        assert not all(map(matcher.accept, bytes_of(tokenizer, f"{trigger}whether")))


def test_several_calls_and_optional_arguments() -> None:
    tokenizer, written = byte_level(), CASES["qwen3-coder"].written
    unit = "<parameter=unit>\nC\n</parameter>\n"
    call = WRITTEN["qwen3-coder"].replace("</function>", unit + "</function>")
    grammar = call_grammar(form(written), TOOLS, special_of(tokenizer))
    assert follows(tokenizer, grammar, f"{call}\n{call}\n{WRITTEN['qwen3-coder']}")
    assert follows(tokenizer, grammar, f"{call}\n") and not follows(tokenizer, grammar, f"{call}\n\n")
    assert not follows(tokenizer, grammar, call.replace("\nC\n", "\nK\n"))
    optional = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"$ref": "#/$defs/b"}, "c": {}}}
    tools = [{"function": {"name": "f", "parameters": optional | {"$defs": {"b": {"type": "string"}}}}}]
    grammar = call_grammar(form(CASES["lfm2"].written), tools, special_of(tokenizer))
    for arguments in ("", "a=1", 'b="x"', 'a=1, b="x"', "a=1, c=null", 'a=1, b="x", c=[2]'):
        assert follows(tokenizer, grammar, f"<|tool_call_start|>[f({arguments})]<|tool_call_end|>"), arguments
    for arguments in ("a=1,", 'b="x", a=1', "a=x", "d=1", "a=1 b=2"):
        assert not follows(tokenizer, grammar, f"<|tool_call_start|>[f({arguments})]<|tool_call_end|>"), arguments


def test_formats_of_arguments_are_told() -> None:
    tokenizer = byte_level()
    grammars = Grammars(tokenizer, "m", len(tokenizer))
    city = {"type": "object", "properties": {"city": {"type": "string", "format": "place"}}, "required": ["city"]}
    tools = [{"type": "function", "function": {"name": name, "parameters": city}} for name in ("weather", "now")]
    answer = {"type": "object", "properties": {"a": {"type": "string", "format": "byte"}}}
    for forced, expected in (
        (Forced("now"), ["now: Formats of the schema are not applied: 'place'."]),
        (Forced(), [f"{name}: Formats of the schema are not applied: 'place'." for name in ("weather", "now")]),
        (
            Forced("now", answer=answer),
            [
                f"{of}ormats of the schema are not applied: {name!r}."
                for of, name in (("now: F", "place"), ("F", "byte"))
            ],
        ),
    ):
        made = forced.grammar(form(CASES["hermes"].written), tools, grammars, False, False, 99)
        assert list(grammars.unheld(made).warnings) == expected
    tools[1]["function"]["parameters"]["properties"]["city"]["not"] = {"enum": ["Paris"]}
    refused = Forced("now").grammar(form(CASES["hermes"].written), tools, grammars, False, False, 99)
    with pytest.raises(GrammarError, match=r'"not".*"lenient": true'):
        grammars.prepare(refused)
    tools[1]["function"]["parameters"]["x-guidance"] = {"lenient": True}
    lenient = Forced("now").grammar(form(CASES["hermes"].written), tools, grammars, False, False, 99)
    assert "not checked" in grammars.unheld(lenient).warnings[-1]
    assert follows(tokenizer, lenient.text, WRITTEN["hermes"].replace("weather", "now").replace(', "days": 3', ""))


def test_what_cannot_be_forced() -> None:
    assert call_grammar(form(CASES["thinking"].written), TOOLS, {}) is None
    with pytest.raises(GrammarError, match="No tool is named 'then'"):
        call_grammar(form(CASES["hermes"].written), TOOLS, {}, name="then")
