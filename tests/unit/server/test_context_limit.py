"""A server of a model whose whole context does not fit into memory: what is not said goes as far as both allow."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from forerun import LLM
from forerun.utils.machine import GIB
from pooled import PAGE, PooledModel
from serving import JSON, LIMIT, NAME, Served, serving
from small_tokenizers import byte_level

HELD = 200
TALK: list[dict[str, Any]] = [{"role": "user", "content": "hello"}]
CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"


@pytest.fixture(scope="module")
def limited() -> Iterator[Served]:
    """A model of 4,096 tokens in a cache for one sequence of 200."""
    tokenizer = byte_level()
    tokenizer.chat_template = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}:"
    fake: Any = PooledModel(vocab_size=len(tokenizer))
    memory = HELD / PAGE * fake.pool.page_nbytes / GIB
    with serving(LLM(fake, "suffix", tokenizer=tokenizer, cache_memory=memory, max_batch=4)) as running:
        yield running


@pytest.fixture(scope="module")
def http(limited: Served) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=limited.url, timeout=LIMIT, headers=JSON) as made:
        yield made


BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": TALK},
    RESPONSES: {"input": TALK},
    MESSAGES: {"messages": TALK, "max_tokens": 10**6},
}


@pytest.mark.parametrize("path", BODIES)
def test_an_answer_without_max_tokens_ends_where_the_cache_does(path: str, http: httpx.Client) -> None:
    response = http.post(path, json={"model": NAME, **BODIES[path]})
    assert response.status_code == 200, response.text
    answer = response.json()
    usage = answer["usage"]
    fields = ("prompt_tokens", "completion_tokens") if path == CHAT else ("input_tokens", "output_tokens")
    assert sum(usage[field] for field in fields) + usage.get("cache_read_input_tokens", 0) == HELD
    reason = {
        CHAT: lambda: answer["choices"][0]["finish_reason"] == "length",
        RESPONSES: lambda: answer["incomplete_details"]["reason"] == "max_output_tokens",
        MESSAGES: lambda: answer["stop_reason"] == "max_tokens",
    }
    assert reason[path]()


def test_a_longer_prompt_is_refused(http: httpx.Client) -> None:
    told = http.get("/v1/models").json()["data"][0]
    assert (told["max_model_len"], told["full_context_length"]) == (HELD, 4096)
    assert http.post("/tokenize", json={"prompt": "a"}).json()["max_model_len"] == HELD
    long = [{"role": "user", "content": "z" * HELD}]
    for path, body in BODIES.items():
        field = "input" if path == RESPONSES else "messages"
        response = http.post(path, json={"model": NAME, **body, field: long})
        error = response.json()["error"]
        assert response.status_code == 400 and f"holds {HELD} (memory; the model's own 4,096)" in error["message"]
        if path != MESSAGES:
            assert (error["code"], error["param"]) == ("context_length_exceeded", field)


def test_answers_beside_others_are_as_long_as_alone(http: httpx.Client) -> None:
    def answered(seed: int) -> str:
        body = {"model": NAME, "messages": TALK, "seed": seed, "temperature": 1}
        choice: dict[str, Any] = http.post(CHAT, json=body).json()["choices"][0]
        assert choice["finish_reason"] == "length"
        return str(choice["message"]["content"])

    alone = [answered(seed) for seed in range(4)]
    with ThreadPoolExecutor(4) as clients:
        assert [*clients.map(answered, range(4))] == alone
