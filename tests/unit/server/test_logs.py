"""The log of a server: a line an event, of text or JSON."""

from __future__ import annotations

import json
import logging
from typing import Any

import pytest

from forerun.server.logs import LOG_FORMATS, JsonFormatter, TextFormatter, start_log

REQUEST = {
    "event": "request",
    "request_id": "it-1",
    "method": "POST",
    "path": "/v1/completions",
    "status": 200,
    "seconds": 0.8412,
    "model": "bundled",
    "prompt_tokens": 412,
    "cached_tokens": 384,
    "completion_tokens": 96,
    "finish_reasons": ["stop", "length"],
    "first_token_seconds": 0.1234,
    "tokens_per_second": 114.12,
    "tokens_per_step": 2.909,
}


def line_of(message: Any, level: int = logging.INFO) -> str:
    """Format as text, without the time."""
    record = logging.LogRecord("forerun.server", level, __file__, 1, message, (), None)
    day, time, line = TextFormatter().format(record).split(" ", 2)
    assert len(day) == 10 and len(time) == 8
    return line


def test_a_request_is_a_line() -> None:
    assert line_of(REQUEST) == (
        "200 POST /v1/completions: bundled, 0.84 s, prompt 412, 384 cached, first token 0.12 s, 96 tokens, "
        "114.1 a second, 2.91 a step, stop length"
    )
    refused = {"event": "request", "method": "POST", "path": "/v1/x", "status": 400, "seconds": 0.001}
    assert line_of(refused | {"error": "RequestBodyError", "param": "top_p"}) == (
        "400 POST /v1/x: 0.00 s, field top_p, RequestBodyError"
    )
    assert line_of(refused | {"status": None, "disconnected": True}) == ("499 POST /v1/x: 0.00 s, the client has gone")


def test_other_events_and_messages_are_lines() -> None:
    assert line_of({"event": "ready", "url": "http://a:1", "model": "m"}) == "ready: url http://a:1, model m"
    assert line_of({"event": "ended"}) == "ended"
    assert line_of("a message", logging.WARNING) == "WARNING a message"


def test_clients_cannot_write_lines_or_to_the_terminal() -> None:
    line = line_of(REQUEST | {"path": "/a\n200 GET /forged", "param": "\x1b[2J\u2028\u202e"})
    assert line.isprintable() and "/a\\n200 GET" in line and "\\x1b[2J\\u2028\\u202e" in line


@pytest.mark.parametrize("log_format", LOG_FORMATS)
def test_an_exception_is_logged_without_its_text(log_format: str, capsys: pytest.CaptureFixture[str]) -> None:
    root, log = logging.getLogger(), logging.getLogger("forerun.server")
    handlers, level = root.handlers[:], log.level
    try:
        root.handlers = []  # pytest's own are not to be closed
        start_log(log_format)
        try:
            raise ValueError("a secret")
        except ValueError:
            log.exception("a request failed")
    finally:
        root.handlers = handlers
        log.setLevel(level)
    (line,) = capsys.readouterr().err.splitlines()
    assert "secret" not in line and "ValueError" in line and "test_logs.py" in line and "a request failed" in line
    assert line.startswith("{") == (log_format == "json")


def test_json_has_all() -> None:
    record = logging.LogRecord("forerun.server", logging.INFO, __file__, 1, REQUEST, (), None)
    entry = json.loads(JsonFormatter().format(record))
    assert REQUEST.items() <= entry.items() and entry["level"] == "info"
