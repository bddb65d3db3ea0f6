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
    quoted = line.lstrip().startswith(_QUOTES)
    lines = [line.lstrip().removeprefix(_QUOTES) if quoted else line]
    try:
        while not lines[-1].rstrip().endswith(_QUOTES) if quoted else lines[-1].endswith("\\"):
            if not quoted:
                lines[-1] = lines[-1][:-1]
            lines.append(ask(MORE))
        if quoted:
            lines[-1] = lines[-1].rstrip().removesuffix(_QUOTES)
    except EOFError:
        pass
    except KeyboardInterrupt:
        return Entered("")
    text = "\n".join(lines)
    return Entered(text.strip("\n")) if quoted else Entered(text, text.startswith("/"))


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
