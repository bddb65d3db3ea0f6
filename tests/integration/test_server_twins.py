"""Requests of mixed kinds, all at once through HTTP: each has the text of its twin, computed offline and plainly."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from mixed_requests import DRAFTERS, Answer, Asked, load, mixed, read
from serving import LIMIT, serving


@pytest.mark.parametrize("count", [12, pytest.param(500, marks=pytest.mark.slow)])
def test_each_answer_is_its_twins(count: int) -> None:
    llm, plain = load(drafter=[*DRAFTERS], max_batch=6), load(drafter=None, max_batch=1)
    rng = random.Random(7)
    asked = [mixed(rng, llm) for _ in range(count)]

    def answered(http: httpx.Client, each: Asked) -> Answer:
        response = http.post(each.url, json=each.body)
        assert response.status_code == 200, response.text
        return read(each, response.text)

    with (
        serving(llm) as served,
        httpx.Client(base_url=served.url, timeout=10 * LIMIT, limits=httpx.Limits(max_connections=16)) as http,
        ThreadPoolExecutor(16) as pool,
    ):
        answers = list(pool.map(lambda each: answered(http, each), asked))
        served.settle()
    for each, answer in zip(asked, answers):
        assert answer == each.twin(plain), each
