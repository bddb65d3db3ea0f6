"""Every drafter with tools, thinking and forced calls, asked over HTTP: the whole answer is that of plain decoding."""

from __future__ import annotations

from itertools import product
from typing import Any

import httpx
import pytest

from drafter_rows import TWINS, rows
from forerun import LLM
from forerun.config import BUNDLED_TARGET
from forerun.drafters import DRAFTERS
from heads import text_of
from serving import LIMIT, serving

pytest.importorskip("llguidance")
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome", "days": 2}}\n</tool_call>'
THOUGHT = "<think>\nSome thing.\n</think>\n"
LLAMA = '{"name": "weather", "parameters": {"city": "Rome", "days": 2}}'
BARE = '{"name": "now", "arguments": {"city": "Rome", "days": 2}}'
PLACE = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 4}, "days": {"enum": [1, 2]}}}
WEATHER = {"name": "weather", "parameters": PLACE | {"required": ["city", "days"], "additionalProperties": False}}
NOW = {"name": "now", "parameters": {"type": "object", "properties": {}, "additionalProperties": False}}
CHOICES: dict[str, Any] = {"required": "required", "by name": {"type": "function", "function": {"name": "weather"}}}
CHOICES |= {"auto": "auto", "auto, strict": "auto"}
FORCED = ("required", "by name")
FORMS = {
    "hermes": ("<tool_call></tool_call>", "", CALL + "\n\n", (*FORCED, "auto, strict")),
    "thinking": (
        "<tool_call></tool_call><think></think>",
        "<think>\n",
        THOUGHT + CALL + "\n\n",
        (*FORCED, "auto, strict"),
    ),
    "llama3": ('"parameters": dictionary', "", LLAMA + "\n", FORCED),  # no grammar tells its calls from text
    "bare": (
        "<tool_call></tool_call>",
        "",
        BARE + "\n",
        ("auto",),
    ),  # which is read where nothing is strict
}
"""What stands in the chat template, how a prompt ends, what is there several times before, to be continued, and the
choices that are asked for."""
SAMPLING = {"greedy": {"temperature": 0}, "drawn": {"temperature": 0.5, "seed": 4}}
Answers = dict[str, Any]


def answers(llm: LLM, **more: Any) -> Answers:
    """The body of each answer. more: fields of all requests."""
    found = {}
    for form, (written, end, before, choices) in FORMS.items():
        assert llm.tokenizer is not None
        llm.tokenizer.chat_template = f"{{# {written} tools #}}{{{{ messages[0].content }}}}{end}"
        asked = {"messages": [{"role": "user", "content": before * 6}], "max_tokens": 70, "logprobs": True, **more}
        with serving(llm) as served, httpx.Client(base_url=served.url, timeout=LIMIT) as http:
            for name, (sampling, options) in product(choices, SAMPLING.items()):
                functions = [each | {"strict": name == "auto, strict"} for each in (WEATHER, NOW)]
                fields = {
                    "tools": [{"type": "function", "function": each} for each in functions],
                    "tool_choice": CHOICES[name],
                    "parallel_tool_calls": name not in FORCED,
                }
                response = http.post("/v1/chat/completions", json=asked | options | fields)
                assert response.status_code == 200, response.text
                found[f"{form}, {name}, {sampling}"] = response.json()
    return found


def bare(body: Any) -> Any:
    """A body without ids, times and figures."""
    if isinstance(body, list):
        return [bare(each) for each in body]
    if not isinstance(body, dict):
        return body
    apart = ("id", "created", "metrics", "usage")
    return {key: bare(value) for key, value in body.items() if key not in apart}


@pytest.fixture(scope="module")
def plain() -> LLM:
    return LLM("bundled", None, dtype="bfloat16")


@pytest.fixture(scope="module")
def expected(plain: LLM) -> Answers:
    found = answers(plain, speculative=False)  # else tokens that a grammar forces are drafts
    for name, body in found.items():
        assert body["metrics"]["speculative_decoding"]["num_draft_tokens"] == 0
        (choice,) = body["choices"]
        assert choice["message"].get("tool_calls"), name
        assert (choice["message"].get("reasoning") is not None) == name.startswith("thinking")
    return found


@pytest.mark.sampled(2)
@pytest.mark.parametrize("drafter", rows(TWINS))
def test_calls_and_thinking_are_those_of_plain_decoding(plain: LLM, expected: Answers, drafter: str) -> None:
    plain.target.name = BUNDLED_TARGET  # a server has given it another
    llm = LLM(plain.target, text_of(drafter), num_draft_tokens=6, tokenizer=plain.tokenizer)
    assert llm.drafter is not None
    prediction = {"prediction": {"type": "content", "content": CALL}} if llm.drafter.traits.reads_prediction else {}
    found = answers(llm, **prediction)
    accepted = 0
    for name, body in found.items():
        assert bare(body) == bare(expected[name]), name
        accepted += body["metrics"]["speculative_decoding"]["num_accepted_draft_tokens"]
    assert accepted > 0 or DRAFTERS[drafter].may_be_silent
