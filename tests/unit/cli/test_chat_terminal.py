"""Conversations in a pseudo-terminal: what a person sees and types, Ctrl-C and pastes included."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pty = pytest.importorskip("pty")  # not on Windows
pytest.importorskip("pexpect")

import fcntl  # noqa: E402
import struct  # noqa: E402
import termios  # noqa: E402

from pexpect import TIMEOUT  # noqa: E402
from pexpect.fdpexpect import fdspawn  # noqa: E402

from forerun.cli.chat import command, session  # noqa: E402
from forerun.cli.chat.conversations import Conversation  # noqa: E402
from forerun.cli.main import app  # noqa: E402
from forerun.engine import StreamChunk  # noqa: E402

from .fakes import FakeLLM  # noqa: E402
from .test_chat import fake  # noqa: E402

CTRL_C, CTRL_D, CTRL_R, ENTER, UP = "\x03", "\x04", "\x12", "\r", "\x1b[A"
PROMPT = "\x1b[?2004h"
"""Pastes shall be in brackets: the editor waits for keys."""


MARKDOWN = (
    "# Words\n\nSome **bold** ones: ä 你 <b>tag</b>\n\n```python\nprint(1)\n```\n\n| a | b |\n|---|---|\n| 1 | 2 |\n\n"
)


class Waiting(FakeLLM):
    """Says three words; asked to wait, it then waits for a signal, or before them; it counts lines, and writes
    Markdown."""

    def stream(self, prompt: Any, params: Any) -> Iterator[StreamChunk]:
        asked = prompt[-1]["content"]
        if asked.startswith("mute"):
            _wait()
        if asked.startswith("count"):
            yield StreamChunk(f"{len(asked.splitlines())} lines, {len(asked)} characters", [0], finish_reason="stop")
            return
        if asked.startswith("mark"):
            yield from (StreamChunk(part, [0]) for part in MARKDOWN)
            yield StreamChunk("END", [0], finish_reason="stop")
            return
        for chunk in super().stream(prompt, params):
            yield chunk
            if asked.startswith("wait"):
                _wait()


def _wait() -> None:
    while True:
        time.sleep(0.01)  # signal.pause() would miss one that came just before it


class Terminal:
    """`forerun chat` in a child of this process, which has torch already."""

    def __init__(self, state: Path, *arguments: str, columns: int = 100, encoding: str = "utf-8", **variables: str):
        self.pid, fd = pty.fork()
        if self.pid == 0:
            fcntl.ioctl(1, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
            _child(arguments, encoding, {"XDG_STATE_HOME": str(state), **variables})
        self.spawned = fdspawn(fd, timeout=30, encoding="utf-8", codec_errors="replace")

    def expect(self, text: str) -> str:
        """What has appeared up to and with this text."""
        try:
            self.spawned.expect_exact(text)
        except TIMEOUT:
            raise AssertionError(f"{text!r} did not appear: {self.spawned.before!r}") from None
        return str(self.spawned.before) + text

    def type(self, text: str) -> None:
        self.spawned.send(text)

    def enter(self, text: str) -> None:
        """Type into the next prompt, when it is there."""
        self.expect(PROMPT)
        self.type(text)

    def paste(self, text: str) -> None:
        """Paste into the next prompt as terminals do, in brackets."""
        self.enter(f"\x1b[200~{text}\x1b[201~")

    def exit_code(self, keys: str = CTRL_D) -> int:
        """The chat's, which these keys end at the next prompt."""
        self.enter(keys)
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline:
            try:
                self.spawned.read_nonblocking(4096, timeout=0.1)
            except Exception:  # nothing has come, or the other end is closed
                time.sleep(0.02)
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.pid = 0
                return os.waitstatus_to_exitcode(status)
        raise AssertionError("the chat does not end")

    def close(self) -> None:
        if self.pid:
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
        os.close(self.spawned.fileno())


