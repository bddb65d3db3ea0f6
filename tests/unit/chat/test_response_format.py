"""Response templates: which one is chosen, those of Transformers, and those of a file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import regex

from family_answers import CASES, TOOLS, called, form, parsed, read
from forerun.chat.response_format import CALL, REASONING, ResponseFormat, find_format, read_format
from forerun.chat.response_parser import ResponseParser
from forerun.errors import ConfigError

FAMILIES = Path(__file__).parents[3] / "src" / "forerun" / "chat" / "families"
OWN = {
    "start_anchor": "<bot>",
    "defaults": {"role": "assistant"},
    "fields": {
        "thinking": {"open": "<hm>", "close": "</hm>"},
        "tool_calls": {
            "open_pattern": r"\s*<call (?P<name>\w+)>",
            "close": "</call>",
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
        },
        "content": {"content": "text"},
    },
}


def kinds(chat_template: str) -> list[str]:
    found = find_format(chat_template)
    return [] if found is None else [region.kind for region in found.regions]


def test_a_chat_template_without_marks_has_no_format() -> None:
    assert kinds("{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{% endfor %}") == []
    assert kinds("<|python_tag|> <tools>") == []


def test_thinking_is_read_where_the_chat_template_writes_it() -> None:
    assert REASONING in kinds("<tool_call></tool_call> {% if '</think>' in content %}")
    assert REASONING not in kinds("<tool_call></tool_call>") and CALL in kinds("<tool_call></tool_call>")
    assert CALL not in kinds("<think>\n</think>")


def test_the_most_particular_family_is_taken() -> None:
    names = ["<tool_call></tool_call>", "<tool_call></tool_call><function=", "<tool_call></tool_call><arg_key>"]
    openings = [opens(form(written)) for written in names]
    assert len(set(openings)) == 3
    assert form("[TOOL_CALLS][ARGS]").regions != form("[TOOL_CALLS]").regions


def test_the_tokenizers_own_template_comes_first(tmp_path: Path) -> None:
    (tmp_path / "own.json").write_text(json.dumps(OWN))
    for found in (find_format("<tool_call></tool_call>", OWN), read_format(tmp_path / "own.json")):
        assert found is not None
        parser = ResponseParser(found, "<bot><hm>", TOOLS, "request")
        for character in 'Hm.</hm>Sure. <call now>\n{}</call> <call weather>{"days": 3}</call>':
            parser.push(character)
        parser.push("", last=True)
        message = parsed(parser)
        assert (message.reasoning, message.content) == ("Hm.", "Sure.")
        assert called(message) == [("now", {}), ("weather", {"days": 3})]


def test_our_files_may_be_given(tmp_path: Path) -> None:
    assert len(list(FAMILIES.glob("*.json"))) >= 11
    for path in FAMILIES.glob("*.json"):
        assert read_format(path).regions


def test_special_tokens_that_are_markup() -> None:
    tokens = [
        "<|turn>",
        "<|channel>",
        "<channel|>",
        "<|tool_call>",
        '<|"|>',
        "[TOOL_CALLS]",
        "<｜tool▁sep｜>",
        "<|end|>",
    ]
    special = {token: index for index, token in enumerate(tokens)}
    assert form(CASES["gemma4"].written).markup(special).keys() == {1, 2, 3, 4}
    assert form(CASES["mistral"].written).markup(special).keys() == {5}
    assert form(CASES["deepseek"].written).markup(special).keys() == {6}
    assert form(CASES["harmony"].written).markup(special).keys() == {7}


@pytest.mark.parametrize(
    "values",
    [
        *([], {}, {"fields": []}, {"fields": {"content": 1}}, {"fields": {"content": {"open": 5}}}),
        {"fields": {"content": {"open_pattern": "("}}},
        {"fields": {"content": {"content": "python"}}},
        {"fields": {"tool_calls": {"content": "xml-inline", "content_args": {"merge_duplicates": True}}}},
        {"fields": {"tool_calls": {"open": "a", "transform": "{content}"}}},
        {"response_template": 3},
    ],
)
def test_a_file_that_is_no_response_template(values: Any, tmp_path: Path) -> None:
    (tmp_path / "own.json").write_text(json.dumps(values))
    with pytest.raises(ConfigError, match=r"own\.json: it is no response template: .* Write it as"):
        read_format(tmp_path / "own.json")
    with pytest.raises(ConfigError, match=r"none\.json: it cannot be read"):
        read_format(tmp_path / "none.json")


def test_a_pattern_that_matches_nothing_is_no_endless_loop() -> None:
    fields = {"thinking": {"open_pattern": "(?=a)", "close_pattern": "(?=a)"}, "content": {"close_pattern": "(?=b)"}}
    parser = ResponseParser(ResponseFormat.of({"fields": fields}, "mine"), "", TOOLS, "request")
    deltas = [delta for text in ("xaab", "ab") for delta in parser.push(text)] + parser.push("", last=True)
    assert "".join(delta.text for delta in deltas) == "xaabab"


@pytest.mark.parametrize(
    "name", ["hermes, thinking begun by the prompt", "qwen3.5, code as an argument", "glm", "gemma4", "lfm2"]
)
def test_transformers_reads_the_same(name: str) -> None:
    """Where its parser works: one content, whole calls, no whitespace that matters."""
    chat_parsing = pytest.importorskip("transformers.utils.chat_parsing")
    case = CASES[name]
    text = case.text.removesuffix("\nDone.").replace("    if a", "if a")
    family = next(path for path in FAMILIES.glob("*.json") if _matches(path, case.written))
    template = json.loads(family.read_text(encoding="utf-8"))["response_template"]
    expected = chat_parsing.parse_response(text, template, prefix=case.prompt, tools=TOOLS)
    _, message = read(case._replace(text=text), [text])
    assert (message.reasoning, (message.content or "").strip()) == (
        expected.get("reasoning_content"),
        expected.get("content", ""),
    )
    functions = [call["function"] for call in expected.get("tool_calls", [])]
    assert called(message) == [(function["name"], function["arguments"]) for function in functions]


def _matches(path: Path, written: str) -> bool:
    template = json.loads(path.read_text(encoding="utf-8"))["response_template"]
    return opens(ResponseFormat.of(template, "")) == opens(form(written))


def opens(found: ResponseFormat) -> str | None:
    """What opens the family's own calls."""
    return next((region.opens for region in found.regions if region.kind == CALL), None)


