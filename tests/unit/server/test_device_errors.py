"""A device that fails under a server: requests end with 503 and OpenAI's body, and its health says so."""

from __future__ import annotations

from typing import Any

import httpx
import torch

from doubles import FakeModel
from serving import LIMIT, fake_llm, serving

BODY = {"model": "it", "prompt": "ab", "max_tokens": 8, "temperature": 0}


def fails(error: Exception) -> Any:
    def fail(_: object) -> None:
        raise error

    return fail


def post(client: httpx.Client, **options: object) -> httpx.Response:
    return client.post("/v1/completions", json=BODY | options)


def test_a_device_that_has_failed() -> None:
    llm = fake_llm()
    fake: Any = llm.target
    assert isinstance(fake, FakeModel)
    with serving(llm) as served, httpx.Client(base_url=served.url, timeout=LIMIT) as client:
        assert post(client).status_code == 200
        assert client.get("/health").json()["status"] == "ok"
        fake.before_forward = fails(torch.AcceleratorError("CUDA error: unspecified launch failure\nMore of it."))
        for options in ({}, {"stream": True}, {}):
            refused = post(client, **options)
            assert refused.status_code == 503
            error = refused.json()["error"]
            assert error["type"] == "server_error" and "unspecified launch failure" in error["message"]
            fake.before_forward = lambda _: None  # nothing is tried any more
        health = client.get("/health")
        assert health.status_code == 503
        assert health.json()["status"] == "failed" and health.json()["reason"] == error["message"]


def test_a_stream_under_way_ends_with_the_error() -> None:
    llm = fake_llm()
    fake: Any = llm.target
    with serving(llm) as served, httpx.Client(base_url=served.url, timeout=LIMIT) as client:
        num_forwards, error = fake.num_forwards + 3, torch.AcceleratorError("CUDA error: unspecified launch failure")

        def fail(_: object) -> None:
            if fake.num_forwards >= num_forwards:
                raise error

        fake.before_forward = fail
        answer = post(client, stream=True, max_tokens=40, ignore_eos=True)
        assert answer.status_code == 200
        assert "unspecified launch failure" in answer.text.strip().splitlines()[-3]


def test_no_memory_for_a_step() -> None:
    llm = fake_llm()
    fake: Any = llm.target
    with serving(llm) as served, httpx.Client(base_url=served.url, timeout=LIMIT) as client:
        fake.before_forward = fails(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB."))
        refused = post(client)
        assert refused.status_code == 503 and "Lower max_batch or cache_memory" in refused.json()["error"]["message"]
        fake.before_forward = lambda _: None
        assert post(client).status_code == 200
        assert client.get("/health").status_code == 200
