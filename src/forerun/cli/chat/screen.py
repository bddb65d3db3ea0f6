"""What a chat prints: answers on standard output, as Markdown on a terminal, and notes on standard error."""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import typer

from forerun.errors import ConfigError
from forerun.utils.deferred import DeferredModule
from forerun.utils.signals import cleaned_up

if TYPE_CHECKING:
    import termios

    from forerun.engine import StreamChunk
else:
    termios = DeferredModule("termios")  # Windows has none

_CONTROLS = {code: 0x2400 + code for code in range(0x20) if chr(code) not in "\n\t"} | {0x7F: 0x2421, 0x0D: None}
_CONTROLS |= dict.fromkeys((*range(0x80, 0xA0), *range(0x202A, 0x202F), *range(0x2066, 0x206A)), 0xFFFD)
"""Control characters as pictures of them: a text must not move the cursor, rename the window or turn its own order."""


class Screen:
    """Answers on standard output and notes on standard error, each a terminal or not.

    Attributes:
        shows_drafts: accepted draft tokens are marked, and answers are not read as Markdown.
        reads_markdown: answers are, where standard output is a terminal that can move its cursor.
        is_terminal: standard output is one.
    """

    def __init__(self) -> None:
        self.shows_drafts = False
        self.is_terminal = sys.stdout.isatty()
        self._err_is_terminal = sys.stderr.isatty()
        self._styled = os.environ.get("TERM") != "dumb"
        self.reads_markdown = self.is_terminal and self._styled
        self._line_open = False
        self._markdown: MarkdownStream | None = None
        self._thinks = False
        for stream in (sys.stdout, sys.stderr):  # in a locale without UTF-8, a character must not end the chat
            if hasattr(stream, "reconfigure") and (stream.encoding or "").lower().replace("-", "") != "utf8":
                stream.reconfigure(errors="replace")

    def show_drafts(self, enabled: bool) -> None:
        """Mark accepted draft tokens from now on, or no longer. Raises ConfigError if standard output cannot."""
        if enabled and not (self.is_terminal and self._styled):
            raise ConfigError("Accepted draft tokens are marked on a terminal alone, and standard output is none.")
        self.shows_drafts = enabled

    def read_markdown(self, enabled: bool) -> None:
        """Read answers as Markdown from now on, or show them as they are. Raises ConfigError where that cannot be."""
        if enabled and not (self.is_terminal and self._styled):
            raise ConfigError("Markdown is shown on a terminal alone, and standard output is none.")
        self.reads_markdown = enabled

    def chunk(self, tokenizer: Any, chunk: StreamChunk) -> None:
        """Print the text that one step has added to the answer."""
        if not self.shows_drafts:
            self.answer_text(chunk.text)
        elif chunk.text:
            from forerun.engine.text import split_accepted

            drafted, added = map(visible, split_accepted(tokenizer, chunk))
            colour = None if os.environ.get("NO_COLOR") else "green"
            self._print((typer.style(drafted, fg=colour, underline=True) if drafted else "") + added)
            self._line_open = not chunk.text.endswith("\n")

    def answer_text(self, text: str) -> None:
        """Print more of the answer."""
        if self._thinks and text:
            self.end_line()
            self._print("\n")
            self._thinks = False
        if self.reads_markdown and not self.shows_drafts:
            if self._markdown is None:
                self._markdown = MarkdownStream(self._print)
            self._markdown.push(visible(text))
        elif text:
            self._print(visible(text) if self.is_terminal else text)
            self._line_open = not text.endswith("\n")

    def thinking_text(self, text: str) -> None:
        """Print more of what the model thinks, apart from its answer."""
        if text:
            self._thinks = True
            self._print(typer.style(visible(text), dim=True) if self._styled else visible(text))
            self._line_open = not text.endswith("\n")

    def end_answer(self) -> None:
        """End the line of the answer; if standard output is no terminal, every answer is followed by an empty line."""
        self._thinks = False
        if not self.is_terminal:
            self._print("\n\n")
            self._line_open = False
        self.end_line()

    def end_line(self) -> None:
        """End what is open on standard output, if anything."""
        if self._markdown is not None:
            self._markdown.finish()
            self._markdown = None
        if self._line_open:
            self._print("\n")
        self._line_open = False

    def note(self, text: str) -> None:
        """Print a line on standard error, below the answer."""
        self.end_line()
        shown = visible(text) if self._err_is_terminal else text
        typer.echo(typer.style(shown, dim=True) if self._err_is_terminal and self._styled else shown, err=True)

    def _print(self, text: str) -> None:
        print(text, end="", flush=True)


