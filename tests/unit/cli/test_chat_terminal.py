"""A short conversation in a pseudo-terminal: what a person sees and types, Ctrl-C and Ctrl-D included."""

from __future__ import annotations

import codecs
import os
import select
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest

pty = pytest.importorskip("pty")  # not on Windows

from forerun.cli import chat as command  # noqa: E402
from forerun.cli.main import app  # noqa: E402
from forerun.engine import StreamChunk  # noqa: E402

from .fakes import FakeLLM  # noqa: E402
from .test_chat import fake  # noqa: E402

LIMIT = 30
"""Seconds for anything to appear."""


class Waiting(FakeLLM):
    """Says three words; asked to wait, it then waits for a signal."""

    def stream(self, prompt: Any, params: Any) -> Iterator[StreamChunk]:
        for chunk in super().stream(prompt, params):
            yield chunk
            while prompt[-1]["content"] == "wait":
                time.sleep(0.01)  # signal.pause() would miss one that came just before it


class Terminal:
    """`forerun chat` in a child of this process, which has torch already."""

    def __init__(self, *arguments: str) -> None:
        self.pid, self.fd = pty.fork()
        if self.pid == 0:
            _child(arguments)
        os.set_blocking(self.fd, False)  # a key that comes while the other end closes may wait for ever
        self.seen = ""
        self._decoder = codecs.getincrementaldecoder("utf-8")()

    def expect(self, text: str) -> str:
        """What has appeared up to and with this text."""
        deadline = time.monotonic() + LIMIT
        while text not in self.seen:
            ready = select.select([self.fd], [], [], max(0.0, deadline - time.monotonic()))[0]
            try:
                new = os.read(self.fd, 4096) if ready else b""
            except OSError:  # the other end is closed
                new = b""
            assert new, f"{text!r} did not appear: {self.seen!r}"
            self.seen += self._decoder.decode(new)
        found, _, self.seen = self.seen.partition(text)
        return found + text

    def type(self, text: str) -> None:
        os.write(self.fd, text.encode())

    def exit_code(self, key: str) -> int:
        """The chat's, which this key ends. Python's readline misses a signal that comes just before it waits for keys,
        so Ctrl-C may have to be typed again."""
        deadline = time.monotonic() + LIMIT
        while time.monotonic() < deadline:
            with suppress(OSError):  # the other end is closed
                self.type(key)
                while select.select([self.fd], [], [], 0.5)[0]:
                    os.read(self.fd, 4096)
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.pid = 0
                return os.waitstatus_to_exitcode(status)
        raise AssertionError("the chat does not end")

    def close(self) -> None:
        if self.pid:
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
        os.close(self.fd)


def _child(arguments: tuple[str, ...]) -> None:
    """What the child does in place of the test; it never returns."""
    code = 99
    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.environ |= {"TERM": "xterm", "COLUMNS": "200"}
        os.environ.pop("NO_COLOR", None)
        sys.stdin, sys.stdout, sys.stderr = open(0), open(1, "w"), open(2, "w")  # noqa: SIM115
        command.open_llm = lambda *_, **__: Waiting(drafts=True, target=fake().target)  # type: ignore[assignment]
        app(["chat", "some/model", *arguments])
    except SystemExit as exit_:
        code = exit_.code if isinstance(exit_.code, int) else 98
    finally:
        sys.stdout.flush()
        os._exit(code)


@pytest.fixture
def terminal(request: pytest.FixtureRequest) -> Iterator[Terminal]:
    opened = Terminal(*getattr(request, "param", ()))
    yield opened
    opened.close()


def test_a_conversation(terminal: Terminal) -> None:
    terminal.expect("/help lists the commands")
    terminal.expect("> ")
    terminal.type("hello\n")
    terminal.expect("alpha beta gamma delta epsilon zeta")
    terminal.expect("6 tokens in")
    terminal.expect("> ")
    terminal.type("wait\n")
    terminal.expect("alpha beta gamma ")
    terminal.type("\x03")  # Ctrl-C
    terminal.expect("interrupted")
    terminal.expect("> ")
    terminal.type("/stats\n")
    terminal.expect("history: 2 turns")
    terminal.expect("> ")
    terminal.type('"""\ntwo\nlines"""\n')
    terminal.expect("zeta")
    terminal.expect("> ")
    assert terminal.exit_code("\x04") == 0  # Ctrl-D


@pytest.mark.parametrize("terminal", [("--show-drafts",)], indirect=True)
def test_drafts_are_marked_and_ctrl_c_at_the_prompt_ends(terminal: Terminal) -> None:
    terminal.expect("> ")
    terminal.type("hello\n")
    terminal.expect("\x1b[4malpha beta \x1b[0mgamma ")
    terminal.expect("finished: length")
    terminal.expect("> ")
    assert terminal.exit_code("\x03") == 0
