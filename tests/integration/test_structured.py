"""Answers of the bundled model held to JSON schemas: they validate, and speculation changes none of them."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import jsonschema
import pytest

from forerun import LLM, Grammar, GrammarError, SamplingParams

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "kind": {"enum": ["class", "function", "module"]},
        "lines": {"type": "integer", "minimum": 1, "maximum": 9999},
        "arguments": {
            "type": "array",
            "maxItems": 3,
            "items": {
                "type": "object",
                "properties": {"name": {"type": "string", "maxLength": 8}, "optional": {"type": "boolean"}},
                "required": ["name", "optional"],
                "additionalProperties": False,
            },
        },
    },
    "required": ["name", "kind", "lines", "arguments"],
    "additionalProperties": False,
}
PROMPTS = ["import json\n\nprint(json.dumps(", "# The description of a function:\n", '    """Return', "x = "]
MOST = 250


@pytest.fixture(scope="module")
def plain() -> LLM:
    return LLM("bundled", None, num_draft_tokens=0, prefix_reuse="on")


def asked(count: int, seed: int | None = None) -> tuple[list[str], list[SamplingParams]]:
    prompts = [PROMPTS[number % len(PROMPTS)] for number in range(count)]
    seeds = range(count) if seed is None else [seed] * count
    grammar = Grammar.json_schema(SCHEMA)
    return prompts, [SamplingParams(grammar=grammar, max_tokens=MOST, seed=each) for each in seeds]


def check(plain: LLM, llm: LLM, count: int) -> None:
    prompts, params = asked(count)
    answers, same = llm.generate(prompts, params), plain.generate(prompts, params)
    for answer, other in zip(answers, same):
        assert answer.text == other.text
        assert answer.finish_reason == "stop"
        jsonschema.validate(json.loads(answer.text), SCHEMA)
    assert sum(answer.stats.num_accepted_tokens for answer in answers) > 10 * count


def test_answers_validate(plain: LLM) -> None:
    check(plain, LLM(plain.target, "draft-model", num_draft_tokens=5, tokenizer=plain.tokenizer), 6)


@pytest.mark.slow
@pytest.mark.parametrize("drafter", ["draft-model", "draft-tree", "hybrid", None])
def test_200_answers_validate(plain: LLM, drafter: str | None) -> None:
    check(plain, LLM(plain.target, drafter, num_draft_tokens=5, tokenizer=plain.tokenizer), 200)


@pytest.mark.slow
def test_200_answers_without_a_seed_validate(plain: LLM) -> None:
    llm = LLM(plain.target, "draft-model", num_draft_tokens=5, tokenizer=plain.tokenizer)
    prompts, _ = asked(200)
    for answer in llm.generate(prompts, SamplingParams(grammar=Grammar.json_schema(SCHEMA), max_tokens=MOST)):
        assert answer.finish_reason == "stop"
        jsonschema.validate(json.loads(answer.text), SCHEMA)


def test_with_and_without_a_grammar_together(plain: LLM) -> None:
    """Choices, prompts that begin alike, streams, stop strings, and a request that fails."""
    llm = LLM(plain.target, "suffix", num_draft_tokens=4, tokenizer=plain.tokenizer, prefix_reuse="on", max_batch=3)
    prompts, params = asked(4, seed=3)
    params[1] = SamplingParams(grammar=Grammar.regex("[a-z]+( [a-z]+){2}"), n=2, seed=1, max_tokens=30)
    params[2] = SamplingParams(temperature=0, max_tokens=20)
    params[3] = SamplingParams(temperature=0, max_tokens=60, grammar=Grammar.json_schema(SCHEMA), stop=['", "kind'])
    prompts[3] = prompts[0]
    ours, theirs = llm.generate(prompts, params), plain.generate(prompts, params)
    for one, other in zip(ours, theirs):
        assert [choice.text for choice in one.choices] == [choice.text for choice in other.choices]
    assert ours[3].text.startswith('{"name": "') and '"kind' not in ours[3].text
    streamed = "".join(chunk.text for chunk in llm.stream(prompts[0], params[0]))
    assert streamed == ours[0].text


def test_what_cannot_be_followed_is_refused_at_once(plain: LLM) -> None:
    bad, good = SamplingParams(grammar=Grammar.regex("(a")), SamplingParams(temperature=0, max_tokens=2)
    with pytest.raises(GrammarError, match="unclosed group"):
        plain.generate(["x", "y"], [good, bad])
    with pytest.raises(GrammarError):
        plain.stream("x", bad)
    with pytest.raises(GrammarError):
        plain.engine.requests([plain.encode("x")], bad)
    assert not plain.engine.has_work


def test_a_place_that_is_lost_changes_nothing(plain: LLM) -> None:
    """Keys and values for two sequences at most: others wait, and are computed again."""
    llm = LLM(plain.target, None, num_draft_tokens=5, tokenizer=plain.tokenizer, max_batch=4)
    prompts, params = asked(4)
    urgent = [replace(each, priority=number) for number, each in enumerate(params)]
    ids = []
    for number, (prompt, each) in enumerate(zip(prompts, urgent)):
        ids.append(llm.engine.add(llm.encode(prompt), each))
        for _ in range(2):
            llm.engine.step()
        if number:
            llm.engine.scheduler._max_batch = 2
    texts: dict[int, str] = {}
    preemptions = 0
    while llm.engine.has_work:
        for output in llm.engine.step():
            assert output.error is None
            if output.choice is not None:
                texts[output.request_id] = output.choice.text
                preemptions += output.choice.stats.num_preemptions
    assert [texts[each] for each in ids] == [answer.text for answer in plain.generate(prompts, params)]
    assert preemptions
