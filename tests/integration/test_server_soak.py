"""Requests of mixed kinds through HTTP, with clients that leave, read slowly or send nonsense.

No answer is lost or mixed up, and when nobody is there nothing has grown. And a server that was killed starts again.
"""

from __future__ import annotations

import gc
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from forerun import LLM
from forerun.server.options import ServerOptions
from forerun.server.run import bound_socket
from mixed_requests import CHAT, COMPLETIONS, DRAFTERS, Answer, Asked, load, mixed, read
from serving import LIMIT, Served, serving

NUM_REQUESTS, ROUND, SETTLED_AFTER = 2000, 250, 500
"""Requests; between two looks; after which memory may grow by 5 % at most."""
NUM_DISTINCT = 500
"""Requests that have a twin: each is sent several times, by clients of several kinds."""
CLIENTS = 12
SEND_TIMEOUT = 0.5
NONSENSE: tuple[tuple[str, bytes, int], ...] = (
    (CHAT, b"{", 400),
    (CHAT, b'{"messages": "\xff"}', 400),
    (CHAT, b'{"messages":' + b"[" * 20_000 + b"]" * 20_000 + b"}", 400),
    (COMPLETIONS, b'{"prompt": "a", "temperature": "hot"}', 400),
    (COMPLETIONS, b'{"prompt": [1, 999999]}', 400),
    (COMPLETIONS, b'{"prompt": "a", "model": "another"}', 404),
    (COMPLETIONS, b'{"prompt": "a", "response_format": {"type": "xml"}}', 400),
    (COMPLETIONS, b'{"prompt": "' + b"a" * (5 << 20) + b'"}', 413),
    ("/tokenize", b"{}", 400),
)
LONG = {"prompt": "x = ", "max_tokens": 400, "ignore_eos": True, "seed": 1, "logprobs": 20, "stream": True, "n": 2}


