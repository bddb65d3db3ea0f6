"""Hostile bodies beside another client's stream, at a server of the bundled model."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from attacks import COMPLETIONS, Seen, beside, first_piece
from forerun import LLM
from serving import JSON, Served, serving

MOST_GAP = 0.3
"""Seconds for which a stream may stand still, steps with prompts left out; without an attack about 0.03."""
MOST_WAIT = 3.0
"""Seconds that a newcomer may wait beyond what it waits alone."""
BASE = {"prompt": "def f(x):\n    return x\n", "max_tokens": 8}
LINE = " " * 40 + "return value\n"


@pytest.fixture(scope="module")
def bundled() -> Iterator[Served]:
    with serving(LLM("bundled", drafter="prediction")) as running:
        first_piece(running.url)
        yield running


def prediction(num_words: int) -> dict[str, Any]:
    words = ("return", "value", "self", "index", "lambda", "None", "class", "yield", "range")
    numbered = [f"{word}{number}" for word in words for number in range(10)]
    return {"type": "content", "content": " ".join(random.Random(1).choices(numbered, k=num_words))}


def assert_flows(seen: Seen) -> None:
    assert seen.gap <= MOST_GAP and seen.step <= MOST_GAP


def test_a_long_prediction_is_refused_beside_a_stream(bundled: Served) -> None:
    seen = beside(bundled, BASE | {"prediction": prediction(130_000)})
    assert seen.status == 400
    assert_flows(seen)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("attack", "status"),
    [
        (BASE | {"prediction": prediction(260_000)}, 400),
        ({"prompt": [f"a = {i}" for i in range(256)], "max_tokens": 1, "prediction": prediction(450)}, 200),
        ({"prompt": [f"# {i}\n{LINE * 250}" for i in range(256)], "max_tokens": 16}, None),
        ({"prompt": [17] * 1_000_000}, 400),
        ({"prompt": ["a"] * 800_000}, 400),
        (BASE | {"stop_token_ids": [1] * 1_300_000}, 400),
        (BASE | {"n": 128, "logit_bias": {str(i): i % 7 - 3 for i in range(4096)}, "ignore_eos": True}, 200),
    ],
    ids=[
        "2 MB of prediction",
        "256 prompts with a prediction",
        "256 prompts of 14 KB",
        "4 MB of token ids",
        "4 MB of prompts",
        "4 MB of stop tokens",
        "4,096 biases for 128 choices",
    ],
)
def test_a_stream_goes_on_beside(bundled: Served, attack: dict[str, Any], status: int | None) -> None:
    seen = beside(bundled, attack, seconds=30)
    assert seen.status == status
    assert_flows(seen)


@pytest.mark.slow
def test_a_newcomer_does_not_wait_for_a_body_of_many_prompts(bundled: Served) -> None:
    alone = first_piece(bundled.url)
    attack = {"prompt": [f"# {i}\n{LINE * 250}" for i in range(256)], "max_tokens": 64, "ignore_eos": True}
    seen = beside(bundled, attack, newcomer=5.0, seconds=25.0)  # left long after the bound
    assert seen.first is not None and seen.first <= alone + MOST_WAIT


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"prompt": ["a", "b", LINE * 3000]}, "Prompt 2 of 0..2: The prompt has "),
        ({"prompt": [[1], [99999]]}, "Prompt 1 of 0..1: Token 99999 at position 0 "),
        ({"prompt": [[1, 2], []]}, "Prompt 1 of 0..1: The prompt is empty"),
        ({"prompt": ["a", "\ud800"]}, "The request's body: it is not JSON: unexpected end of hex escape"),
        ({"prompt": ["a", LINE * 1500]}, "Prompt 1 of 0..1: The prompt has "),
        ({"prompt": LINE * 3000}, "The prompt has "),
    ],
    ids=["far too long", "no such token", "empty", "no text", "too long", "one alone"],
)
def test_an_error_says_which_prompt_it_means(bundled: Served, body: dict[str, Any], message: str) -> None:
    refused = httpx.post(bundled.url + COMPLETIONS, content=json.dumps(body), headers=JSON)
    assert refused.status_code == 400 and refused.json()["error"]["message"].startswith(message)
