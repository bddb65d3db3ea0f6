"""One server for the tests of a module."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import openai
import pytest

from serving import JSON, LIMIT, Served, fake_llm, serving


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serving(fake_llm()) as running:
        yield running


@pytest.fixture(scope="module")
def client(served: Served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0, timeout=LIMIT) as made:
        yield made


@pytest.fixture(scope="module")
def http(served: Served) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=served.url, timeout=LIMIT, headers=JSON) as made:
        yield made
