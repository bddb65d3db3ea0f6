"""Messages as people type them, and as a pipe brings them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass

from forerun.errors import PromptError

PROMPT = "> "
MORE = "… "
_QUOTES = '"""'


@dataclass(frozen=True, slots=True)
class Entered:
    """What was typed.

    Attributes:
        is_command: it begins with / and was not put between quotation marks.
    """

    text: str
    is_command: bool = False


def read_entry(ask: Callable[[str], str]) -> Entered:
    """One message or command, of one line or several.

    Args:
        ask: prints a prompt and returns the next line; raises EOFError at the end of input, KeyboardInterrupt at
            Ctrl-C.

    Raises:
        EOFError, KeyboardInterrupt: in the first line. In a later one, the end of input ends the message, and Ctrl-C
            forgets it: what is returned is empty.
    """
    line = ask(PROMPT)
    try:
        if line.lstrip().startswith(_QUOTES):
            return Entered(_quoted(line.lstrip().removeprefix(_QUOTES), ask))
        text = _continued(line, ask)
    except KeyboardInterrupt:
        return Entered("")
    return Entered(text, text.startswith("/"))


def _quoted(first: str, ask: Callable[[str], str]) -> str:
    """The lines up to the one that ends with quotation marks."""
    lines = [first]
    try:
        while not lines[-1].rstrip().endswith(_QUOTES):
            lines.append(ask(MORE))
    except EOFError:
        return "\n".join(lines).strip("\n")
    lines[-1] = lines[-1].rstrip().removesuffix(_QUOTES)
    return "\n".join(lines).strip("\n")


def _continued(line: str, ask: Callable[[str], str]) -> str:
    """The line and those after it, as long as they end with a backslash."""
    lines = [line]
    try:
        while lines[-1].endswith("\\"):
            lines[-1] = lines[-1][:-1]
            lines.append(ask(MORE))
    except EOFError:
        pass
    return "\n".join(lines)


def terminal_line(prompt: str) -> str:
    """The next line that is typed. With readline, where Python has it, it can be edited, and lines of this chat are
    found again with the arrow keys; they are kept in memory alone.

    Raises:
        EOFError, KeyboardInterrupt: Ctrl-D, Ctrl-C.
        PromptError: it is not text.
    """
    try:
        if sys.stdout.isatty():
            with suppress(ImportError):
                import readline  # noqa: F401 - input() uses it from then on
            return input(prompt)
        sys.stderr.write(prompt)  # standard output takes answers alone
        sys.stderr.flush()
        line = sys.stdin.readline()
    except UnicodeDecodeError as error:
        raise PromptError(f"What was typed is not UTF-8 text: {error.reason}.") from None
    if not line:
        raise EOFError
    return line.removesuffix("\n")


def pipe_lines() -> Iterator[str]:
    """The lines of standard input, each a message; empty ones are passed over.

    Raises:
        PromptError: a line is not UTF-8.
    """
    for number, line in enumerate(sys.stdin.buffer, 1):
        try:
            text = line.decode("utf-8").rstrip("\r\n")
        except UnicodeDecodeError as error:
            raise PromptError(
                f"Line {number} of standard input is not UTF-8 text: {error.reason}. Convert it first."
            ) from None
        if text.strip():
            yield text
