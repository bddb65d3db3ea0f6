"""Work without end that one key asks for: it has limits, dies with its request, and leaves others alone."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from forerun.engine import chat_template
from forerun.sampling import grammar as compiling
from forerun.server.service import Preparation
from forerun.utils import children, vocabulary
from forerun.utils.children import CHILDREN, MOST_CHILDREN, RENDERERS
from serving import JSON, LIMIT, Served, fake_llm, serving, until

pytest.importorskip("llguidance")

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 2}
HANGS_AT_THE_THIRD_TURN = (
    "{% for m in messages %}{{ m.content }}{% endfor %}{% if messages | length > 4 %}"
    "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}{% endif %}"
)
TURNS: dict[str, Any] = {"max_tokens": 2, "messages": CHAT["messages"] * 5}
PRIMES = [n for n in range(99_999_001, 100_000_000, 2) if all(n % d for d in range(3, 10_000, 2))]


def bomb(number: int) -> dict[str, Any]:
    return {"type": "integer", "multipleOf": PRIMES[number]}


def form(schema: Any) -> dict[str, Any]:
    return CHAT | {"response_format": {"type": "json_schema", "json_schema": {"name": "it", "schema": schema}}}


def post(served: Served, path: str, body: dict[str, Any], key: str = "one", limit: float = LIMIT) -> httpx.Response:
    headers = JSON | {"authorization": f"Bearer {key}"}
    return httpx.post(f"{served.url}{path}", json=body, headers=headers, timeout=limit)


SECONDS = 0.15


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> Iterator[Served]:
    for module, name in ((compiling, "_SECONDS"), (chat_template, "_RENDER_SECONDS"), (vocabulary, "_SECONDS")):
        monkeypatch.setattr(module, name, SECONDS)
    llm = fake_llm()
    llm.tokenizer.chat_template = HANGS_AT_THE_THIRD_TURN
    with serving(llm, api_key=("one", "two")) as running:
        yield running


MUCH = f"{SECONDS} s of processor time"
PATHS: list[tuple[children.Children, str, dict[str, Any], str | None]] = [
    (CHILDREN, "/v1/chat/completions", form(bomb(0)), "response_format"),
    (CHILDREN, "/v1/chat/completions", CHAT | {"guided_json": bomb(1)}, "guided_json"),
    (CHILDREN, "/v1/completions", {"prompt": "a", "structured_outputs": {"json": bomb(2)}}, "structured_outputs"),
    (
        CHILDREN,
        "/v1/responses",
        {"input": "hello", "text": {"format": {"type": "json_schema", "name": "it", "schema": bomb(3)}}},
        "text",
    ),
    (
        CHILDREN,
        "/v1/messages",
        CHAT | {"output_config": {"format": {"type": "json_schema", "schema": bomb(4)}}},
        None,
    ),
    (RENDERERS, "/v1/chat/completions", TURNS, "messages"),
    (RENDERERS, "/v1/responses", {"input": TURNS["messages"]}, "input"),
    (RENDERERS, "/v1/messages/count_tokens", TURNS, None),
    (RENDERERS, "/tokenize", {"messages": TURNS["messages"]}, "messages"),
]
"""Who works, path, body, and what the error names: Anthropic's errors have no field."""


def assert_refused(served: Served, path: str, body: dict[str, Any], param: str | None) -> None:
    refused = post(served, path, body)
    error = refused.json()["error"]
    assert refused.status_code == 400 and MUCH in error["message"]
    assert param is None or error["param"] == param


@pytest.mark.parametrize(("path", "body", "param"), [PATHS[0][1:], PATHS[5][1:]])
def test_what_takes_too_long_is_refused(served: Served, path: str, body: dict[str, Any], param: str | None) -> None:
    assert_refused(served, path, body, param)
    assert post(served, "/v1/chat/completions", CHAT).status_code == 200


