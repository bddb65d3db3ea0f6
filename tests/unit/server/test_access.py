"""Who may call a server: pages of other sites may not, by any request that a browser sends; figures have their key."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from contextlib import contextmanager

import httpx
import pytest

from forerun.errors import ConfigError
from forerun.server.options import ServerOptions, host_of, is_loopback
from serving import JSON, LIMIT, Served, fake_llm, serving

COMPLETIONS = "/v1/completions"
BODY = json.dumps({"prompt": "hello", "max_tokens": 2, "temperature": 0})
JSON_LINE = "Content-Type: application/json"
REMOTE = {"x-forwarded-for": "192.0.2.7"}
"""What a proxy on the server's machine says of a client elsewhere."""


@pytest.fixture(scope="module")
def named() -> Iterator[Served]:
    """A server without a key, with a name and a page of another site that it knows."""
    with serving(fake_llm(), allowed_host=("nas.lan", "[fd00::1]"), cors_origin=("https://chat.example",)) as running:
        yield running


def ask(served: Served, request: str, *lines: str) -> tuple[int, str]:
    """Send a request of these header lines, byte for byte; return its status and the body."""
    method, path = request.split()
    body = BODY if method == "POST" else ""
    head = [f"{method} {path} HTTP/1.1", *lines, f"Content-Length: {len(body)}", "Connection: close", "", body]
    with socket.create_connection(("127.0.0.1", port_of(served)), timeout=LIMIT) as connection:
        connection.sendall("\r\n".join(head).encode())
        answer = b"".join(iter(lambda: connection.recv(1 << 16), b"")).decode()
    return int(answer.split()[1]), answer.partition("\r\n\r\n")[2]


@pytest.mark.parametrize("request_line", [f"POST {COMPLETIONS}", "GET /v1/models", "GET /health"])
@pytest.mark.parametrize("coding", ["chunked", "CHUNKED", "identity", "gzip, chunked"])
def test_two_lengths_of_a_body_are_refused_and_the_connection_ends(
    named: Served, request_line: str, coding: str
) -> None:
    head = [f"{request_line} HTTP/1.1", "Host: localhost", JSON_LINE, f"Transfer-Encoding: {coding}"]
    smuggled = "0\r\n\r\nGET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
    with socket.create_connection(("127.0.0.1", port_of(named)), timeout=LIMIT) as connection:
        connection.sendall("\r\n".join([*head, f"Content-Length: {len(smuggled)}", "", smuggled]).encode())
        answer = b"".join(iter(lambda: connection.recv(1 << 16), b"")).decode()
    status, told = int(answer.split()[1]), answer.partition("\r\n\r\n")[2]
    assert answer.count("HTTP/1.1 ") == 1, answer
    if coding.lower() == "chunked":
        assert status == 400 and json.loads(told)["error"]["code"] == "ambiguous_length"
    else:
        assert status in (400, 501)


def port_of(served: Served) -> int:
    return int(served.url.rpartition(":")[2])


@pytest.mark.parametrize("request_line", ["GET /", "GET /live", "GET /health", "GET /v1/models", f"POST {COMPLETIONS}"])
@pytest.mark.parametrize(
    "host",
    ["evil.example", "evil.example:{}", "localhost.evil.example", "127.0.0.1.evil.example", "evil.example@localhost",
     "192.168.1.5:{}", "[::2]", "0.0.0.0", "localhost:80:90", "nas.lan.evil.example", ""],
)  # fmt: skip
def test_another_name_is_refused(named: Served, request_line: str, host: str) -> None:
    status, body = ask(named, request_line, f"Host: {host.format(port_of(named))}", JSON_LINE)
    assert status == 403 and "--allowed-host" in body and "--api-key" in body


@pytest.mark.parametrize("request_line", ["GET /", f"POST {COMPLETIONS}"])
@pytest.mark.parametrize(
    "host",
    ["localhost", "LocalHost:{}", "127.0.0.1:{}", "127.9.8.7", "[::1]:{}", "[::ffff:127.0.0.1]", "nas.lan",
     "NAS.lan:{}", "[fd00::1]:99"],
)  # fmt: skip
def test_names_of_this_machine_and_those_that_are_allowed(named: Served, request_line: str, host: str) -> None:
    assert ask(named, request_line, f"Host: {host.format(port_of(named))}", JSON_LINE)[0] == 200


@pytest.mark.parametrize("request_line", ["GET /", "GET /live", f"POST {COMPLETIONS}", f"OPTIONS {COMPLETIONS}"])
@pytest.mark.parametrize(
    "origin",
    ["https://evil.example", "null", "http://localhost:1", "http://127.0.0.1", "https://chat.example.evil.example",
     "chrome-extension://abc", "file://"],
)  # fmt: skip
def test_pages_of_other_sites_are_refused(named: Served, request_line: str, origin: str) -> None:
    status, body = ask(named, request_line, f"Host: localhost:{port_of(named)}", f"Origin: {origin}", JSON_LINE)
    assert status == 403 and "cors_origin" in body and "access-control-allow-origin" not in body
    twice = (f"Origin: http://localhost:{port_of(named)}", f"Origin: {origin}")
    assert ask(named, request_line, f"Host: localhost:{port_of(named)}", *twice, JSON_LINE)[0] == 403


