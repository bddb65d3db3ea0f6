"""Texts that a command line gives as they are or by the name of a file."""

from __future__ import annotations

from pathlib import Path

from forerun.errors import ForerunError, PromptError


def unicode_text(text: str, what: str, error: type[ForerunError] = PromptError) -> str:
    """The text of an argument. Python reads bytes that are not UTF-8 as lone surrogates."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise error(f"{what} is not UTF-8 text. Convert it first, or put it into a UTF-8 file.") from None
    return text


def text_or_file(value: str, flag: str, error: type[ForerunError] = PromptError) -> str:
    """The flag's text, or that of the file it names with @.

    Raises:
        error: the file cannot be read, or is not UTF-8.
    """
    if not unicode_text(value, flag, error).startswith("@"):
        return value
    try:
        return Path(value[1:]).read_text(encoding="utf-8")
    except (OSError, ValueError) as failure:
        if isinstance(failure, UnicodeDecodeError):
            raise error(f"{flag} is {value!r}, but that file is not UTF-8 text: {failure}.") from None
        reason = getattr(failure, "strerror", None) or failure
        raise error(f"{flag} is {value!r}, but that file cannot be read: {reason}.") from None