def _child(arguments: tuple[str, ...], encoding: str, variables: dict[str, str]) -> None:
    """What the child does in place of the test; it never returns."""
    code = 99
    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        for name in ("NO_COLOR", "COLUMNS", "LINES"):
            os.environ.pop(name, None)
        os.environ |= {"TERM": "xterm", "PROMPT_TOOLKIT_NO_CPR": "1", **variables}
        sys.stdin = open(0)  # noqa: SIM115
        sys.stdout, sys.stderr = open(1, "w", encoding=encoding), open(2, "w", encoding=encoding)  # noqa: SIM115
        command.open_llm = lambda *_, **__: Waiting(drafts=True, target=fake().target)  # type: ignore[assignment]
        session.open_beside = lambda *_: _wait()  # type: ignore[assignment, return-value]
        app(["chat", "some/model", *arguments])
    except SystemExit as exit_:
        code = exit_.code if isinstance(exit_.code, int) else 98
    finally:
        sys.stdout.flush()
        os._exit(code)


Opener = Callable[..., Terminal]


@pytest.fixture
def open_chat(tmp_path: Path) -> Iterator[Opener]:
    opened: list[Terminal] = []

    def make(*arguments: str, **settings: Any) -> Terminal:
        opened.append(Terminal(tmp_path, *arguments, **settings))
        return opened[-1]

    yield make
    for each in opened:
        each.close()


def test_a_conversation(open_chat: Opener) -> None:
    terminal = open_chat()
    terminal.expect("/help lists the commands")
    terminal.enter("hello\r")
    terminal.expect("alpha beta gamma delta epsilon zeta")
    terminal.expect("6 tokens")
    terminal.enter("/stats\r")
    terminal.expect("history: 1 turn")
    terminal.enter("/se\t temp\t 0\r")
    terminal.expect("temperature is 0")
    assert terminal.exit_code() == 0


def test_a_message_of_several_lines(open_chat: Opener) -> None:
    terminal = open_chat()
    terminal.paste("count\n/help\r\nthree\\\nfour\n")
    terminal.type("five\r")
    terminal.expect("5 lines, 28 characters")
    terminal.enter('"""\rcount\r\r/x\r"""\r')
    terminal.expect("3 lines, 9 characters")
    terminal.enter("count\x1b\rtwo\\\rthree\r")
    terminal.expect("3 lines, 15 characters")
    terminal.paste("count " + "x" * 100_000 + "\nend")
    terminal.expect("[100,010 characters, paste 1]")
    terminal.type(" and\r")
    terminal.expect("2 lines, 100014 characters")
    assert terminal.exit_code() == 0


def test_ten_megabytes_are_refused_in_a_sentence_and_not_lost(open_chat: Opener) -> None:
    terminal = open_chat()
    terminal.paste("0123456789 12345678\n" * 500_000)
    terminal.expect("[10,000,000 characters, paste 1]")
    terminal.type("\r")
    terminal.expect("a prompt of 1000000 tokens, but the context holds 64")
    terminal.expect("[10,000,000 characters, paste 2]")
    terminal.type(CTRL_C)
    assert terminal.exit_code() == 0


def test_ctrl_c_at_five_moments(open_chat: Opener) -> None:
    terminal = open_chat()
    terminal.enter(CTRL_C)  # where nothing is typed
    terminal.expect("Ctrl-C once more, or Ctrl-D, ends the chat.")
    terminal.enter("half a message")
    terminal.expect("message")
    terminal.type(CTRL_C)  # with something typed, which arrow up brings back
    terminal.enter(UP)
    terminal.expect("half a message")
    terminal.type("\x15wait\r")
    terminal.expect("alpha beta gamma")
    terminal.type("typed ahead" + CTRL_C)  # within an answer, which is kept
    answer = terminal.expect("stopped by you")
    assert "^C" not in answer and "ahead" not in answer
    terminal.enter("\x15mute, please\r")
    terminal.expect("\x1b[?2004l")
    time.sleep(0.3)
    terminal.type(CTRL_C)  # before the first word: the message comes back
    terminal.expect("not part of the chat")
    terminal.expect("mute, please")
    terminal.type("\x15/drafter none\r")
    terminal.expect("\x1b[?2004l")
    time.sleep(0.3)
    terminal.type(CTRL_C)  # within a command
    terminal.expect("interrupted")
    terminal.enter("/stats\r")
    terminal.expect("history: 1 turn")
    terminal.enter(CTRL_C)
    terminal.expect("once more")
    assert terminal.exit_code(CTRL_C) == 0