@pytest.mark.parametrize(("pool", "path", "body", "param"), PATHS)
def test_every_path_says_what_takes_too_long(
    served: Served,
    pool: children.Children,
    path: str,
    body: dict[str, Any],
    param: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def exceeded(*_: Any, **__: Any) -> None:
        raise children.TaskLimitError(f"takes more than {MUCH}")

    monkeypatch.setattr(pool, "perform", exceeded)
    assert_refused(served, path, body, param)


def test_a_long_text_that_takes_too_long(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vocabulary, "_LONG", 1000)
    monkeypatch.setattr(vocabulary, "_SECONDS", 1e-6)
    monkeypatch.setattr(vocabulary, "_SECONDS_PER_CHARACTER", 0.0)
    refused = post(served, "/tokenize", {"prompt": "hello world" * 3_500})
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "prompt"
    assert "of processor time to tokenize" in refused.json()["error"]["message"]


def test_more_than_the_context_can_hold_is_not_encoded(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("forerun.engine.chat_template.encode_text", None)
    text = "a" * (served.llm.target.context_length * 20)
    chat = {"messages": [{"role": "user", "content": text}]}
    for path, body in (("/tokenize", {"prompt": text}), ("/v1/messages/count_tokens", chat)):
        refused = post(served, path, body)
        assert refused.status_code == 400 and "characters, more than" in refused.json()["error"]["message"]
    tokens = {"tokens": [5] * (served.llm.target.context_length + 1)}
    refused = post(served, "/detokenize", tokens)
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "tokens"


def test_one_key_leaves_the_others_alone(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight schemas without end at once; another key's own schema is compiled meanwhile."""
    monkeypatch.setattr(compiling, "_SECONDS", 0.3)
    with ThreadPoolExecutor(8) as clients:
        attacks = [clients.submit(post, served, "/v1/chat/completions", form(bomb(n))) for n in range(8)]
        running = served.service._preparation._running
        until(lambda: len(CHILDREN._idle) < MOST_CHILDREN and sum(running.values()) > 0)
        assert post(served, "/v1/chat/completions", form({"enum": ["a"]}), "two").status_code == 200
        assert httpx.get(f"{served.url}/health").status_code == 200
        assert sum(attack.done() for attack in attacks) < 8
        assert {attack.result().status_code for attack in attacks} == {400}


@pytest.mark.parametrize(("body", "pool"), [(form(bomb(0)), CHILDREN), (TURNS, RENDERERS)], ids=["schema", "template"])
def test_the_work_ends_when_the_client_leaves(
    served: Served, body: dict[str, Any], pool: children.Children, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module, name in ((compiling, "_SECONDS"), (chat_template, "_RENDER_SECONDS")):
        monkeypatch.setattr(module, name, 1000.0)
    ended: list[Exception] = []
    perform = pool.perform

    def noted(*arguments: Any, **options: Any) -> Any:
        try:
            return perform(*arguments, **options)
        except Exception as error:
            ended.append(error)
            raise

    monkeypatch.setattr(pool, "perform", noted)
    with pytest.raises(httpx.ReadTimeout):
        post(served, "/v1/chat/completions", body, limit=0.5)
    until(lambda: bool(ended))
    assert isinstance(ended[0], children.TaskError) and not isinstance(ended[0], children.TaskLimitError)


def blocked(event: threading.Event, begun: list[str], name: str) -> Callable[[], None]:
    def work() -> None:
        begun.append(name)
        assert event.wait(LIMIT)

    return work


def test_threads_are_shared_by_tenants() -> None:
    preparation, event, begun = Preparation(2), threading.Event(), list[str]()

    async def scenario() -> None:
        one = [asyncio.create_task(preparation.run(blocked(event, begun, "one"), "one")) for _ in range(6)]
        await asyncio.sleep(0.05)
        assert begun == ["one", "one"]
        two = [asyncio.create_task(preparation.run(blocked(event, begun, "two"), "two")) for _ in range(2)]
        three = asyncio.create_task(preparation.run(blocked(event, begun, "three"), "three"))
        await asyncio.sleep(0.05)
        assert sorted(begun) == ["one", "one", "two", "two"]
        one.pop().cancel()  # it waits: nothing is lost
        three.cancel()
        event.set()
        await asyncio.gather(*one, *two)
        await asyncio.sleep(0.05)
        assert begun.count("one") == 5 and "three" not in begun
        assert not preparation._waiting and not preparation._running.total()
        assert await preparation.run(lambda: 7, "one") == 7
        with pytest.raises(ZeroDivisionError):
            await preparation.run(lambda: 1 / 0, "one")

    asyncio.run(scenario())
    preparation.close()


HUNG = """
import sys, threading, time
sys.path[:0] = {path!r}
from forerun.server import run
from forerun.server.options import ServerOptions
from forerun.server.service import Service
from serving import fake_llm
run._GRACE = 0.5
options = ServerOptions(port=0, drain_timeout={drain})
service = Service(fake_llm(), "it", options)
service.close = threading.Event().wait
threading.Thread(target=time.sleep, args=(1000,)).start()
listening = run.bound_socket(options)
print("listening", flush=True)
run.run_server(service, listening)
"""


@pytest.mark.parametrize(("drain", "num_signals"), [(0.5, 1), (1000, 2)])
def test_a_signal_ends_the_process_whatever_hangs(drain: float, num_signals: int) -> None:
    code = HUNG.format(path=[path for path in sys.path if path], drain=drain)
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None and process.stdout.readline() == b"listening\n"
        time.sleep(1)  # uvicorn's handlers are there soon after
        for _ in range(num_signals):
            process.send_signal(signal.SIGTERM)
            time.sleep(0.3)
        assert process.wait(LIMIT) in (1, -signal.SIGTERM)  # by itself, or by the system once the server has ended
    finally:
        process.kill()
        process.communicate()