@dataclass
class Soak:
    """The clients of one server.

    Attributes:
        answers: complete ones, with what was asked.
        parts: of streams that were left: text so far.
        counts: of kinds of clients.
    """

    served: Served
    http: httpx.Client
    asked: list[Asked]
    answers: list[tuple[Asked, Answer]] = field(default_factory=list)
    parts: list[tuple[Asked, Answer]] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)

    def one(self, number: int) -> None:
        """One request, of a kind that its number chooses."""
        rng = random.Random(number)
        kinds: list[Callable[[random.Random, Asked], None]] = [self.patient] * 12 + [self.leaves] * 3
        kinds += [self.slow, self.stalls, self.nonsense, self.nonsense, self.too_long, self.looks]
        kind = rng.choice(kinds)
        kind(rng, rng.choice(self.asked))
        self.counts[kind.__name__] += 1  # type: ignore[attr-defined]

    def patient(self, rng: random.Random, asked: Asked) -> None:
        """Waits for its answer."""
        response = self.http.post(asked.url, json=asked.body)
        assert response.status_code == 200, response.text
        self.answers.append((asked, read(asked, response.text)))

    def leaves(self, rng: random.Random, asked: Asked) -> None:
        """Goes away before, or amid, its answer."""
        if not asked.body["stream"]:
            try:
                self.http.post(asked.url, json=asked.body, timeout=rng.uniform(0.001, 0.3))
            except httpx.TimeoutException:
                return
            return
        text, stays = "", rng.randrange(6)
        with self.http.stream("POST", asked.url, json=asked.body) as response:
            assert response.status_code == 200
            for chunk, _ in zip(response.iter_text(), range(stays)):
                text += chunk
        self.parts.append((asked, read(asked, text, cut=True)))

    def slow(self, rng: random.Random, asked: Asked) -> None:
        """Reads a few bytes at a time."""
        asked = replace(asked, body=asked.body | {"stream": "logprobs" not in asked.body})
        received = b""
        with self.connection(asked.url, asked.body) as connection:
            while piece := connection.recv(1 if len(received) < 60 else rng.randrange(1, 400)):
                received += piece
                time.sleep(0.002)
        head, body = received.split(b"\r\n\r\n", 1)
        assert head.startswith(b"HTTP/1.1 200")
        self.answers.append((asked, read(asked, unchunked(head, body).decode())))

    def stalls(self, rng: random.Random, asked: Asked) -> None:
        """Reads nothing until it is cut."""
        with self.connection(COMPLETIONS, LONG) as connection:
            time.sleep(5 * SEND_TIMEOUT)
            received = b""
            try:
                while piece := connection.recv(1 << 16):
                    received += piece
            except ConnectionResetError:
                pass
        self.counts["cut"] += b"[DONE]" not in received

    def nonsense(self, rng: random.Random, asked: Asked) -> None:
        """Sends what no server can read."""
        url, content, status = rng.choice(NONSENSE)
        response = self.http.post(url, content=content)
        assert response.status_code == status and response.json()["error"]["message"]

    def too_long(self, rng: random.Random, asked: Asked) -> None:
        """Sends a prompt beyond the context."""
        response = self.http.post(COMPLETIONS, json={"prompt": "word " * rng.randrange(5_000, 50_000)})
        assert response.status_code == 400 and response.json()["error"]["code"] == "context_length_exceeded"

    def looks(self, rng: random.Random, asked: Asked) -> None:
        """Asks how the server does."""
        for path in ("/health", "/metrics", "/live", "/v1/models"):
            assert self.http.get(path).status_code == 200
        tokens = self.http.post("/tokenize", json={"prompt": "a b"}).json()["tokens"]
        assert self.http.post("/detokenize", json={"tokens": tokens}).json() == {"prompt": "a b"}

    def connection(self, url: str, body: dict[str, Any]) -> socket.socket:
        """A connection with a small buffer, on which a request has been sent."""
        host, port = self.served.url.removeprefix("http://").split(":")
        made = socket.socket()
        made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        made.settimeout(LIMIT)
        made.connect((host, int(port)))
        content = json.dumps(body).encode()
        head = f"POST {url} HTTP/1.1\r\nHost: it\r\nConnection: close\r\nContent-Length: {len(content)}\r\n\r\n"
        made.sendall(head.encode() + content)
        return made


def unchunked(head: bytes, body: bytes) -> bytes:
    """A body without the marks of its transfer coding."""
    if b"transfer-encoding: chunked" not in head.lower():
        return body
    content = b""
    while body:
        size, body = body.split(b"\r\n", 1)
        content, body = content + body[: int(size, 16)], body[int(size, 16) + 2 :]
    return content


def resident() -> int:
    """Bytes of memory that this process holds."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def tables(served: Served) -> tuple[Any, ...]:
    """What is held while nobody is there: pages of sequences, the drafters' bytes, entries of tables."""
    llm, service = served.llm, served.service
    assert llm.target.pool is not None and llm.drafter is not None
    pools = (llm.target.pool, *llm.drafter.pools)
    for each in pools:
        each.check_integrity()
    held = tuple(each.num_taken - each.num_published for each in pools)  # type: ignore[attr-defined]
    engine = llm.engine
    counts = (len(engine.scheduler), len(engine.outputs), len(service.thread._jobs), len(service.thread._inside))
    return held, counts, len(llm.shared._inboxes), llm.drafter.nbytes


def small(options: ServerOptions) -> socket.socket:
    """A listening socket that lets little wait for a reader."""
    made = bound_socket(options)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    return made


