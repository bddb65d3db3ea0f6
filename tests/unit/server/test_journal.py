"""The journal of a server that answers: figures, categories, and not a word of text."""

from __future__ import annotations

import json
from pathlib import Path

import httpx
import pytest

from forerun.errors import ConfigError
from forerun.lab.bench.journal import read_journal
from forerun.server.options import ServerOptions
from forerun.server.service import Service
from serving import LIMIT, NAME, fake_llm, serving

SECRET = "platypus"
BODY = {"prompt": SECRET, "max_tokens": 12, "temperature": 0, "ignore_eos": True}


def test_answers_without_their_text(tmp_path: Path) -> None:
    path = tmp_path / "j"
    with serving(fake_llm(), journal=path) as served, httpx.Client(base_url=served.url, timeout=LIMIT) as http:
        code = {"x-forerun-category": "code", "x-request-id": "id-7"}
        answered = http.post("/v1/completions", json={**BODY, "n": 2, "temperature": 1, "seed": 3}, headers=code)
        assert answered.status_code == 200
        streamed = http.post("/v1/completions", json={**BODY, "stream": True})
        plain = http.post("/v1/completions", json={**BODY, "speculative": False})
        assert "[DONE]" in streamed.text and plain.status_code == 200
        for wrong in ("two words", "a" * 41, "é"):
            refused = http.post("/v1/completions", json=BODY, headers={"x-forerun-category": wrong.encode()})
            assert refused.status_code == 400 and "X-Forerun-Category".lower() in refused.json()["error"]["message"]
        assert http.post("/v1/completions", json={**BODY, "max_tokens": "x"}).status_code == 400
    text = path.read_text()
    assert SECRET not in text and "id-7" not in text and "127.0.0.1" not in text
    assert not any(word in text for word in plain.json()["choices"][0]["text"].split() if len(word) > 3)
    traffic = read_journal(path)
    assert [each.category for each in traffic.answers] == ["code", "code", "", ""]
    assert {each.tokens for each in traffic.answers} == {12} and {each.prompt for each in traffic.answers} == {
        len(SECRET)
    }
    drawn, _, greedy, bare = traffic.answers
    assert greedy.drafted >= greedy.accepted and greedy.drafted and drawn.drafter == greedy.drafter
    assert bare.drafter == "none" != greedy.drafter and bare.forwards == 12 and not bare.drafted
    assert all(0 <= each.first <= each.seconds for each in traffic.answers)
    assert traffic.begun.model == NAME and not traffic.num_damaged


def test_without_a_journal_the_header_is_not_read() -> None:
    with serving(fake_llm()) as served, httpx.Client(base_url=served.url, timeout=LIMIT) as http:
        odd = {"x-forerun-category": "two words"}
        assert http.post("/v1/completions", json=BODY, headers=odd).status_code == 200


def test_a_place_that_cannot_be(tmp_path: Path) -> None:
    (tmp_path / "notes").write_text(json.dumps({"a": 1}) + "\n")
    with pytest.raises(ConfigError, match="no journal"):
        Service(fake_llm(), NAME, ServerOptions(port=0, journal=tmp_path / "notes"))
    with pytest.raises(ConfigError, match="journal_size"):
        ServerOptions(journal_size=0.5)
