"""What a chat prints: answers on standard output, everything else on standard error."""

from __future__ import annotations

import os
import shutil
import sys
from typing import TYPE_CHECKING, Any

import typer

from forerun.errors import ConfigError

if TYPE_CHECKING:
    from forerun.engine import StreamChunk

_CONTROLS = {code: 0x2400 + code for code in range(0x20) if chr(code) not in "\n\t"} | {0x7F: 0x2421, 0x0D: None}
_CONTROLS |= dict.fromkeys(range(128, 160), 65533)
"""Control characters as pictures of them: a text must not move the cursor or rename the window."""


class Screen:
    """Standard output and standard error, each a terminal or not.

    Attributes:
        shows_drafts: accepted draft tokens are marked.
    """

    def __init__(self) -> None:
        self.shows_drafts = False
        self._out_is_terminal = sys.stdout.isatty()
        self._err_is_terminal = sys.stderr.isatty()
        self._styled = os.environ.get("TERM") != "dumb"
        self._line_begun = False

    @property
    def width(self) -> int | None:
        """Columns of standard error; None where it is no terminal."""
        return shutil.get_terminal_size().columns if self._err_is_terminal else None

    def show_drafts(self, wanted: bool) -> None:
        """Mark accepted draft tokens from now on, or no longer.

        Raises:
            ConfigError: standard output cannot show it.
        """
        if wanted and not (self._out_is_terminal and self._styled):
            raise ConfigError("Accepted draft tokens are marked on a terminal alone, and standard output is none.")
        self.shows_drafts = wanted

    def chunk(self, tokenizer: Any, chunk: StreamChunk) -> None:
        """What one step has added to the answer."""
        if not chunk.text:
            return
        self._line_begun = not chunk.text.endswith("\n")
        if self.shows_drafts:
            from forerun.cli.stage import split_accepted  # with rich

            drafted, added = split_accepted(tokenizer, chunk)
            colour = None if os.environ.get("NO_COLOR") else "green"
            drafted = typer.style(visible(drafted), fg=colour, underline=True) if drafted else ""
            text = drafted + visible(added)
        else:
            text = visible(chunk.text) if self._out_is_terminal else chunk.text
        sys.stdout.write(text)
        sys.stdout.flush()

    def end_answer(self) -> None:
        """End the line that the answer has begun; where standard output is no terminal, every answer ends one."""
        self._line_begun = self._line_begun or not self._out_is_terminal
        self.end_line()

    def end_line(self) -> None:
        """End the line that has been begun on standard output, if any."""
        if self._line_begun:
            sys.stdout.write("\n")
            sys.stdout.flush()
        self._line_begun = False

    def note(self, text: str) -> None:
        """A line for people, after the answer's last one."""
        self.end_line()
        dim = self._err_is_terminal and self._styled
        typer.echo(typer.style(visible(text), dim=True) if dim else text, err=True)


def visible(text: str) -> str:
    """The text with pictures for its control characters, except the ends of lines and tabs."""
    return text.translate(_CONTROLS)
