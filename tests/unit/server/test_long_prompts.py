"""A prompt that takes long: what its client is told meanwhile, what is refused before, and what is left of it."""

from __future__ import annotations

import json
import logging
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPConnection
from typing import Any

import httpx
import openai
import pytest

from forerun import LLM
from forerun.kernels.cpu.page_layout import PAGE
from serving import JSON, LIMIT, Served, fake_llm, serving, until

PROMPT = "hello " * 20
SAMPLING = {"temperature": 0, "seed": 1}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": 4, **SAMPLING},
    "/v1/completions": {"prompt": PROMPT, "max_tokens": 4, **SAMPLING},
    "/v1/responses": {"input": PROMPT, "max_output_tokens": 4, "temperature": 0},
    "/v1/messages": {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": 4, "temperature": 0},
}
BEGUN = {"/v1/responses": "response.created", "/v1/messages": "message_start"}
MEANWHILE = {"/v1/responses": "response.in_progress", "/v1/messages": "ping"}


@pytest.fixture(autouse=True)
def _often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("forerun.server.completions.KEEP_ALIVE", 0.03)


class Held:
    """A server whose model computes prompts in chunks of 40 tokens, as many as it is let.

    Attributes:
        free: forwards that may still run.
    """

    def __init__(self, served: Served, http: httpx.Client) -> None:
        self.served, self.http, self.free = served, http, threading.Semaphore(0)
        model: Any = served.llm.target
        model.before_forward = lambda _: self.free.acquire(timeout=LIMIT)

    def release(self, count: int = 100) -> None:
        self.free.release(count)


@contextmanager
def held(**options: Any) -> Iterator[Held]:
    llm = fake_llm(prefill_chunk=40, num_draft_tokens=0)
    with serving(llm, **options) as served, httpx.Client(base_url=served.url, timeout=LIMIT) as http:
        made = Held(served, http)
        yield made
        made.release()


def parts(response: httpx.Response) -> Iterator[str]:
    """The events and comments of a stream, as they come."""
    rest = ""
    for piece in response.iter_text():
        *whole, rest = (rest + piece).split("\n\n")
        yield from whole


def progress(part: str) -> dict[str, int] | None:
    return json.loads(part.removeprefix(": progress ")) if part.startswith(": progress ") else None


def kind(part: str) -> str:
    found = re.match("event: (.*)\n", part)
    return found[1] if found else ""


@pytest.mark.parametrize("path", BODIES)
def test_a_stream_begins_at_once_and_tells_how_far_its_prompt_is(path: str) -> None:
    with held() as server, server.http.stream("POST", path, json={**BODIES[path], "stream": True}) as response:
        assert response.status_code == 200  # while nothing is computed
        seen = parts(response)
        if path in BEGUN:
            assert kind(next(seen)) == BEGUN[path]
        first = progress(next(seen))
        assert first is not None and first.keys() == {"computed", "prompt", "waiting"} and first["computed"] == 0
        told: list[str] = []
        for count in (40, 80):
            server.release(1)
            while (found := progress(part := next(seen)) or {}).get("computed") != count:
                told.append(kind(part))
        assert found == {"computed": 80, "prompt": first["prompt"], "waiting": 0} and found["prompt"] > 80
        assert {*told} | {""} == {MEANWHILE.get(path, ""), ""}
        server.release()
        rest = list(seen)
        whole = server.http.post(path, json=BODIES[path]).json()
        numbers = [
            json.loads(part.partition("data: ")[2])["sequence_number"] for part in rest if "sequence_num" in part
        ]
        assert numbers == [*range(numbers[0], numbers[0] + len(numbers))] if numbers else path != "/v1/responses"
        assert "error" not in "".join(map(kind, rest)) and whole
        server.served.settle()


def test_published_clients_skip_what_is_told_meanwhile() -> None:
    with held() as server:
        client = openai.OpenAI(base_url=f"{server.served.url}/v1", api_key="none", max_retries=0)
        threading.Timer(0.2, server.release).start()
        body: Any = {**BODIES["/v1/chat/completions"], "model": "it"}
        text = "".join(
            each.choices[0].delta.content or "" for each in client.chat.completions.create(**body, stream=True)
        )
        assert text == client.chat.completions.create(**body).choices[0].message.content


def test_who_waits_for_a_slot_is_told_so() -> None:
    with held() as server:
        body = {**BODIES["/v1/completions"], "stream": True}
        with server.http.stream("POST", "/v1/completions", json={**body, "prompt": ["a"] * 4}) as others:
            of_others = parts(others)
            assert progress(next(of_others)) is not None
            until(lambda: len(server.served.llm.engine.scheduler) == 4)
            with server.http.stream("POST", "/v1/completions", json=body) as response:
                told = [progress(part) for part, _ in zip(parts(response), range(3))]
            assert told[-1] == {"computed": 0, "prompt": len(PROMPT), "waiting": 1}
        server.release()
        server.served.settle()


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_what_is_refused_has_its_own_status(stream: bool) -> None:
    """Whatever is computed meanwhile."""
    with held(max_queue=0) as server:
        refused = {
            400: {"prompt": "a" * 5000},
            401: {"prompt": "a", "structured_outputs": {"regex": "("}},
            404: {"prompt": "a", "model": "other"},
            429: {"prompt": ["a"] * 4},
        }
        with server.http.stream("POST", "/v1/completions", json={"prompt": "a", "stream": True}) as response:
            assert response.status_code == 200
            for status, body in refused.items():
                found = server.http.post("/v1/completions", json={**body, "stream": stream})
                assert found.status_code == (400 if status == 401 else status) and "error" in found.json()
        server.release()
        server.served.settle()
        server.served.service.engine.thread.close()
        assert server.http.post("/v1/completions", json={"prompt": "a", "stream": stream}).status_code == 503


