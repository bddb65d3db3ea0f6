"""Ingress and replicas without Ray: the paths of `forerun serve` through both, and what happens when a replica ends."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import contextmanager
from hashlib import sha256
from typing import Any

import httpx
import openai
import pytest
import uvicorn
from sse_starlette.sse import EventSourceResponse
from starlette.types import Message

from forerun.errors import QueueFullError, ReplicaError
from forerun.integrations.ray.ingress import Ingress
from forerun.integrations.ray.messages import ForwardedRequest
from forerun.integrations.ray.replica import Replica
from forerun.server.metrics import HTTPMetrics, Prometheus
from forerun.server.options import ServerOptions
from forerun.server.run import DrainingServer, bound_socket
from forerun.server.service import Service
from serving import LIMIT, NAME, fake_llm, serving, until

CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
SHORT = {"prompt": "hello", "max_tokens": 8, "temperature": 0, "ignore_eos": True}
LONG = {**SHORT, "max_tokens": 3000}
LINES = {"prompt": "hello", "options": {"temperature": 0, "num_predict": 24, "ignore_eos": True}}
DURATIONS = ("total_duration", "prompt_eval_duration", "eval_duration")
MESSAGES = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 8, "temperature": 0}


class Replicas:
    """One replica in this process.

    Attributes:
        asked: what has come.
        fails: called before every message, with the request and how many came before; it may raise.
        num_open: requests under way.
    """

    def __init__(self, service: Service) -> None:
        self.service, self._replica = service, Replica(service, "one")
        self.asked: list[ForwardedRequest] = []
        self.fails: Callable[[ForwardedRequest, int], None] = lambda asked, number: None
        self.num_open = 0

    async def answer(self, asked: ForwardedRequest) -> AsyncGenerator[list[Message], None]:
        self.asked.append(asked)
        self.num_open += 1
        answer = self._replica.answer(asked)
        try:
            self.fails(asked, 0)
            number = 0
            async for messages in answer:
                for message in messages:
                    self.fails(asked, number := number + 1)
                    yield [message]
        finally:
            await answer.aclose()
            self.num_open -= 1

    async def live(self) -> list[dict[str, Any]]:
        return [await self._replica.state()] * 2


@contextmanager
def running(**options: Any) -> Iterator[tuple[Replicas, Ingress, httpx.Client]]:
    made = ServerOptions(port=0, **options)
    service = Service(fake_llm(), NAME, made)
    replicas = Replicas(service)
    ingress = Ingress(replicas, made, HTTPMetrics(Prometheus(NAME)), lambda: "http://node:1/metrics")
    config = uvicorn.Config(ingress.app, log_config=None, lifespan="on", ws="none")
    server = DrainingServer(config, ingress.middleware, 1.0, NAME)
    with bound_socket(made) as listening:
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
        thread.start()
        try:
            until(lambda: server.started)
            url = f"http://127.0.0.1:{listening.getsockname()[1]}"
            with httpx.Client(base_url=url, timeout=LIMIT) as http:
                yield replicas, ingress, http
                until(lambda: not replicas.num_open and not service.num_choices and not service.engine.thread._jobs)
        finally:
            server.should_exit = True
            thread.join(LIMIT)
            service.close()


@pytest.fixture(scope="module")
def both() -> Iterator[tuple[httpx.Client, httpx.Client]]:
    """A server without an ingress, and one with it."""
    with serving(fake_llm()) as served, httpx.Client(base_url=served.url, timeout=LIMIT) as direct, running() as made:
        yield direct, made[2]


def told(response: httpx.Response) -> Any:
    """The body without what differs from request to request."""
    if response.headers["content-type"].startswith("text/event-stream"):
        events = [line.partition("data: ")[2] for line in response.text.splitlines() if line.startswith("data: ")]
        return [cleared(json.loads(event)) if event != "[DONE]" else event for event in events]
    if response.headers["content-type"] == "application/x-ndjson":
        return [cleared(json.loads(line)) for line in response.text.splitlines()]
    return cleared(response.json()) if "json" in response.headers["content-type"] else response.text


def cleared(value: Any) -> Any:
    if isinstance(value, dict):
        left_out = ("id", "created", "created_at", "metrics", "item_id", "progress", *DURATIONS)
        return {name: cleared(each) for name, each in value.items() if name not in left_out}
    return [cleared(each) for each in value] if isinstance(value, list) else value


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("POST", COMPLETIONS, SHORT),
        ("POST", COMPLETIONS, {**SHORT, "stream": True}),
        ("POST", CHAT, {**MESSAGES, "stream": True, "stream_options": {"include_usage": True}}),
        ("POST", CHAT, MESSAGES),
        ("POST", RESPONSES, {"input": "hello", "max_output_tokens": 8, "temperature": 0, "stream": True}),
        ("POST", "/api/generate", LINES),
        ("POST", "/api/generate", {**LINES, "stream": False}),
        ("POST", "/api/chat", {}),
        ("POST", "/api/pull", {}),
        ("POST", "/tokenize", {"prompt": "hello"}),
        ("POST", COMPLETIONS, {"prompt": "hello", "temperature": -1}),
        ("POST", COMPLETIONS, {"prompt": "hello", "model": "other"}),
        ("POST", COMPLETIONS, [1]),
        ("GET", "/v1/models", None),
        ("GET", "/openapi.json", None),
        ("GET", "/page.js", None),
        ("GET", "/nowhere", None),
        ("GET", COMPLETIONS, None),
    ],
)
def test_the_same_as_without_an_ingress(both: Any, method: str, path: str, body: Any) -> None:
    direct, through = (http.request(method, path, json=body) for http in both)
    assert through.status_code == direct.status_code
    assert told(through) == told(direct)
    names = {name for name, _ in direct.headers.items()} - {"content-length", "transfer-encoding"}
    assert names <= set(through.headers)


def test_what_is_told_of_all_replicas_together(both: Any) -> None:
    health = both[1].get("/health")
    assert health.status_code == 200 and health.json()["replicas"] == 2
    assert health.json()["cannot"] == both[0].get("/health").json()["cannot"]
    assert both[1].get("/live").json()["max_batch"] == 2 * both[0].get("/live").json()["max_batch"]
    metrics = both[1].get("/metrics")
    assert metrics.status_code == 404 and "http://node:1/metrics" in metrics.json()["error"]["message"]


def test_keys_limits_and_the_drain_are_the_ingress_s() -> None:
    with running(api_key=("one", "two"), max_body=0.001) as (replicas, ingress, http):
        assert http.post(COMPLETIONS, json=SHORT).status_code == 401
        headers = {"authorization": "Bearer two", "x-session-id": "s", "x-request-id": "mine"}
        assert http.post(COMPLETIONS, json={"prompt": "a" * 3000}, headers=headers).status_code == 413
        assert not replicas.asked
        answered = http.post(COMPLETIONS, json=SHORT, headers=headers)
        assert answered.status_code == 200 and answered.headers["x-request-id"] == "mine"
        (asked,) = replicas.asked
        assert asked.tenant == f"key {sha256(b'two').hexdigest()}" and asked.prefix.session == f"{asked.tenant} s"
        assert len(asked.prefix.keys) == 1
        assert b"two" not in repr(asked).encode()  # the key itself goes no further
        ingress.middleware.draining = True
        refused = http.post(COMPLETIONS, json=SHORT, headers=headers)
        assert refused.status_code == 503 and http.get("/health").status_code == 503


def test_who_may_call_is_as_without_an_ingress() -> None:
    with running() as (replicas, _, http):
        for headers, status in (
            ({"host": "evil.example"}, 403),
            ({"origin": "https://evil.example"}, 403),
            ({"content-type": "text/plain"}, 415),
        ):
            assert http.post(COMPLETIONS, json=SHORT, headers=headers).status_code == status
            assert http.get("/live", headers=headers).status_code == (403 if status == 403 else 200)
        assert not replicas.asked
        own = {"host": "localhost:1", "origin": "http://localhost:1"}
        assert http.post(COMPLETIONS, json=SHORT, headers=own).status_code == 200
    with running(api_key=("one",), metrics_key="figures") as (_, _, http):
        keys = {key: {"authorization": f"Bearer {key}"} for key in ("one", "figures")}
        assert [http.get("/live", headers=given).status_code for given in keys.values()] == [401, 200]


def lost(*ends: int) -> Callable[[ForwardedRequest, int], None]:
    """Replicas that end before these messages, one after another; the last one ever again."""
    left = [*ends]

    def fails(asked: ForwardedRequest, number: int) -> None:
        if number == left[0]:
            if len(left) > 1:
                left.pop(0)
            raise ReplicaError("The replica has ended.")

    return fails


@pytest.mark.parametrize("at", [0, 1, 2])
@pytest.mark.parametrize("stream", [False, True])
def test_a_replica_that_ends_before_the_answer(at: int, stream: bool) -> None:
    with running() as (replicas, _, http):
        body = {**SHORT, "stream": stream}
        whole = told(http.post(COMPLETIONS, json=body))
        replicas.asked.clear()
        replicas.fails = lost(at, -1)
        assert texts_of(told(http.post(COMPLETIONS, json=body))) == texts_of(whole) and len(replicas.asked) == 2
        replicas.asked.clear()
        replicas.fails = lost(at)
        failed = http.post(COMPLETIONS, json=body)
        assert len(replicas.asked) == 3  # the request may be what ends them
        assert failed.status_code == 503 and failed.headers["retry-after"] == "1"
        assert failed.json()["error"]["type"] == "server_error"
        replicas.fails = lambda asked, number: None
        assert http.post(COMPLETIONS, json=SHORT).status_code == 200


def texts_of(answered: Any) -> dict[int, dict[str, Any]]:
    """What a whole answer, or the chunks or events of a stream, say of each choice, however they are divided."""
    found: dict[int, dict[str, Any]] = {}
    for event in answered if isinstance(answered, list) else [answered]:
        choices = [] if event == "[DONE]" else event.get("choices", [event] if "delta" in event else [])
        for choice in choices:
            made = found.setdefault(choice.get("index", 0), {"text": "", "tokens": [], "drafts": "", "opened": 0})
            delta = choice.get("delta", {})
            made["text"] += delta if isinstance(delta, str) else delta.get("content", choice.get("text", ""))
            made["opened"] += isinstance(delta, dict) and "role" in delta
            made["drafts"] += "".join(text for text, _ in choice.get("drafts", []))
            logprobs = choice.get("logprobs") or []
            if isinstance(logprobs, dict):
                columns = zip(*(v for v in logprobs.values() if v), strict=True)
                logprobs = logprobs.get("content") or [*columns]
            made["tokens"] += logprobs
            assert "end" not in made, "something comes after the end"
            if choice.get("finish_reason"):
                made["end"] = choice["finish_reason"]
    return found


SEEDED = {"temperature": 1, "seed": 5, "max_tokens": 24, "stream": True}


@pytest.mark.parametrize(
    ("path", "more"),
    [
        (COMPLETIONS, {"prompt": ["hi", "ho"], "n": 2, "logprobs": 2}),
        (
            COMPLETIONS,
            {
                "prompt": "hi",
                "temperature": 0,
                "stop": ["e~", "a b"],
                "echo": True,
                "stream_options": {"include_drafts": True},
            },
        ),
        (CHAT, {**MESSAGES, "n": 2, "logprobs": True, "stream_options": {"include_usage": True}, **SEEDED}),
        (RESPONSES, {"input": "hi", "max_output_tokens": 24, "include": ["message.output_text.logprobs"]}),
    ],
)
def test_a_stream_goes_on_at_another_replica(path: str, more: dict[str, Any]) -> None:
    body = {name: value for name, value in SEEDED.items() if path != RESPONSES or name != "max_tokens"} | more
    with running() as (replicas, _, http):
        whole = http.post(path, json=body)
        assert whole.status_code == 200, whole.text
        wanted = texts_of(told(whole))
        for at in range(2, 40, 3):
            replicas.asked.clear()
            replicas.fails = lost(at, at // 2, -1)
            answered = http.post(path, json=body)
            events = told(answered)
            assert texts_of(events) == wanted and (len(replicas.asked) == 3 or at > 4)
            named = {json.loads(line[6:]).get("id") for line in answered.text.splitlines() if line[:7] == "data: {"}
            assert len(named) == 1
            if path == RESPONSES:
                assert [event["sequence_number"] for event in events] == [*range(len(events))]
                assert [event for event in events if event["type"] != "response.output_text.delta"] == [
                    event for event in told(whole) if event["type"] != "response.output_text.delta"
                ] or cleared(events[-1])["response"]["output"] == cleared(told(whole)[-1])["response"]["output"]
            else:
                assert events.count("[DONE]") == 1 and events[-1] == "[DONE]"


def test_lines_go_on_at_another_replica(monkeypatch: pytest.MonkeyPatch) -> None:
    with running() as (replicas, _, http):
        wanted = told(http.post("/api/generate", json=LINES))
        # most messages are pings, after which a replica may end as well
        monkeypatch.setattr(EventSourceResponse, "DEFAULT_PING_INTERVAL", 0.002)
        model: Any = replicas.service.llm.target
        model.before_forward = lambda _: time.sleep(0.01)
        for at in (3, 9, 15):
            replicas.asked.clear()
            replicas.fails = lost(at, at // 2, -1)
            lines = told(http.post("/api/generate", json=LINES))
            assert "".join(line["response"] for line in lines) == "".join(line["response"] for line in wanted)
            assert lines[-1] == wanted[-1] and len(replicas.asked) == 3
        replicas.fails = lost(5, 2)
        *_, last = told(http.post("/api/generate", json=LINES))
        assert {*last} == {"error"} and "has ended" in last["error"]


def test_a_message_begins_once_wherever_its_replica_ends() -> None:
    body = {**MESSAGES, "max_tokens": 8, "temperature": 0, "ignore_eos": True, "stream": True}
    with running() as (replicas, _, http):
        events: list[list[str]] = []
        for at in (-1, *range(1, 9)):
            replicas.fails = lost(at, -1)
            found = told(http.post("/v1/messages", json=body))
            events.append([event["type"] for event in found if event["type"] not in ("ping", "content_block_delta")])
        assert events[0][0] == "message_start" and events == events[:1] * 9


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT, RESPONSES])
@pytest.mark.parametrize("temperature", [0, 1])
def test_a_stream_that_cannot_go_on_ends_with_an_error(path: str, temperature: int) -> None:
    body: dict[str, Any] = {COMPLETIONS: {"prompt": "hi"}, CHAT: MESSAGES, RESPONSES: {"input": "hi"}}
    body = {**body[path], "temperature": temperature, "stream": True, "ignore_eos": True}
    with running() as (replicas, _, http):
        # all replicas end; or one does, and another draws other tokens
        replicas.fails = lost(5, 2) if temperature == 0 else lost(7, -1)
        failed = http.post(path, json=body)
        assert failed.status_code == 200
        events = told(failed)
        if path == RESPONSES:
            assert failed.text.split("\n\n")[-2].startswith("event: error\n")
            assert events[-1]["type"] == "error" and "has ended" in events[-1]["message"]
            assert [event["sequence_number"] for event in events] == [*range(len(events))]
        else:
            assert events[-2]["error"]["type"] == "server_error" and events[-1] == "[DONE]"


def test_the_stock_client_sees_the_failure() -> None:
    with running() as (replicas, _, http):
        replicas.fails = lost(5)
        with openai.OpenAI(base_url=f"{http.base_url}/v1", api_key="none", max_retries=0, timeout=LIMIT) as client:
            stream = client.completions.create(model=NAME, prompt="hi", max_tokens=40, stream=True)
            with pytest.raises(openai.APIError, match="has ended"):
                list(stream)
            replicas.fails = lost(2)
            with pytest.raises(openai.InternalServerError) as failed:
                client.completions.create(model=NAME, prompt="hi", max_tokens=4)
            assert failed.value.status_code == 503


def test_all_replicas_are_full() -> None:
    def full(asked: ForwardedRequest, number: int) -> None:
        raise QueueFullError("full")

    with running() as (replicas, _, http):
        replicas.fails = full
        refused = http.post(COMPLETIONS, json=SHORT)
        assert refused.status_code == 429 and refused.headers["retry-after"] == "1"


def test_no_replica_takes_the_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("forerun.integrations.ray.ingress._START_TIMEOUT", 0.05)
    monkeypatch.setattr("forerun.integrations.ray.ingress._SUMMARY_TIMEOUT", 0.05)
    with running() as (replicas, _, http):

        async def never(asked: ForwardedRequest) -> AsyncGenerator[list[Message], None]:
            import asyncio

            await asyncio.sleep(LIMIT)
            yield []

        replicas.answer = never  # type: ignore[method-assign]
        for failed in (http.post(COMPLETIONS, json=SHORT), http.get("/v1/models")):
            assert failed.status_code == 503 and "No replica has taken" in failed.json()["error"]["message"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_ends_its_request(stream: bool) -> None:
    with running() as (replicas, _, http):
        forwards = threading.Event()
        model: Any = replicas.service.llm.target
        model.before_forward = lambda _: (forwards.set(), time.sleep(0.005))
        if stream:
            with http.stream("POST", COMPLETIONS, json={**LONG, "stream": True}) as response:
                next(response.iter_raw())
                assert forwards.wait(10)
        else:
            with pytest.raises(httpx.ReadTimeout):
                http.post(COMPLETIONS, json=LONG, timeout=0.3)
        assert forwards.is_set()
        until(lambda: not replicas.num_open and not replicas.service.num_choices)
