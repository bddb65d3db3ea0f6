"""Clients of a server that is to last: patient ones, and those that leave, read slowly or send nonsense."""

from __future__ import annotations

import json
import random
import socket
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from threading import Barrier
from typing import Any

import httpx

from mixed_requests import CHAT, COMPLETIONS, Answer, Asked, read

LIMIT = 300.0
"""Seconds for which a client waits."""
CLIENTS, STREAMS = 12, 64
"""Clients that come one after another, and those that come at once, all for streams."""
SEND_TIMEOUT = 0.5
"""Seconds after which the server is to cut who reads nothing."""
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
        asked: what can be asked.
        answers: complete ones, with the place of what was asked.
        parts: of streams that were left: text so far.
        counts: of kinds of clients.
        begin: holds those that come at once until all are there.
    """

    url: str
    http: httpx.Client
    asked: list[Asked]
    answers: list[tuple[int, Answer]] = field(default_factory=list)
    parts: list[tuple[int, Answer]] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    begin: Any = field(default_factory=lambda: Barrier(STREAMS))

    def at_once(self, number: int) -> str:
        """One of many that want a stream at the same time; the server may be about to end. Returns its kind."""
        rng = random.Random(number)
        place = rng.choice([place for place, asked in enumerate(self.asked) if asked.body["stream"]])
        self.begin.wait()
        try:
            response = self.http.post(self.asked[place].url, json=self.asked[place].body)
        except (httpx.ConnectError, httpx.RemoteProtocolError):
            return "refused"
        if response.status_code == 503:
            return "refused"
        self.take(place, response)
        return "at_once"

    def one(self, number: int) -> str:
        """One request, of a kind that its number chooses. Returns its kind."""
        rng = random.Random(number)
        kinds: list[Callable[[random.Random, int], str | None]] = [self.patient] * 12 + [self.leaves] * 4
        kinds += [self.slow, self.stalls, self.nonsense, self.nonsense, self.too_long, self.looks]
        kind = rng.choice(kinds)
        return kind(rng, rng.randrange(len(self.asked))) or kind.__name__

    def take(self, place: int, response: httpx.Response) -> None:
        """Keep a complete answer."""
        assert response.status_code == 200, response.text
        self.answers.append((place, read(self.asked[place], response.text)))

    def patient(self, rng: random.Random, place: int) -> None:
        """Waits for its answer."""
        self.take(place, self.http.post(self.asked[place].url, json=self.asked[place].body))

    def leaves(self, rng: random.Random, place: int) -> None:
        """Goes away before, or amid, its answer."""
        asked = self.asked[place]
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
        self.parts.append((place, read(asked, text, cut=True)))

    def slow(self, rng: random.Random, place: int) -> None:
        """Reads a few bytes at a time."""
        asked = self.asked[place]
        asked = replace(asked, body=asked.body | {"stream": "logprobs" not in asked.body})
        received = b""
        with self.connection(asked.url, asked.body) as connection:
            while piece := connection.recv(1 if len(received) < 60 else rng.randrange(1, 400)):
                received += piece
                time.sleep(0.002)
        head, body = received.split(b"\r\n\r\n", 1)
        assert head.startswith(b"HTTP/1.1 200")
        self.answers.append((place, read(asked, unchunked(head, body).decode())))

    def stalls(self, rng: random.Random, place: int) -> str | None:
        """Reads nothing until it is cut. Returns "cut" if it was."""
        with self.connection(COMPLETIONS, LONG) as connection:
            time.sleep(5 * SEND_TIMEOUT)
            received = b""
            try:
                while piece := connection.recv(1 << 16):
                    received += piece
            except ConnectionResetError:
                pass
        return None if b"[DONE]" in received else "cut"

    def nonsense(self, rng: random.Random, place: int) -> None:
        """Sends what no server can read."""
        url, content, status = rng.choice(NONSENSE)
        response = self.http.post(url, content=content)
        assert response.status_code == status and response.json()["error"]["message"]

    def too_long(self, rng: random.Random, place: int) -> None:
        """Sends a prompt beyond the context."""
        response = self.http.post(COMPLETIONS, json={"prompt": "word " * rng.randrange(5_000, 50_000)})
        assert response.status_code == 400 and response.json()["error"]["code"] == "context_length_exceeded"

    def looks(self, rng: random.Random, place: int) -> None:
        """Asks how the server does."""
        for path in ("/health", "/metrics", "/live", "/v1/models"):
            assert self.http.get(path).status_code == 200
        tokens = self.http.post("/tokenize", json={"prompt": "a b"}).json()["tokens"]
        assert self.http.post("/detokenize", json={"tokens": tokens}).json() == {"prompt": "a b"}

    def connection(self, url: str, body: dict[str, Any]) -> socket.socket:
        """A connection with a small buffer, on which a request has been sent."""
        host, port = self.url.removeprefix("http://").split(":")
        made = socket.socket()
        made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        made.settimeout(LIMIT)
        made.connect((host, int(port)))
        content = json.dumps(body).encode()
        head = f"POST {url} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n"
        head += f"Content-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
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


def drive(url: str, asked: list[Asked], begin: int, end: int) -> Soak:
    """Let the clients of these numbers come: the first of them at once, the others several at a time."""
    limits = httpx.Limits(max_connections=STREAMS)
    headers = {"content-type": "application/json"}
    with (
        httpx.Client(base_url=url, timeout=LIMIT, limits=limits, headers=headers) as http,
        ThreadPoolExecutor(STREAMS) as crowd,
        ThreadPoolExecutor(CLIENTS) as clients,
    ):
        soak = Soak(url, http, asked)
        soak.counts.update(crowd.map(soak.at_once, range(begin, begin + STREAMS)))
        soak.counts.update(clients.map(soak.one, range(begin + STREAMS, end)))
    return replace(soak, http=None, asked=[], begin=None)  # what goes back to another process
