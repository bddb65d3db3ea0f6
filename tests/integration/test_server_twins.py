"""Requests of mixed kinds, all at once through HTTP: each has the text of its twin, computed offline and plainly.

FORERUN_SERVER_REQUESTS=500 sends as many.
"""

from __future__ import annotations

import json
import os
import random
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx

from forerun import LLM, SamplingParams
from serving import LIMIT, serving

NUM_REQUESTS = int(os.environ.get("FORERUN_SERVER_REQUESTS", "12"))
PROMPTS = (
    "def quicksort(items):\n",
    "class Stack:\n    def push(self, item):\n",
    "import os\n\nfor name in ",
    "x = [1, 2",
)
DRAFTERS = ("draft-model", "suffix", "recycling", "none")


def body(rng: random.Random) -> dict[str, Any]:
    """One request; greedy, or with a seed."""
    made: dict[str, Any] = {"prompt": rng.choice(PROMPTS), "max_tokens": rng.randrange(1, 40)}
    made |= {"temperature": 0} if rng.random() < 0.3 else {"seed": rng.randrange(100), "n": rng.choice([1, 1, 2])}
    if rng.random() < 0.5:
        made |= {"top_p": 0.9, "repetition_penalty": 1.1}
    if rng.random() < 0.3:
        made |= {"stop": ["\n\n", "self"]}
    if rng.random() < 0.3:
        made |= {"logit_bias": {"17": -5}, "min_tokens": 1}
    made["speculative"] = rng.choice([True, False, *DRAFTERS, {"num_draft_tokens": 2}])
    made["stream"] = rng.random() < 0.5
    return made


def texts(response: httpx.Response, made: dict[str, Any]) -> list[str]:
    assert response.status_code == 200, response.text
    if not made["stream"]:
        return [choice["text"] for choice in response.json()["choices"]]
    found = [""] * made.get("n", 1)
    events = [line.removeprefix("data: ") for line in response.text.splitlines() if line.startswith("data: ")]
    assert events.pop() == "[DONE]"
    for event in events:
        for choice in json.loads(event)["choices"]:
            found[choice["index"]] += choice["text"]
    return found


def test_each_answer_is_its_twins() -> None:
    rng = random.Random(7)
    asked = [body(rng) for _ in range(NUM_REQUESTS)]
    plain = LLM("bundled", max_batch=1)
    llm = LLM("bundled", ["draft-model", "suffix", "recycling"], max_batch=6)
    with (
        serving(llm) as served,
        httpx.Client(base_url=served.url, timeout=10 * LIMIT, limits=httpx.Limits(max_connections=16)) as http,
        ThreadPoolExecutor(16) as pool,
    ):
        answers = list(pool.map(lambda made: texts(http.post("/v1/completions", json=made), made), asked))
        served.settle()
    for made, answer in zip(asked, answers):
        options = {key: value for key, value in made.items() if key not in ("prompt", "speculative", "stream")}
        assert answer == [choice.text for choice in plain.generate(made["prompt"], SamplingParams(**options)).choices]