@pytest.mark.parametrize("name", ["hermes", "qwen3.5, code as an argument", "gemma4"])
def test_templates_of_transformers_are_read(name: str) -> None:
    serving = pytest.importorskip("transformers.cli.serving.utils")
    model_type = {"hermes": "qwen3", "gemma4": "gemma4"}.get(name, "qwen3_5")
    templates = serving._RESPONSE_TEMPLATE_FALLBACKS
    template = next(template for types, template in templates.items() if model_type in types)
    parser = ResponseParser(ResponseFormat.of(template, model_type), CASES[name].prompt, TOOLS, "request")
    for character in CASES[name].text.replace("    if a", "if a"):
        parser.push(character)
    parser.push("", last=True)
    message, expected = parsed(parser), read(CASES[name], [CASES[name].text.replace("    if a", "if a")])[1]
    assert (message.reasoning, message.content) == (expected.reasoning, expected.content)
    assert called(message) == called(expected)


def test_no_pattern_looks_twice_at_a_long_text() -> None:
    """Patterns whose time is not linear would take minutes here."""
    size = 30_000
    for text in (
        " " * size,
        "\n" * size,
        "<" * size,
        "{" * size,
        "<tool_call>" + "a" * size,
        "[TOOL_CALLS]" * (size // 12),
        "\n```json\n" * (size // 9),
        "\n```" + " " * size,
        '\n{"name": "' * (size // 11),
        '\n{"name": "weather", "arguments": {' * (size // 35),
        '\n{"name": "then", "arguments": {}}' * (size // 33),
        '\n[{"arguments": {}}]' * (size // 20),
    ):
        for written in {case.written for case in CASES.values()}:
            parser = ResponseParser(form(written), "", TOOLS, "request")
            found = [
                delta.text for delta in (*parser.push(text), *parser.push("", last=True)) if delta.kind == "content"
            ]
            assert regex.sub(r"\s+", "", "".join(found)) in regex.sub(r"\s+", "", text)