@pytest.mark.parametrize("request_line", ["GET /live", f"POST {COMPLETIONS}"])
@pytest.mark.parametrize("origin", ["http://localhost:{}", "https://chat.example"])
def test_its_own_page_and_those_that_are_named(named: Served, request_line: str, origin: str) -> None:
    host, port = f"Host: localhost:{port_of(named)}", port_of(named)
    assert ask(named, request_line, host, f"Origin: {origin.format(port)}", JSON_LINE)[0] == 200


@pytest.mark.parametrize("path", [COMPLETIONS, "/v1/chat/completions", "/v1/responses", "/tokenize"])
@pytest.mark.parametrize(
    "content_type",
    ["text/plain", "text/plain;charset=UTF-8", "application/x-www-form-urlencoded", "multipart/form-data; boundary=a",
     "text/plain; application/json", "application/jsonp", ""],
)  # fmt: skip
def test_what_browsers_send_without_asking_is_refused(named: Served, path: str, content_type: str) -> None:
    """The types of a form or a beacon; a body without any type, too."""
    told = [f"Content-Type: {content_type}"] if content_type else []
    for lines in (told, [*told, JSON_LINE]) if told else (told,):
        status, body = ask(named, f"POST {path}", "Host: localhost", *lines)
        assert status == 415 and "Content-Type: application/json" in json.loads(body)["error"]["message"]


@pytest.mark.parametrize("kind", ["application/json", "Application/JSON; charset=utf-8", "application/openai+json"])
def test_json_is_taken(named: Served, kind: str) -> None:
    assert ask(named, f"POST {COMPLETIONS}", "Host: localhost", f"Content-Type: {kind}")[0] == 200


def test_the_address_that_it_is_bound_to_is_allowed() -> None:
    with serving(fake_llm(), host="0.0.0.0") as served:  # its log names that address
        assert ask(served, "GET /v1/models", f"Host: 0.0.0.0:{port_of(served)}")[0] == 200
        status, body = ask(served, "GET /v1/models", "Host: 192.168.1.5:8000")
        assert status == 403 and "--allowed-host 192.168.1.5" in body
    with serving(fake_llm(), allowed_host=("*",)) as served:
        assert ask(served, "GET /v1/models", "Host: any.example")[0] == 200


def test_with_a_key_no_page_needs_to_be_kept_out() -> None:
    with serving(fake_llm(), api_key=("one",)) as served:
        foreign = ("Host: any.example", "Origin: https://any.example", "Content-Type: text/plain")
        assert ask(served, f"POST {COMPLETIONS}", *foreign)[0] == 401
        assert ask(served, f"POST {COMPLETIONS}", *foreign, "Authorization: Bearer one")[0] == 200


@contextmanager
def keyed(**options: object) -> Iterator[httpx.Client]:
    with serving(fake_llm(), **options) as served, httpx.Client(base_url=served.url, headers=JSON) as http:
        yield http


def statuses(http: httpx.Client, path: str, **more: str) -> dict[str, int]:
    """The answer to each key."""
    keys = ("", "one", "two", "figures")
    headers = {key: {"authorization": f"Bearer {key}"} if key else {} for key in keys}
    return {key: http.get(path, headers=headers[key] | more).status_code for key in keys}


@pytest.mark.parametrize("path", ["/live", "/metrics"])
def test_the_figures_of_all_tenants(path: str) -> None:
    with keyed(api_key=("one", "two")) as http:
        assert statuses(http, path) == {"": 401, "one": 200, "two": 200, "figures": 401}
        assert statuses(http, path, **REMOTE) == {"": 401, "one": 403, "two": 403, "figures": 401}
        told = http.get(path, headers={"authorization": "Bearer one"} | REMOTE).json()["error"]["message"]
        assert path in told and "--metrics-key" in told
        assert http.get("/v1/models", headers={"authorization": "Bearer one"} | REMOTE).status_code == 200
    with keyed(api_key=("one", "two"), metrics_key="figures") as http:
        for more in ({}, REMOTE):
            assert statuses(http, path, **more) == {"": 401, "one": 401, "two": 401, "figures": 200}
        assert statuses(http, "/v1/models") == {"": 401, "one": 200, "two": 200, "figures": 401}
    with keyed(metrics_key="figures") as http:
        assert statuses(http, path) == {"": 401, "one": 401, "two": 401, "figures": 200}
        assert set(statuses(http, "/v1/models").values()) == {200}
    with keyed() as http:
        assert set(statuses(http, path).values()) == {200}


def test_options_that_are_refused() -> None:
    for host in ("http://nas.lan", "nas.lan/", "a b", "", "*.lan"):
        with pytest.raises(ConfigError, match="allowed_host"):
            ServerOptions(allowed_host=(host,))
    with pytest.raises(ConfigError, match="metrics_key is an api_key"):
        ServerOptions(api_key=("one",), metrics_key="one")
    with pytest.raises(ConfigError, match="A key is empty"):
        ServerOptions(metrics_key="")


def test_names_and_addresses() -> None:
    assert [host_of(each) for each in ("A.b:1", "[FD00::1]:2", "fd00::1", "x:b", "a/b")] == [
        "a.b",
        "fd00::1",
        "fd00::1",
        "",
        "",
    ]
    assert all(map(is_loopback, ("localhost", "127.0.0.1", "127.1.2.3", "::1", "::ffff:127.0.0.1")))
    assert not any(map(is_loopback, ("", "0.0.0.0", "localhost.", "10.0.0.1", "::", "testclient", "127.0.0.1.x")))
