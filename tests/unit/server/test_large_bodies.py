"""Large bodies: what cannot be served is refused without being read in the server's own process."""

from __future__ import annotations

import json
import os
import signal
from io import BytesIO
from typing import Any

import httpx
import pytest

from forerun.errors import RequestBodyError
from forerun.server import body_inspector, service
from forerun.server.body_inspector import BodyInspector, Limits
from forerun.server.body_inspector_process import LENGTH, inspect, main
from forerun.server.middleware import RateLimit
from forerun.utils.json_file import Fields
from forerun.utils.vocabulary import longest_token
from serving import JSON, Served, fake_llm, serving
from small_tokenizers import byte_level

LIMITS = Limits("it", 100, 5, 60)


def told(body: object) -> dict[str, Any]:
    return inspect(json.dumps(body).encode())


def test_what_a_body_holds() -> None:
    found = told({"prompt": [[1, 2, 3], ["ab", "c"]], "stop": {"k": [True, 1]}, "n": 1})
    assert found["fields"]["prompt"] == {
        "values": 8,
        "entries": 2,
        "longest": 0,
        "characters": 3,
        "text": 2,
        "numbers": 3,
    }
    assert found["fields"]["stop"] == {
        "values": 4,
        "entries": 1,
        "longest": 0,
        "characters": 1,
        "text": 0,
        "numbers": 0,
    }
    assert (found["is_object"], found["num_fields"]) == (True, 3)
    assert told([1])["is_object"] is False
    assert "not JSON" in inspect(b"{")["error"]
    many = told({f"{'x' * 100}{i}": i for i in range(1000)})
    assert many["num_fields"] == 1000 and all(len(name) <= 60 for name in many["fields"])


@pytest.mark.parametrize(
    ("body", "param", "code"),
    [
        ({"prompt": [1] * 100}, "prompt", "context_length_exceeded"),
        ({"prompt": ["a", "b" * 501]}, "prompt", "context_length_exceeded"),
        ({"messages": [{"role": "user", "content": "b" * 300}] * 2}, "messages", "context_length_exceeded"),
        ({"input": "b" * 501}, "input", "context_length_exceeded"),
        ({"prompt": ["a"] * 61}, "prompt", None),
        ({"prompt": [[]] * 100_000}, "prompt", None),
        ({"messages": [{"role": "u", "content": [{}] * 200_000}]}, "messages", None),
        ({"prompt": "a", "stop": ["a"] * 200_000}, "stop", None),
        ({"prompt": "a", "logit_bias": {str(i): 1 for i in range(200_000)}}, "logit_bias", None),
        ({str(i): 1 for i in range(100)}, None, None),
        ([1], None, None),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_what_is_refused(body: object, param: str | None, code: str | None) -> None:
    with pytest.raises(RequestBodyError) as refused:
        LIMITS.check(Fields("it", told(body), RuntimeError))
    assert (refused.value.param, refused.value.code) == (param, code)


def test_what_may_be_served_is_let_through() -> None:
    for body in (
        {"prompt": [[1] * 99] * 50},
        {"prompt": ["b" * 500] * 9},
        {"messages": [{"role": "u", "content": "a"}]},
    ):
        LIMITS.check(Fields("it", told(body), RuntimeError))
    Limits("it", 100, None, 60).check(Fields("it", told({"prompt": "a" * 1000}), RuntimeError))
    assert longest_token(byte_level()) >= 1


def test_bodies_are_answered_one_after_another() -> None:
    sink, bodies = BytesIO(), [b'{"a": 1}', b"nonsense"]
    main(BytesIO(b"".join(len(body).to_bytes(LENGTH, "big") + body for body in bodies)), sink)
    lines = [json.loads(line) for line in sink.getvalue().splitlines()]
    assert lines[0]["num_fields"] == 1 and "error" in lines[1]


def test_the_process_is_started_again_after_it_was_killed() -> None:
    inspector = BodyInspector()
    try:
        assert inspector.inspect(b"{}").integer("num_fields") == 0
        assert inspector._process is not None
        os.kill(inspector._process.pid, signal.SIGKILL)
        inspector._process.wait()
        assert inspector.inspect(b'{"a": 1}').integer("num_fields") == 1
    finally:
        inspector.close()


def test_a_large_body_over_http(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "LARGE_BODY", 1 << 16)
    seen: list[int] = []
    parse = service.parse_json
    monkeypatch.setattr(
        service, "parse_json", lambda *given, **more: seen.append(len(given[0])) or parse(*given, **more)
    )
    url = f"{served.url}/v1/completions"
    refused = httpx.post(url, json={"prompt": list(range(100)) * 2000})
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "context_length_exceeded")
    broken = httpx.post(url, content=b'{"prompt": "' + b"a" * (1 << 17), headers=JSON)
    assert (broken.status_code, seen) == (400, [])
    content = json.dumps({"prompt": "hello", "max_tokens": 2}).encode() + b" " * (1 << 17)
    whole = httpx.post(url, content=content, headers=JSON)
    assert (whole.status_code, len(seen)) == (200, 1)
    counted = httpx.post(f"{served.url}/tokenize", json={"prompt": "a" * (1 << 17)})
    assert counted.status_code == 200 and counted.json()["count"] > served.llm.target.context_length
    assert body_inspector.LARGE_BODY < 1 << 20


def test_bytes_pass_at_a_pace() -> None:
    limit = RateLimit(1000.0)
    waits = [limit.take(100) for _ in range(5)]
    assert all(0.05 + 0.1 * place < wait <= 0.1 + 0.1 * place + 1e-9 for place, wait in enumerate(waits))


def test_what_the_pace_takes_is_not_the_client_s_time(monkeypatch: pytest.MonkeyPatch) -> None:
    waits = [1.2]
    monkeypatch.setattr(RateLimit, "take", lambda self, size: waits.pop() if waits else 0.0)
    with serving(fake_llm(), body_timeout=0.9) as made:
        content = json.dumps({"prompt": "hello", "max_tokens": 2}).encode() + b" " * (1 << 21)  # in pieces
        assert httpx.post(f"{made.url}/v1/completions", content=content, headers=JSON, timeout=30).status_code == 200
    assert not waits