def check(soak: Soak, plain: LLM) -> None:
    """Each answer is its twin's, and each part the beginning of it."""
    twins: dict[int, Answer] = {}
    position = {id(each.params): number for number, each in enumerate(soak.asked)}
    for asked, _ in soak.answers + soak.parts:
        number = position[id(asked.params)]
        if number not in twins:
            twins[number] = asked.twin(plain)
    for asked, answer in soak.answers:
        assert answer == twins[position[id(asked.params)]], asked
    for asked, part in soak.parts:
        for (text, _), (whole, _) in zip(part, twins[position[id(asked.params)]], strict=True):
            assert whole.startswith(text), asked


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="resident memory is read from /proc")
def test_nothing_is_lost_and_nothing_grows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("serving.bound_socket", small)
    llm = load(drafter=[*DRAFTERS], max_batch=6, seed=0)
    pool, rng = llm.target.pool, random.Random(11)
    assert pool is not None and llm.drafter is not None
    pool.limit(9)  # too few for a full batch of the longer ones
    for each in llm.drafter.pools:
        each.limit(48)  # what is kept for later prompts is then full long before memory is looked at
    looks, preemptions = [], 0
    limits = httpx.Limits(max_connections=CLIENTS)
    with (
        serving(llm, send_timeout=SEND_TIMEOUT) as served,
        httpx.Client(base_url=served.url, timeout=5 * LIMIT, limits=limits) as http,
        ThreadPoolExecutor(CLIENTS) as clients,
    ):
        ended = served.service.ended

        def counted(output: Any, *rest: Any) -> None:
            nonlocal preemptions
            preemptions += output.choice.stats.num_preemptions
            ended(output, *rest)

        monkeypatch.setattr(served.service, "ended", counted)
        soak = Soak(served, http, [mixed(rng, llm) for _ in range(NUM_DISTINCT)])
        for begin in range(0, NUM_REQUESTS, ROUND):
            list(clients.map(soak.one, range(begin, begin + ROUND)))
            served.settle()
            gc.collect()
            looks.append((begin + ROUND, tables(served), resident()))
            print([(each.num_taken, each.num_pages) for each in (pool, *llm.drafter.pools)])
            print(*looks[-1], dict(soak.counts), preemptions, flush=True)
    check(soak, load(drafter=None, max_batch=1))
    assert len({held for _, held, _ in looks}) == 1
    settled = next(memory for number, _, memory in looks if number >= SETTLED_AFTER)
    print(f"{len(soak.answers)} answers and {len(soak.parts)} parts are their twins'; {preemptions} preemptions")
    print(f"{settled} bytes resident after {SETTLED_AFTER} requests, {looks[-1][2]} at the end")
    assert preemptions and soak.counts["cut"]
    assert looks[-1][2] < 1.05 * settled


def started(port: int) -> tuple[subprocess.Popen[bytes], float]:
    """A server of the bundled model that answers, and the seconds until it did."""
    begun = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, "-m", "forerun", "serve", "bundled", "--port", str(port)], stderr=subprocess.DEVNULL
    )
    body = {"prompt": "x", "max_tokens": 4, "temperature": 0}
    while True:
        assert process.poll() is None and time.monotonic() < begun + 2 * LIMIT
        try:
            assert httpx.post(f"http://127.0.0.1:{port}{COMPLETIONS}", json=body, timeout=LIMIT).status_code == 200
            return process, time.monotonic() - begun
        except httpx.TransportError:
            time.sleep(0.02)


@pytest.mark.slow
def test_a_server_that_was_killed_starts_again() -> None:
    with bound_socket(ServerOptions(port=0)) as free:
        port = free.getsockname()[1]
    process, first = started(port)
    try:
        for _ in range(2):
            with httpx.stream("POST", f"http://127.0.0.1:{port}{COMPLETIONS}", json=LONG, timeout=LIMIT) as response:
                next(response.iter_bytes())
                process.send_signal(signal.SIGKILL)
                process.wait(LIMIT)
            process, again = started(port)
            print(f"first answer {first:.1f} s after the start, {again:.1f} s after a SIGKILL and a start")
            assert again < 1.5 * first + 1
    finally:
        process.kill()
        process.wait(LIMIT)
