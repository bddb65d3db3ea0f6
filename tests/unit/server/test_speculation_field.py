"""`speculative` and `prediction`: who drafts, and for how many tokens; the text stays as it is."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from doubles import FakeModel
from forerun import LLM, SamplingParams
from serving import LIMIT, NAME, Served, serving
from small_tokenizers import byte_level

MESSAGES: Any = [{"role": "user", "content": "hello hello hello"}]
MAX_TOKENS = 30
OFF: list[Any] = [False, "none", {"drafter": "none"}, {"num_draft_tokens": 0}]
CHOICES: list[tuple[Any, str]] = [
    (None, "suffix"),
    (True, "suffix"),
    ("suffix", "suffix"),
    ("prompt-lookup", "prompt-lookup"),
    ("prompt-lookup:num_draft_tokens=2", "prompt-lookup"),
    ({"drafter": "prompt-lookup", "num_draft_tokens": 2}, "prompt-lookup"),
    ({"num_draft_tokens": 2}, "suffix"),
]
WRONG: list[Any] = [
    "eagle",
    "/etc/passwd",
    "os:system",
    "draft-model:model=/tmp/x",
    "suffix:min_match=3",
    "suffix:num_draft_tokens=many",
    {"drafter": 3},
    {"drafter": "suffix", "model": "x"},
    {"num_draft_tokens": 1000},
    {"num_draft_tokens": "4"},
    7,
    [],
]


@pytest.fixture(scope="module")
def chooser() -> Iterator[Served]:
    tokenizer = byte_level()
    tokenizer.chat_template = "{{ messages[0].content }}"
    fake: Any = FakeModel(vocab_size=len(tokenizer), order=1, num_contexts=5)  # a text that repeats itself
    llm = LLM(fake, ["suffix", "prompt-lookup", "prediction"], tokenizer=tokenizer, num_draft_tokens=4)
    with serving(llm) as running:
        yield running


def asked(chooser: Served, **extra: Any) -> Any:
    with openai.OpenAI(base_url=f"{chooser.url}/v1", api_key="none", max_retries=0, timeout=LIMIT) as client:
        return client.chat.completions.create(
            model=NAME, messages=MESSAGES, max_tokens=MAX_TOKENS, temperature=0, extra_body=extra
        )


def figures(answer: Any) -> Any:
    return answer.metrics["speculative_decoding"]


@pytest.fixture
def text(chooser: Served) -> str:
    found = chooser.llm.generate(MESSAGES, SamplingParams(temperature=0, max_tokens=MAX_TOKENS))
    assert found.stats.num_accepted_tokens > 5
    return str(found.text)


@pytest.mark.parametrize("value", OFF, ids=str)
def test_off(chooser: Served, text: str, value: Any) -> None:
    answer = asked(chooser, speculative=value)
    assert answer.choices[0].message.content == text
    assert figures(answer)["num_draft_tokens"] == 0 and figures(answer)["decisions"].keys() == {"off: request"}


@pytest.mark.parametrize(("value", "name"), CHOICES, ids=str)
def test_who_drafts(chooser: Served, text: str, value: Any, name: str) -> None:
    answer = asked(chooser, speculative=value)
    assert answer.choices[0].message.content == text
    assert set(figures(answer)["sources"]) == {name} and figures(answer)["num_accepted_draft_tokens"] > 5
    assert (figures(answer)["num_spec_tokens"] == 2) == ("2" in str(value))


@pytest.mark.parametrize("value", WRONG, ids=str)
def test_what_is_refused(chooser: Served, value: Any) -> None:
    body = {"messages": MESSAGES, "speculative": value}
    response = httpx.post(f"{chooser.url}/v1/chat/completions", json=body, timeout=LIMIT)
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["param"] == "speculative" or "drafter that was not loaded" in error["message"]


def test_a_prediction(chooser: Served, text: str) -> None:
    answer = asked(chooser, prediction={"type": "content", "content": text})
    assert answer.choices[0].message.content == text
    assert set(figures(answer)["sources"]) == {"prediction"}
    details = answer.usage.completion_tokens_details
    assert details.accepted_prediction_tokens == figures(answer)["num_accepted_draft_tokens"] > 5
    parts = [{"type": "text", "text": text[:4]}, {"type": "text", "text": text[4:]}]
    assert asked(chooser, prediction={"type": "content", "content": parts}).choices[0].message.content == text
    with pytest.raises(openai.BadRequestError):  # off, and a prediction that would be ignored
        asked(chooser, prediction={"type": "content", "content": text}, speculative=False)