def test_what_was_typed_and_said_outlives_the_chat(open_chat: Opener, tmp_path: Path) -> None:
    first = open_chat()
    first.enter("hello there\r")
    first.expect("first token")
    assert first.exit_code() == 0
    files = [*(tmp_path / "forerun" / "chats").glob("*.json"), tmp_path / "forerun" / "typed"]
    assert len(files) == 2 and {oct(file.stat().st_mode & 0o777) for file in files} == {"0o600"}
    second = open_chat("--continue")
    second.expect("going on: hello there (1 turn)")
    second.enter(UP)
    second.expect("hello there")
    second.type("\x1b[B" + CTRL_R)
    second.type("hel")
    second.expect("I-search backward")
    second.type(ENTER + ENTER)
    second.expect("first token")
    second.enter("/stats\r")
    second.expect("history: 2 turns")
    assert second.exit_code() == 0
    [kept] = (tmp_path / "forerun" / "chats").glob("*.json")
    assert [turn.user for turn in Conversation.read(kept).history.turns] == ["hello there"] * 2


def test_without_history_nothing_is_kept(open_chat: Opener, tmp_path: Path) -> None:
    terminal = open_chat("--no-history")
    terminal.enter("hello\r")
    terminal.expect("first token")
    assert terminal.exit_code() == 0
    assert list(tmp_path.iterdir()) == []


def test_a_saved_chat_is_loaded(open_chat: Opener, tmp_path: Path) -> None:
    terminal = open_chat()
    terminal.enter("hello\r")
    terminal.expect("first token")
    terminal.enter(f"/save {tmp_path / 'it.json'}\r")
    terminal.expect("saved: ")
    terminal.enter("/clear\r")
    terminal.expect("the chat is empty")
    terminal.enter(f"/load {tmp_path / 'it.jso'}\t\r")
    terminal.expect("loaded: hello (1 turn)")
    terminal.enter("/regen\r")
    terminal.expect("first token")
    assert terminal.exit_code() == 0


@pytest.mark.parametrize(
    ("settings", "seen"),
    [
        ({}, ["Words", "\x1b[1mbold", "ä 你 <b>tag</b>", "print", "END"]),
        ({"columns": 30}, ["Words", "你", "print", "END"]),
        ({"NO_COLOR": "1"}, ["Words", "\x1b[1mbold", "END"]),
        ({"TERM": "dumb"}, ["# Words\r\n\r\nSome **bold** ones: ä 你 <b>tag</b>\r\n\r\n```python", "END"]),
        ({"encoding": "ascii", "TERM": "dumb"}, ["ones: ? ? <b>tag</b>", "END"]),
        ({"encoding": "ascii"}, ["bold", "ones: ? ? <b>tag</b>", "END"]),
    ],
)
def test_markdown_in_any_terminal(open_chat: Opener, settings: dict[str, Any], seen: list[str]) -> None:
    terminal = open_chat(**settings)
    if settings.get("TERM") == "dumb":
        terminal.expect("/help lists")
        terminal.expect("> ")
        terminal.type("mark\r")
    else:
        terminal.enter("mark\r")
    shown = "".join(map(terminal.expect, seen))
    terminal.expect("first token")
    if "TERM" in settings:
        assert "\x1b[J" not in shown
        terminal.expect("> ")
        terminal.type(CTRL_D)
    else:
        assert terminal.exit_code() == 0


def test_drafts_are_marked_in_place_of_markdown(open_chat: Opener) -> None:
    terminal = open_chat("--show-drafts")
    terminal.enter("hello\r")
    terminal.expect("\x1b[4malpha beta \x1b[0mgamma ")
    assert terminal.exit_code() == 0


def test_a_history_that_cannot_be_used_is_told(open_chat: Opener, tmp_path: Path) -> None:
    (tmp_path / "forerun" / "typed").mkdir(parents=True)
    (tmp_path / "forerun" / "chats").write_text("")
    terminal = open_chat()
    terminal.expect("what is typed is not kept: ")
    terminal.enter("hello\r")
    terminal.expect("first token")
    terminal.expect("this chat is not kept: ")
    assert terminal.exit_code() == 0
