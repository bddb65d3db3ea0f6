"""The line editor of a chat: prompt_toolkit with history, completion, and messages of several lines."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from prompt_toolkit import PromptSession
from prompt_toolkit.completion import CompleteEvent, Completer, Completion, PathCompleter
from prompt_toolkit.document import Document
from prompt_toolkit.enums import DEFAULT_BUFFER
from prompt_toolkit.filters import has_focus
from prompt_toolkit.history import FileHistory, History, InMemoryHistory
from prompt_toolkit.input import create_input
from prompt_toolkit.key_binding import KeyBindings
from prompt_toolkit.keys import Keys
from prompt_toolkit.output import create_output
from prompt_toolkit.shortcuts import CompleteStyle

from forerun.cli.chat.slash_commands import ALIASES, COMMANDS, SETTINGS, SWITCHES
from forerun.drafters.registry import DRAFTERS

PROMPT = "> "
MORE = "… "
_QUOTES = '"""'
_PASTE_END = "\x1b[201~"
_LARGE = 20_000
"""Characters of a paste from which a mark stands for it: the editor draws what it holds at each key."""


class TypedHistory(FileHistory):
    """What was typed, in a file. What cannot be written is kept in memory.

    Attributes:
        trouble: why something was not written, if that was not told yet.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.trouble = ""

    def store_string(self, string: str) -> None:
        """Append an entry, as FileHistory does."""
        try:
            super().store_string(string)
        except (OSError, ValueError) as error:  # lone surrogates are a ValueError
            self.trouble = f"what was typed is not kept: {getattr(error, 'strerror', None) or error}"


def typed_history(path: Path | None, note: Callable[[str], None]) -> History:
    """Return the history of what was typed; in memory alone without a file, or where it cannot be used, which `note`
    says."""
    if path is None:
        return InMemoryHistory()
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600))
    except OSError as error:
        note(f"what is typed is not kept: {path}: {error.strerror}")
        return InMemoryHistory()
    return TypedHistory(path)


class _Words(Completer):
    """Completes commands, settings, drafters and names of files."""

    def __init__(self) -> None:
        self._files = PathCompleter(expanduser=True)
        self._values = {"set": [*SETTINGS, *SWITCHES], "drafter": [*DRAFTERS]}

    def get_completions(self, document: Document, complete_event: CompleteEvent) -> Iterable[Completion]:
        """Yield what the word before the cursor may become."""
        text = document.text_before_cursor
        name, space, rest = text.partition(" ")
        if not text.startswith("/") or "\n" in text:
            return
        if not space:
            names = sorted((*COMMANDS, *ALIASES))
            yield from (Completion(f"/{each}", -len(text)) for each in names if each.startswith(text[1:]))
        elif name[1:] in COMMANDS and COMMANDS[name[1:]].argument == "FILE":
            yield from self._files.get_completions(Document(rest), complete_event)
        else:
            words = self._values.get(name[1:], [])
            yield from (Completion(each, -len(rest)) for each in words if each.startswith(rest))


class Prompt:
    """Reads messages and commands.

    Args:
        history: of what was typed.
        note: prints a line.
    """

    def __init__(self, history: History, note: Callable[[str], None]) -> None:
        self._history = history
        self._note = note
        self._pastes: dict[str, str] = {}
        keys = create_input()
        _read_pastes_quickly(getattr(keys, "vt100_parser", None))  # on Windows, there is none
        self._session: PromptSession[str] = PromptSession(
            PROMPT,
            multiline=True,
            prompt_continuation=_continuation,
            history=history,
            completer=_Words(),
            complete_while_typing=False,
            complete_style=CompleteStyle.READLINE_LIKE,
            key_bindings=self._bindings(),
            input=keys,
            output=None if sys.stdout.isatty() else create_output(sys.stderr),  # standard output is for answers
        )

    def read(self, draft: str) -> tuple[str, bool]:
        """Return what was typed, and whether it is a command.

        Args:
            draft: text that stands there already.

        Raises:
            EOFError: Ctrl-D, or the end of input.
            KeyboardInterrupt: Ctrl-C where nothing was typed. What was typed is left in the history: the text is empty.
        """
        try:
            text = self._session.prompt(default=self._marked(draft))
        except KeyboardInterrupt:
            text = self._session.default_buffer.text
            if not text:
                raise
            self._history.append_string(text)
            return "", False
        finally:
            if trouble := getattr(self._history, "trouble", ""):
                self._note(trouble)
                self._history.trouble = ""  # type: ignore[attr-defined]
        return self._entry(text)

    def _entry(self, text: str) -> tuple[str, bool]:
        quoted = text.lstrip().startswith(_QUOTES)
        if quoted:
            text = text.strip().removeprefix(_QUOTES).removesuffix(_QUOTES).strip("\n")
        is_command = (
            not quoted and text.startswith("/") and ("\n" not in text or (*text[1:].split(None, 1), "")[0] in COMMANDS)
        )
        for mark, pasted in self._pastes.items():
            text = text.replace(mark, pasted)
        return text, is_command

    def _marked(self, text: str) -> str:
        """Return a mark for a text that is too long to be edited."""
        if len(text) < _LARGE:
            return text
        mark = f"[{len(text):,} characters, paste {len(self._pastes) + 1}]"
        self._pastes[mark] = text
        return mark

    def _bindings(self) -> KeyBindings:
        """Return the keys that differ from those of a single line."""
        bindings = KeyBindings()
        here = has_focus(DEFAULT_BUFFER)

        @bindings.add(Keys.Enter, filter=here)
        def _enter(event: Any) -> None:
            buffer = event.current_buffer
            if not is_open(buffer.text):
                buffer.validate_and_handle()
                return
            buffer.cursor_position = len(buffer.text)
            if not buffer.text.lstrip().startswith(_QUOTES):
                buffer.delete_before_cursor()
            buffer.insert_text("\n")

        @bindings.add(Keys.Escape, Keys.Enter, filter=here)
        @bindings.add(Keys.Escape, Keys.ControlJ, filter=here)  # as it comes if typed before the prompt is there
        def _new_line(event: Any) -> None:
            event.current_buffer.insert_text("\n")

        @bindings.add(Keys.BracketedPaste, filter=here)
        def _paste(event: Any) -> None:
            text = event.data.replace("\r\n", "\n").replace("\r", "\n")
            event.current_buffer.insert_text(self._marked(text))

        return bindings


def _continuation(width: int, line: int, is_wrapped: int) -> str:
    return "" if is_wrapped else MORE


def _read_pastes_quickly(parser: Any) -> None:
    """Have a parser of keys search what is new of a paste alone: it searches all of it with each kilobyte, which takes
    minutes for ten megabytes."""
    if not hasattr(parser, "_in_bracketed_paste"):
        return
    feed = parser.feed
    pieces: list[str] = []
    tail = ""

    def feed_quickly(data: str) -> None:
        nonlocal tail
        if not parser._in_bracketed_paste:
            feed(data)
            return
        tail = (tail if pieces else parser._paste_buffer)[1 - len(_PASTE_END) :] + data
        pieces.append(data)
        if _PASTE_END in tail:
            text = "".join(pieces)
            pieces.clear()
            feed(text)

    parser.feed = feed_quickly


def is_open(text: str) -> bool:
    """Return whether Enter begins another line: within three quotation marks, or after a backslash."""
    begun = text.strip()
    if begun.startswith(_QUOTES):
        return len(begun) < 2 * len(_QUOTES) or not begun.endswith(_QUOTES)
    return text.endswith("\\")