def test_an_answer_that_a_grammar_could_not_end_is_refused_before_it_begins() -> None:
    with held() as server:
        body = {"prompt": "a", "structured_outputs": {"regex": "a+"}, "ignore_eos": True, "stream": True}
        found = server.http.post("/v1/completions", json=body)
        assert found.status_code == 400 and "No token ends an answer" in found.json()["error"]["message"]


@pytest.mark.parametrize("path", BODIES)
def test_what_fails_later_is_the_last_event(path: str) -> None:
    with held() as server:
        server.release()

        def fail(_: Any) -> None:
            raise RuntimeError("the text of a prompt")

        server.served.llm.target.before_forward = fail  # type: ignore[attr-defined]
        found = server.http.post(path, json={**BODIES[path], "stream": True})
        assert found.status_code == 200 and "the text" not in found.text
        last = found.text.strip().removesuffix("data: [DONE]").strip().split("\n\n")[-1]
        event = json.loads(last.partition("data: ")[2])
        assert event.get("type") == "error" or event["error"]["type"] == "server_error"


def test_a_request_that_takes_too_long_says_so_in_its_stream() -> None:
    with held(request_timeout=0.1) as server:
        found = server.http.post("/v1/completions", json={**BODIES["/v1/completions"], "stream": True})
        assert found.status_code == 200 and "timeout_error" in found.text and found.text.endswith("data: [DONE]\n\n")
        server.release()


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_metrics_live_and_log_tell_how_far_prompts_are(stream: bool, caplog: pytest.LogCaptureFixture) -> None:
    def gauges() -> dict[str, float]:
        found = re.findall(r"forerun:prompt_tokens_(\w+){.*} (.*)", server.http.get("/metrics").text)
        return {name: float(value) for name, value in found}

    with caplog.at_level(logging.INFO, "forerun.server"), held() as server:
        assert gauges() == {"computed": 0, "waiting": 0}
        connection = HTTPConnection(server.served.url.removeprefix("http://"))
        body = json.dumps({**BODIES["/v1/completions"], "stream": stream})
        connection.request("POST", "/v1/completions", body, JSON)
        until(lambda: gauges()["waiting"] == len(PROMPT))
        server.release(1)
        until(lambda: gauges() == {"computed": 40, "waiting": len(PROMPT) - 40})
        live = server.http.get("/live").json()
        assert (live["prompt_tokens_computed"], live["prompt_tokens_waiting"]) == (40, len(PROMPT) - 40)
        until(lambda: any(each.msg.get("computed") == 40 for each in caplog.records if isinstance(each.msg, dict)))
        connection.close()  # the client goes
        until(lambda: not server.served.service.num_choices)
        server.release()
        server.served.settle()
        until(lambda: gauges() == {"computed": 0, "waiting": 0})
    lines = [each.msg for each in caplog.records if isinstance(each.msg, dict)]
    told = next(each for each in lines if each["event"] == "prompt" and each["computed"] == 40)
    assert told["prompt"] == len(PROMPT) and told["waiting"] == 0
    ended = next(each for each in lines if each["event"] == "request" and each.get("disconnected"))
    assert ended["request_id"] == told["request_id"] and ended["computed_tokens"] >= 40


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_what_a_client_that_left_had_computed_is_there_for_the_next(stream: bool) -> None:
    """With a model that has pages; by the client's own deadline, amid the prompt."""
    llm = LLM("bundled-draft", None, prefill_chunk=PAGE, max_batch=4)
    body = {"prompt": [(7 * i * i + 3) % 2000 for i in range(12 * PAGE)], "max_tokens": 6, "temperature": 0}
    with serving(llm) as served, httpx.Client(base_url=served.url, timeout=LIMIT) as http:
        forward, free, num_forwards = llm.target.forward, threading.Event(), 0

        def slow(*arguments: Any) -> Any:
            nonlocal num_forwards
            num_forwards += 1
            if num_forwards > 5:
                free.wait(LIMIT)
            return forward(*arguments)

        llm.target.forward = slow  # type: ignore[method-assign]
        if stream:
            with http.stream("POST", "/v1/completions", json={**body, "stream": True}):
                until(lambda: num_forwards > 5)
        else:
            with pytest.raises(httpx.ReadTimeout):
                http.post("/v1/completions", json=body, timeout=0.3)
        until(lambda: not served.service.num_choices)
        free.set()
        served.settle()
        again = http.post("/v1/completions", json=body).json()
        assert again["usage"]["prompt_tokens_details"]["cached_tokens"] >= 5 * PAGE
        assert served.llm.target.pool.forget()
        assert http.post("/v1/completions", json=body).json()["choices"] == again["choices"]
