"""Audits of servers from outside: our own application, and servers of doubtful character."""

from __future__ import annotations

import hashlib
import json
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from forerun.errors import AuditError, ConfigError
from forerun.lab.audit.certificate import Certificate
from forerun.lab.audit.remote import SWITCH, AuditedServer, draft_counter, remote_audit
from forerun.lab.audit.settings import AuditOptions
from serving import fake_llm, serving

PROMPTS = ["once upon", "a time there", "was"]
SMALL = AuditOptions(requests=900, num_prompts=4, max_tokens=8)
Reply = Callable[[dict[str, Any]], dict[str, Any]]


def audited(url: str, second: str | None = None, settings: AuditOptions = SMALL) -> Certificate:
    speculative, plain = AuditedServer(url), AuditedServer(second or url, extra=None if second else SWITCH)
    try:
        return remote_audit(speculative, plain, PROMPTS, settings)
    finally:
        speculative.close()
        plain.close()


def verdicts(certificate: Certificate) -> dict[str, str]:
    return {layer.name: layer.verdict for layer in certificate.layers}


@contextmanager
def replying(reply: Reply, metrics: str | None = None) -> Iterator[str]:
    """A server of completions; its address."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        wbufsize = 1 << 16  # head and body in one packet: the second would wait for an acknowledgement

        def do_GET(self) -> None:
            if self.path == "/v1/models":
                self._send(200, json.dumps({"data": [{"id": "it"}]}))
            else:
                self._send(200 if metrics is not None else 404, metrics or "")

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            found = reply(body)
            self._send(found.pop("status", 200), json.dumps(found))

        def _send(self, status: int, text: str) -> None:
            data = text.encode()
            self.send_response(status)
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: Any) -> None:
            pass

    class Waiting(ThreadingHTTPServer):
        daemon_threads = True
        request_queue_size = 64  # five by default: more clients at once are reset

    server = Waiting(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join(30)


def texts(body: dict[str, Any], skew: float = 1.0, lossy: bool = False) -> dict[str, Any]:
    """Greedy: a hash of the prompt; else letters drawn with a weight `skew` on the first."""
    if body.get("temperature"):
        drawn = random.choices("abcd", [skew, 1, 1, 1], k=body.get("n", 1))
        return {"choices": [{"index": index, "text": text} for index, text in enumerate(drawn)]}
    text = hashlib.sha256(body["prompt"].encode()).hexdigest()
    return {"choices": [{"index": 0, "text": text[1:] if lossy else text}]}


def told(body: dict[str, Any], answer: dict[str, Any], drafts: bool) -> dict[str, Any]:
    return {**answer, "metrics": {"speculative_decoding": {"num_draft_tokens": 3 if drafts else 0}}}


def drafts(body: dict[str, Any]) -> bool:
    return body.get("speculative") is not False


def test_our_own_server() -> None:
    with serving(fake_llm()) as served:
        certificate = audited(served.url, settings=AuditOptions(requests=300, num_prompts=1, max_tokens=8))
    assert verdicts(certificate) == {"Switch": "pass", "Bits": "pass", "Rule": "not run", "Engine": "pass"}
    assert certificate.verdict == "pass"


def test_two_addresses() -> None:
    def one(drafts: bool) -> Reply:
        return lambda body: told(body, texts(body), drafts)

    with replying(one(True)) as ours, replying(one(False)) as theirs:
        assert audited(ours, theirs).verdict == "pass"
        turned = audited(theirs, ours)
    assert verdicts(turned) == {
        "Switch": "inconclusive",
        "Bits": "inconclusive",
        "Rule": "not run",
        "Engine": "inconclusive",
    }


@pytest.mark.parametrize("counted", ["not at all", "in both"])
def test_a_server_without_the_switch_is_neither_passed_nor_failed(counted: str) -> None:
    """Even where the answers differ."""

    def reply(body: dict[str, Any]) -> dict[str, Any]:
        answer = texts(body, lossy=drafts(body))
        return told(body, answer, True) if counted == "in both" else answer

    with replying(reply) as url:
        certificate = audited(url)
    assert certificate.verdict == "inconclusive" and not certificate.failed
    assert "switch not confirmed" in certificate.layers[0].findings[0]


def test_greedy_texts_that_differ_more_than_plain_ones_fail() -> None:
    with replying(lambda body: told(body, texts(body, lossy=drafts(body)), drafts(body))) as url:
        assert audited(url).failed == ["Bits"]


def test_only_the_excess_counts() -> None:
    """Plain decoding differs from itself as often."""
    rng = random.Random(1)

    def reply(body: dict[str, Any]) -> dict[str, Any]:
        return told(body, texts(body, lossy=rng.random() < 0.2), drafts(body))

    with replying(reply) as url:
        assert verdicts(audited(url))["Bits"] in ("pass", "inconclusive")


def test_samples_of_another_distribution_fail() -> None:
    with replying(lambda body: told(body, texts(body, 6.0 if drafts(body) else 1.0), drafts(body))) as url:
        assert audited(url, settings=AuditOptions(requests=720, num_prompts=1)).failed == ["Engine"]


@pytest.mark.slow
def test_plain_samples_that_drift_are_inconclusive() -> None:
    """Plain decoding itself changes between two samples: every other one of 376 requests is skewed."""
    asked, lock = 0, threading.Lock()

    def reply(body: dict[str, Any]) -> dict[str, Any]:
        nonlocal asked
        with lock:
            skew = 20.0 if asked // 376 % 2 else 1.0
            asked += bool(body.get("temperature"))
        return told(body, texts(body, skew), drafts(body))

    with replying(reply) as url:
        certificate = audited(url, settings=AuditOptions(requests=9000, num_prompts=2))
    assert asked == 6 * 376  # of each of two sets of options: plain, plain, with speculation
    assert verdicts(certificate)["Engine"] == "inconclusive"


def test_counters_of_prometheus() -> None:
    text = """# HELP vllm:spec_decode_num_draft_tokens_total Tokens.
vllm:spec_decode_num_draft_tokens_total{model_name="it"} 12.0
vllm:spec_decode_num_draft_tokens_total{model_name="other"} 3.0
vllm:spec_decode_num_accepted_tokens_total{model_name="it"} 7.0
vllm:spec_decode_num_draft_tokens_created{model_name="it"} 1e9
"""
    assert draft_counter(text) == 15
    assert draft_counter("a 1\n") is None
    assert draft_counter("spec_num_draft_tokens NaN\n") is None


@pytest.mark.parametrize(
    "answer",
    [{"status": 400, "error": {"param": "speculative", "message": "secret"}}, {"status": 500}, {"choices": 3}],
)
def test_servers_that_cannot_be_audited(answer: dict[str, Any]) -> None:
    with replying(lambda body: dict(answer)) as url, pytest.raises(AuditError) as caught:
        audited(url)
    assert url in str(caught.value) and "secret" not in str(caught.value)


def test_addresses_that_are_none() -> None:
    with pytest.raises(ConfigError, match="http"):
        AuditedServer("localhost:8000")
    with pytest.raises(AuditError, match="Check the address"):
        AuditedServer("http://127.0.0.1:9")