@contextmanager
def silent_keys() -> Iterator[None]:
    """Have the terminal echo no keys in this block: they would stand within an answer. They are read after it."""
    if sys.platform == "win32" or not os.isatty(0):
        yield
        return
    before = termios.tcgetattr(0)
    silent = [*before]
    silent[3] &= ~termios.ECHO
    with cleaned_up():
        termios.tcsetattr(0, termios.TCSANOW, silent)
        try:
            yield
        finally:
            termios.tcsetattr(0, termios.TCSANOW, before)


def visible(text: str) -> str:
    """Return the text with pictures for its control characters, except line breaks and tabs."""
    return text.translate(_CONTROLS)


_LEAST_PAUSE = 0.04
"""Seconds between two drawings at least."""
_PAUSES = 30
"""Least seconds between two drawings, in those that one took: drawing takes a thirtieth of the time at most."""


class MarkdownStream:
    """Draws Markdown while it grows.

    The last block of the text may still change: it is drawn again from its first line that has, in one write, so that
    nothing flickers. Blocks before it, and lines that would leave the screen, stay as they are.

    Args:
        write: prints text.
    """

    def __init__(self, write: Callable[[str], object]) -> None:
        import io

        from markdown_it import MarkdownIt
        from rich.console import Console

        self._write = write
        size = shutil.get_terminal_size()
        self._room = max(size.lines - 1, 1)
        # A line that is full to the last column would end on two lines of some terminals.
        width = max(size.columns - 1, 1)
        self._console = Console(file=io.StringIO(), force_terminal=True, width=width, highlight=False)
        # HTML is text: rich would leave it out.
        self._parser = MarkdownIt("commonmark", {"html": False}).enable(["strikethrough", "table"])
        self._text = ""  # of blocks that are not done
        self._drawn: list[str] = []  # lines of them on the screen that may change
        self._num_left = 0  # lines of them before those, which have left the screen or may
        self._before: list[str] = []  # an empty line, from the second block on
        self._next = 0.0

    def push(self, text: str) -> None:
        """Add text, and draw it unless the last drawing was just now."""
        self._text += text
        start = time.perf_counter()
        if start >= self._next:
            self._draw()
            end = time.perf_counter()
            self._next = end + max(_PAUSES * (end - start), _LEAST_PAUSE)

    def finish(self) -> None:
        """Draw what is left."""
        self._draw()

    def _draw(self) -> None:
        """Draw the blocks that have come; all but the last are done."""
        starts = [each.map[0] for each in self._parser.parse(self._text) if each.level == 0 and each.map]
        lines = self._text.split("\n")
        for begin, end in pairwise(starts):
            self._show(self._rendered("\n".join(lines[begin:end])))
            self._drawn = []
            self._num_left = 0
            self._before = [""]
        self._text = "\n".join(lines[starts[-1] if starts else 0 :])
        self._show(self._rendered(self._text))

    def _show(self, lines: list[str]) -> None:
        """Bring the lines of the open block onto the screen: from the first one that differs from what is there."""
        lines = lines[self._num_left :]
        same = next((at for at, (a, b) in enumerate(zip(lines, self._drawn, strict=False)) if a != b), None)
        if same is None:
            same = min(len(lines), len(self._drawn))
        back = len(self._drawn) - same
        text = (f"\x1b[{back}F\x1b[J" if back else "") + "".join(f"{line}\n" for line in lines[same:])
        if text:
            self._write(text)
        leaving = max(len(lines) - self._room, 0)
        self._num_left += leaving
        self._drawn = lines[leaving:]

    def _rendered(self, text: str) -> list[str]:
        """Return Markdown as lines for the terminal, after an empty one if it follows on others."""
        from rich.markdown import Markdown

        if not text.strip():
            return []
        made = Markdown(text, code_theme="ansi_dark", hyperlinks=False)
        made.parsed = self._parser.parse(text)
        with self._console.capture() as captured:
            self._console.print(made)
        lines = "\n".join(map(str.rstrip, captured.get().split("\n")))
        return [*self._before, *lines.strip("\n").split("\n")]  # rich has empty lines around code and lists
