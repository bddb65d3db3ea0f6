"""Keys, limits, the queue, cancellation, slow clients, the drain: what happens around answers."""

from __future__ import annotations

import asyncio
import asyncio.selector_events
import json
import logging
import re
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from forerun.engine.results import SequenceStats, SourceStats
from forerun.server.options import ServerOptions
from forerun.server.run import bound_socket
from serving import JSON, LIMIT, Served, fake_llm, serving, until

COMPLETIONS = "/v1/completions"
LONG = {"prompt": "hello", "max_tokens": 3000, "temperature": 0, "ignore_eos": True}
SHORT = {"prompt": "hello", "max_tokens": 3, "temperature": 0}


@contextmanager
def running(**options: Any) -> Iterator[tuple[Served, httpx.Client]]:
    with (
        serving(fake_llm(), **options) as served,
        httpx.Client(base_url=served.url, timeout=LIMIT, headers=JSON) as http,
    ):
        yield served, http


def test_an_event_is_sent_without_waiting_for_the_last_ones_acknowledgement(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else Nagle's rule holds tokens back until the client's system acknowledges, which takes up to 40 ms."""
    seen: list[int] = []
    made = asyncio.selector_events._SelectorSocketTransport  # type: ignore[attr-defined]

    def watched(self: Any, data: Any, write: Callable[[Any, Any], None] = made.write) -> None:
        seen.append(self.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
        write(self, data)

    monkeypatch.setattr(made, "write", watched)
    with running() as (_, http):
        assert http.post(COMPLETIONS, json=SHORT | {"stream": True}).status_code == 200
    assert seen and all(seen)


@contextmanager
def held(served: Served) -> Iterator[Callable[[], None]]:
    """Every forward of the model waits, until what this gives is called."""
    free = threading.Event()
    model: Any = served.llm.target
    model.before_forward = lambda _: free.wait(LIMIT)
    try:
        yield free.set
    finally:
        free.set()


def raw_post(served: Served, body: dict[str, Any], length: int | None = None, **headers: str) -> socket.socket:
    """A connection on which a request has been sent; length: what the header says."""
    host, port = re.findall(r"//(.*):(\d+)", served.url)[0]
    connection = socket.create_connection((host, int(port)), timeout=LIMIT)
    content = json.dumps(body).encode()
    head = (
        f"POST {COMPLETIONS} HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {length or len(content)}\r\n"
    )
    head += "".join(f"{name}: {value}\r\n" for name, value in headers.items()) + "\r\n"
    connection.sendall(head.encode() + content)
    return connection


def test_keys() -> None:
    with running(api_key=("one", "two")) as (_, http):
        for wrong in (None, "Bearer three", "Basic one", "one"):
            headers = {} if wrong is None else {"authorization": wrong}
            refused = http.post(COMPLETIONS, json=SHORT, headers=headers)
            assert refused.status_code == 401 and refused.json()["error"]["code"] == "invalid_api_key"
            assert http.get("/metrics", headers=headers).status_code == 401
        for key in ("one", "two"):
            assert http.post(COMPLETIONS, json=SHORT, headers={"authorization": f"Bearer {key}"}).status_code == 200
        assert http.get("/health").status_code == 200


def test_each_key_is_a_tenant_of_its_own() -> None:
    with running(api_key=("one", "two")) as (served, http):
        tenants = []
        enter = served.service.engine.thread.enter
        served.service.engine.thread.enter = lambda request, *rest, **more: (  # type: ignore[method-assign]
            tenants.append(request.params.tenant) or enter(request, *rest, **more)  # type: ignore[func-returns-value]
        )
        for key in ("one", "two", "one"):
            http.post(COMPLETIONS, json=SHORT, headers={"authorization": f"Bearer {key}"})
        assert tenants[0] == tenants[2] != tenants[1] and None not in tenants


def test_request_ids_and_origins() -> None:
    with running(cors_origin=("https://a.example",)) as (_, http):
        assert http.get("/version", headers={"x-request-id": "mine-7"}).headers["x-request-id"] == "mine-7"
        made = http.get("/version", headers={"x-request-id": "a b\u00e9".encode()}).headers["x-request-id"]
        assert re.fullmatch("[0-9a-f]{32}", made)
        asked = {"origin": "https://a.example", "access-control-request-method": "POST"}
        assert http.options(COMPLETIONS, headers=asked).headers["access-control-allow-origin"] == "https://a.example"
        told = http.post(COMPLETIONS, content=b"{", headers={"origin": "https://a.example"})
        assert told.status_code == 400 and told.headers["access-control-allow-origin"] == "https://a.example"
        other = http.get("/version", headers={"origin": "https://b.example"})
        assert "access-control-allow-origin" not in other.headers


def test_a_body_that_is_announced_too_large_is_not_read() -> None:
    with running(max_body=0.001) as (served, http):
        with raw_post(served, {"prompt": "a"}, length=10**9) as connection:
            assert connection.recv(100).startswith(b"HTTP/1.1 413 ")
        assert http.post(COMPLETIONS, json={"prompt": "a" * 2000}).status_code == 413
        pieces = (b"a" * 100 for _ in range(50))  # no length is announced
        assert http.post(COMPLETIONS, content=pieces).status_code == 413
        assert http.post(COMPLETIONS, json=SHORT).status_code == 200


def test_a_body_that_does_not_come() -> None:
    with running(body_timeout=0.05) as (served, http):
        with raw_post(served, {"prompt": "a"}, length=500) as connection:
            assert connection.recv(100).startswith(b"HTTP/1.1 408 ")
        with raw_post(served, {"prompt": "a"}, length=500):
            pass  # the client is gone before its body has come
        assert http.post(COMPLETIONS, json=SHORT).status_code == 200


def test_the_queue_is_limited() -> None:
    with running(max_queue=2) as (served, http), held(served) as release:
        connections = [raw_post(served, SHORT) for _ in range(6)]  # a batch of 4, and 2 that wait
        until(lambda: served.service.num_choices == 6)
        for body in (SHORT, {**SHORT, "stream": True}):
            refused = http.post(COMPLETIONS, json=body)
            assert refused.status_code == 429 and refused.json()["error"]["type"] == "rate_limit_error"
            assert refused.headers["retry-after"]
        waiting = re.findall(r"vllm:num_requests_(?:running|waiting){.*} (.*)", http.get("/metrics").text)
        assert sum(map(float, waiting)) == 6
        release()
        for connection in connections:
            assert connection.recv(100).startswith(b"HTTP/1.1 200 ")
            connection.close()
        assert http.post(COMPLETIONS, json=SHORT).status_code == 200


def test_a_key_cannot_fill_the_queue() -> None:
    """Of 8 places 2 are kept for each of two keys."""
    with running(max_queue=4, api_key=("one", "two")) as (served, http), held(served) as release:
        one, two = ({"authorization": f"Bearer {key}"} for key in ("one", "two"))
        connections = [raw_post(served, SHORT, **one) for _ in range(6)]
        until(lambda: served.service.num_choices == 6)
        refused = http.post(COMPLETIONS, json=SHORT, headers=one)
        assert refused.status_code == 429 and "2 more are kept for other keys" in refused.text
        connections += [raw_post(served, SHORT, **two)]
        until(lambda: served.service.num_choices == 7)
        refused = http.post(COMPLETIONS, json=SHORT, headers=one)
        assert refused.status_code == 429 and "1 more are kept for other keys" in refused.text
        connections += [raw_post(served, SHORT, **two)]
        until(lambda: served.service.num_choices == 8)
        for headers in (one, two):
            assert http.post(COMPLETIONS, json=SHORT, headers=headers).status_code == 429
        release()
        for connection in connections:
            assert connection.recv(100).startswith(b"HTTP/1.1 200 ")
            connection.close()


@pytest.mark.parametrize(
    ("key", "priority", "trusted", "place"),
    [("two", 0, False, 0), ("two", 0, True, 4), ("one", 0, False, 4), ("one", 60, False, 0)],
    ids=["another's", "another's, trusted", "its own, later", "its own, first"],
)
def test_a_priority_is_that_of_one_key(key: str, priority: int, trusted: bool, place: int) -> None:
    """The batch and the queue are full of one key's urgent requests: another key's request is answered first."""
    long = LONG | {"max_tokens": 300, "priority": 50}
    with running(api_key=("one", "two"), trust_priority=trusted) as (served, _), held(served) as release:
        ended: list[int] = []
        record = served.service.record
        served.service.record = lambda output, *rest: (  # type: ignore[method-assign]
            ended.append(len(output.choice.token_ids)) or record(output, *rest)  # type: ignore[func-returns-value]
        )
        connections = [raw_post(served, long, authorization="Bearer one") for _ in range(6)]
        until(lambda: len(served.service.engine.thread._jobs) == 6)
        connections += [raw_post(served, SHORT | {"priority": priority}, authorization=f"Bearer {key}")]
        until(lambda: len(served.service.engine.thread._jobs) == 7)
        release()
        for connection in connections:
            assert connection.recv(100).startswith(b"HTTP/1.1 200 ")
            connection.close()
        assert ended.index(3) == place  # there are free slots when four have ended


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("begun", [False, True], ids=["waiting", "begun"])
def test_a_client_that_leaves_ends_its_request(stream: bool, begun: bool) -> None:
    with running() as (served, http), held(served) as release:
        connection = raw_post(served, {**LONG, "stream": stream, "n": 1})
        until(lambda: served.service.num_choices == 1)
        if begun:
            release()
            if stream:
                connection.recv(100)
            else:
                until(lambda: served.llm.engine.last_step.num_tokens > 0)
        connection.close()
        until(lambda: served.service.num_choices == 0)
        release()
        served.settle()
        assert 'forerun:disconnects_total{model_name="it"} 1.0' in http.get("/metrics").text
        assert http.post(COMPLETIONS, json=SHORT).status_code == 200


def test_a_request_that_takes_too_long() -> None:
    with running(request_timeout=0.05) as (served, http):
        whole = http.post(COMPLETIONS, json=LONG)
        assert whole.status_code == 408 and whole.json()["error"]["type"] == "timeout_error"
        events = http.post(COMPLETIONS, json={**LONG, "stream": True}).text.strip().split("\n\n")
        assert events[-1] == "data: [DONE]" and "error" in json.loads(events[-2].removeprefix("data: "))
        served.settle()


def test_a_port_of_windows_is_not_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    """There SO_REUSEADDR takes a port that another server has."""
    monkeypatch.setattr(sys, "platform", "win32")
    monkeypatch.setattr(socket, "SO_EXCLUSIVEADDRUSE", socket.SO_KEEPALIVE, raising=False)
    with bound_socket(ServerOptions(port=0)) as listening:
        assert listening.getsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR) == 0
        assert listening.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1


def test_a_client_that_does_not_read_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    def small(options: ServerOptions) -> socket.socket:
        made = bound_socket(options)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        return made

    monkeypatch.setattr("serving.bound_socket", small)
    with running(send_timeout=0.1) as (served, http):
        body = {**LONG, "stream": True, "n": 4, "temperature": 1, "seed": 2, "logprobs": 20}
        with raw_post(served, body):
            until(lambda: served.service.num_choices == 4)
            until(lambda: served.service.num_choices == 0)  # though nothing of it was read
        assert http.post(COMPLETIONS, json=SHORT).status_code == 200


def test_a_failing_forward_ends_its_request_alone() -> None:
    with running() as (served, http):

        def fail(_: Any) -> None:
            raise RuntimeError("the text of a prompt")

        served.llm.target.before_forward = fail  # type: ignore[attr-defined]
        for stream in (False, True):
            failed = http.post(COMPLETIONS, json={**SHORT, "stream": stream})
            assert failed.status_code == (200 if stream else 500) and "the text" not in failed.text
            assert '"type":"server_error"' in failed.text
        served.llm.target.before_forward = lambda _: None  # type: ignore[attr-defined]
        assert http.post(COMPLETIONS, json=SHORT).status_code == 200


def test_the_drain_lets_the_rest_finish() -> None:
    with running() as (served, http), held(served) as release:
        waiting = raw_post(served, {**SHORT, "stream": True})
        until(lambda: served.service.num_choices == 1)
        served.server.handle_exit(signal.SIGTERM, None)
        until(lambda: http.get("/health").status_code == 503)
        refused = http.post(COMPLETIONS, json=SHORT)
        assert refused.status_code == 503 and refused.json()["error"]["type"] == "server_error"
        release()
        answer = b""
        while piece := waiting.recv(1 << 16):
            answer += piece
        assert answer.startswith(b"HTTP/1.1 200 ") and b"data: [DONE]" in answer
        until(lambda: served.server.should_exit)
        waiting.close()


@pytest.mark.parametrize(("drain_timeout", "num_signals"), [(0.05, 1), (LIMIT, 2)])
def test_the_drain_has_an_end(drain_timeout: float, num_signals: int) -> None:
    with running(drain_timeout=drain_timeout) as (served, _), held(served) as release:
        connection = raw_post(served, SHORT)
        until(lambda: served.service.num_choices == 1)
        for _ in range(num_signals):
            served.server.handle_exit(signal.SIGTERM, None)
        until(lambda: served.server.force_exit and served.server.should_exit)
        release()
        connection.close()


def test_what_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    for log_prompts in (False, True):
        caplog.clear()
        with caplog.at_level(logging.INFO, "forerun.server"), running(log_prompts=log_prompts) as (_, http):
            http.post(COMPLETIONS, json={**SHORT, "prompt": "hello secret"}, headers={"x-request-id": "it-1"})
            http.post(COMPLETIONS, json={**SHORT, "prompt": ["secret", 1]})
            http.post(COMPLETIONS, json={**SHORT, "temperature": -1}, headers={"x-request-id": "it-2"})
            stream = {"stream": True, "n": 2, "temperature": 1, "seed": 1}
            http.post(COMPLETIONS, json=SHORT | stream, headers={"x-request-id": "it-3"})
        told = [record.msg for record in caplog.records if isinstance(record.msg, dict)]
        line = next(entry for entry in told if entry.get("request_id") == "it-1" and entry["event"] == "request")
        assert line["status"] == 200 and line["prompt_tokens"] == 12 and line["completion_tokens"] == 3
        assert line["finish_reasons"] == ["length"] and line["seconds"] > 0 and line["model"] == "it"
        assert line["tokens_per_second"] > 0 and line["tokens_per_step"] == 1 and line["cached_tokens"] == 0
        assert 0 < line["first_token_seconds"] < line["seconds"]
        of = {entry["request_id"]: entry for entry in told if entry["event"] == "request"}
        assert (of["it-2"]["status"], of["it-2"]["param"]) == (400, "temperature")
        whole = of["it-3"]
        assert len(whole["finish_reasons"]) == 2 and 0 < whole["first_token_seconds"] < whole["seconds"]
        assert whole["tokens_per_step"] == round(whole["completion_tokens"] / whole["forwards"], 2)
        assert ("secret" in caplog.text) == log_prompts


def test_ready_is_said_once_connections_are_taken(caplog: pytest.LogCaptureFixture) -> None:
    taken: list[bool] = []

    def emit(record: logging.LogRecord) -> bool:
        if isinstance(record.msg, dict) and record.msg["event"] == "ready":
            host, port = record.msg["url"].removeprefix("http://").split(":")
            with socket.create_connection((host, int(port)), timeout=LIMIT):
                taken.append(True)
        return True

    caplog.handler.addFilter(emit)
    with caplog.at_level(logging.INFO, "forerun.server"), running():
        pass
    assert taken == [True]


def test_metrics_have_the_names_that_tools_read() -> None:
    with running() as (served, http):
        http.post(COMPLETIONS, json={**SHORT, "max_tokens": 20})
        http.post(COMPLETIONS, json={**SHORT, "stream": True})
        served.service.metrics.ended(SequenceStats(num_preemptions=2, num_read_tokens=64), "stop", 0, 1.0)
        text = http.get("/metrics").text
    names = {re.split("[{ ]", line)[0] for line in text.splitlines() if not line.startswith("#")}
    assert names >= {
        "vllm:num_requests_running",
        "vllm:num_requests_waiting",
        "vllm:prompt_tokens_total",
        "vllm:generation_tokens_total",
        "vllm:request_success_total",
        "vllm:time_to_first_token_seconds_bucket",
        "vllm:inter_token_latency_seconds_bucket",
        "vllm:e2e_request_latency_seconds_bucket",
        "vllm:request_queue_time_seconds_bucket",
        "vllm:prefix_cache_queries_total",
        "vllm:prefix_cache_hits_total",
        "vllm:spec_decode_num_drafts_total",
        "vllm:spec_decode_num_draft_tokens_total",
        "vllm:spec_decode_num_accepted_tokens_total",
        "vllm:spec_decode_num_accepted_tokens_per_pos_total",
        "forerun:decisions_total",
        "forerun_info",
        "process_resident_memory_bytes",
    }
    assert 'vllm:generation_tokens_total{model_name="it"} 23.0' in text
    assert 'vllm:prompt_tokens_total{model_name="it"} 10.0' in text
    assert 'vllm:prefix_cache_queries_total{model_name="it"} 10.0' in text
    assert 'vllm:prefix_cache_hits_total{model_name="it"} 0.0' in text  # pages are shared whole
    assert 'vllm:num_preemptions_total{model_name="it"} 2.0' in text
    assert 'vllm:external_prefix_cache_hits_total{model_name="it"} 64.0' in text


DASHBOARD = Path(__file__).parents[3] / "docs" / "grafana.json"
NO_NAMES = re.compile(r'"[^"]*"|\[[^]]*\]|\b(?:sum|max|rate|histogram_quantile|by|and|on)\b|[\d.]+')
OF_PROMETHEUS = {"job", "instance"}
"""Labels that are added where the metrics are read."""


def test_the_dashboard_reads_metrics_that_are_there() -> None:
    """Every name in a query is that of a metric, or of a label that the metrics beside it have."""
    with running() as (served, http):
        http.post(COMPLETIONS, json={**SHORT, "max_tokens": 20})
        http.post(COMPLETIONS, json={})
        served.service.metrics.ended(SequenceStats(sources={"suffix": SourceStats()}), "stop", 1, 1.0)
        text = http.get("/metrics").text
    labels: dict[str, set[str]] = {}
    for name, within in re.findall(r"^([\w:]+)(?:{(.*)})? ", text, re.MULTILINE):
        labels.setdefault(name, set(OF_PROMETHEUS)).update(re.findall(r'(\w+)="', within))
    assert {"le", "model_name"} < labels["vllm:time_to_first_token_seconds_bucket"]
    panels = json.loads(DASHBOARD.read_text(encoding="utf-8"))["panels"]
    queries = [target["expr"] for panel in panels for target in panel["targets"]]
    assert len(panels) >= 10 and len({panel["id"] for panel in panels}) == len(panels)
    for query in queries:
        names = set(re.findall(r"[a-z_:]+", NO_NAMES.sub(" ", query)))
        metrics = names & labels.keys()
        assert metrics, query
        assert names - metrics <= set.intersection(*(labels[name] for name in metrics)), query
