"""A reader of untrusted JSON: any content gives values, or an error that names file and key.

fields = Fields.read(folder / "config.json", ModelLoadError)
layers = fields.integer("num_hidden_layers", low=1)
epsilon = fields.number("rms_norm_eps", 1e-6, low=0)
scaling = fields.fields("rope_scaling", None)
"""

from __future__ import annotations

import json
import math
import os
import stat
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from reprlib import Repr
from typing import Any, TypeVar

T = TypeVar("T")
D = TypeVar("D")
ErrorType = Callable[[str], Exception]

MAX_BYTES = 1 << 28
_CHUNK = 1 << 20
MAX_TEMPLATE = 1 << 20
REMEDY = "Write or download it anew."
REQUIRED: Any = object()
"""As a default: the key must be there."""

_brief = Repr()
_brief.maxlevel = 2
_brief.maxstring = 60
_brief.maxother = 60
_brief.maxlong = 30


def read_json(path: str | Path, error: ErrorType, *, remedy: str = REMEDY, max_bytes: int = MAX_BYTES) -> Any:
    """Read the value that a file holds.

    Args:
        error: makes the exception from its message.
        remedy: the message's last sentence.

    Raises:
        error: as `read_bytes` and `parse_json`.
    """
    return parse_json(read_bytes(path, error, remedy=remedy, max_bytes=max_bytes), str(path), error, remedy=remedy)


def read_bytes(path: str | Path, error: ErrorType, *, remedy: str = REMEDY, max_bytes: int = MAX_BYTES) -> bytes:
    """Read a whole file.

    Raises:
        error: no such file, not a regular one, not readable, larger than `max_bytes`.
    """
    content = bytearray()
    try:
        with open_regular(path) as file:
            while len(content) <= max_bytes and (
                more := file.read(_CHUNK)
            ):  # a read takes as much memory as it may need
                content += more
    except (OSError, ValueError) as failure:  # ValueError: a path with a null character
        raise error(f"{path}: it cannot be read: {getattr(failure, 'strerror', None) or failure}. {remedy}") from None
    if len(content) > max_bytes:
        raise error(f"{path}: it is larger than {max_bytes:,} bytes, which no such file is. {remedy}")
    return bytes(content)


def read_template(path: str | Path, error: ErrorType) -> str:
    """Return the text of a file that holds a chat template. Raises as `read_bytes`, and if it is not UTF-8."""
    remedy = "Give the file of a chat template, in Jinja."
    try:
        return read_bytes(path, error, remedy=remedy, max_bytes=MAX_TEMPLATE).decode("utf-8")
    except UnicodeDecodeError as failure:
        raise error(f"{path}: it is not UTF-8 (byte {failure.start:,}). {remedy}") from None


def parse_json(content: str | bytes, place: str, error: ErrorType, *, remedy: str = REMEDY) -> Any:
    """Parse JSON text. Infinity and NaN are accepted, since Python writes them.

    Args:
        content: bytes are read as UTF-8.
        place: the file, and the line if it is one, for messages.

    Raises:
        error: not UTF-8, not JSON, nested too deeply, or a number with too many digits. The message shows nothing of
            the content.
    """
    try:
        return json.loads(content.decode("utf-8") if isinstance(content, bytes) else content)
    except UnicodeDecodeError as failure:
        reason = f"it is not UTF-8 (byte {failure.start:,})"
    except json.JSONDecodeError as failure:
        line = f"line {failure.lineno}, " * (failure.lineno > 1)
        reason = f"it is not JSON: {failure.msg} ({line}column {failure.colno})" if content else "it is empty"
    except ValueError:
        reason = "it holds a number with too many digits"
    except (RecursionError, MemoryError):
        reason = "it is nested too deeply"
    raise error(f"{place}: {reason}. {remedy}")


@dataclass(frozen=True, slots=True)
class Fields:
    """An object of a JSON file: each method returns the value of a key, of the type in its name, or raises `error`.

    A key that is missing or null has the default; without a default, it must be there. A whole float such as 4096.0
    is taken for an integer, and an integer for a number; booleans are neither. Numbers are finite.

    Attributes:
        place: the file, and where in it the object is.
        values: the object as it was read, unchecked.
        error: makes the exception from its message.
        remedy: the message's last sentence.
        private: texts are a user's own; messages say of what type they are, not what they are.
    """

    place: str
    values: Mapping[str, Any]
    error: ErrorType
    remedy: str = REMEDY
    private: bool = False

    @classmethod
    def read(cls, path: str | Path, error: ErrorType, *, remedy: str = REMEDY) -> Fields:
        """Read the object that a file holds. Raises `error` like `read_json`, and if the file holds another value."""
        return cls.of(read_json(path, error, remedy=remedy), str(path), error, remedy=remedy)

    @classmethod
    def parse(
        cls, content: str | bytes, place: str, error: ErrorType, *, remedy: str = REMEDY, private: bool = False
    ) -> Fields:
        """Parse the object in JSON text. Raises `error` like `parse_json`, and for another value."""
        return cls.of(parse_json(content, place, error, remedy=remedy), place, error, remedy=remedy, private=private)

    @classmethod
    def of(cls, value: object, place: str, error: ErrorType, *, remedy: str = REMEDY, private: bool = False) -> Fields:
        """Check that a value is an object. Raises `error` if it is not."""
        if not isinstance(value, dict):
            raise error(f"{place}: it holds {described_value(value)}, but must hold an object. {remedy}")
        return cls(place, value, error, remedy, private)

    def __contains__(self, key: str) -> bool:
        """Return whether the key is there and not null."""
        return self.values.get(key) is not None

    def integer(self, key: str, default: D = REQUIRED, low: float = -math.inf, high: float = math.inf) -> int | D:
        """Return a whole number in low..high."""
        return self._get(key, default, lambda value: _integer(value, low, high), f"a whole number{_range(low, high)}")

    def number(self, key: str, default: D = REQUIRED, low: float = -math.inf, high: float = math.inf) -> float | D:
        """Return a finite number in low..high."""
        return self._get(key, default, lambda value: _number(value, low, high), f"a number{_range(low, high)}")

    def string(self, key: str, default: D = REQUIRED, choices: tuple[str, ...] = ()) -> str | D:
        """Return a string, one of `choices` if there are any."""
        expected = f"one of {', '.join(map(repr, choices))}" if choices else "a string"
        return self._get(key, default, lambda value: _string(value, choices), expected)

    def flag(self, key: str, default: D = REQUIRED) -> bool | D:
        """Return true or false."""
        return self._get(key, default, lambda value: _instance(value, bool), "true or false")

    def list_of(self, key: str, kind: type[T], default: D = REQUIRED) -> list[T] | D:
        """Return a list of int, float, str, bool, dict or list, each checked like a single value of that type."""
        check, noun = _KINDS[kind]

        def checked(value: object) -> list[T]:
            if kind is int and {*map(type, _instance(value, list))} <= {int}:  # quickly: vocabularies are long
                return list(value)  # type: ignore[call-overload, no-any-return]
            return [check(each) for each in _instance(value, list)]

        return self._get(key, default, checked, f"a list of {noun}")

    def fields(self, key: str, default: D = REQUIRED) -> Fields | D:
        """Return an object inside this one."""
        found: dict[str, Any] | D = self._get(key, default, lambda value: _instance(value, dict), "an object")
        if not isinstance(found, dict):
            return found
        return Fields(f"{self.place}: {key}", found, self.error, self.remedy, self.private)

    def wrong(self, key: str, expected: str) -> Exception:
        """Make the error that says what a key's value is and what it must be, for the caller's own checks."""
        value = self.values.get(key)
        said = described_value(value) if self.private else _brief.repr(value)
        found = f"{key} is {said}, but" if key in self.values else f"{key} is missing; it"
        return self.error(f"{self.place}: {found} must be {expected}. {self.remedy}")

    def _get(self, key: str, default: D, check: Callable[[object], T], expected: str) -> T | D:
        value = self.values.get(key)
        if value is None and default is not REQUIRED:
            return default
        try:
            return check(value)
        except (ValueError, OverflowError):
            raise self.wrong(key, expected) from None


@contextmanager
def open_regular(path: str | Path) -> Iterator[BufferedReader]:
    """Open a regular file. Raises OSError, ValueError, the latter for pipes and devices too."""
    # opening a pipe would wait for its other end
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | getattr(os, "O_NONBLOCK", 0))) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise ValueError("it is not a regular file")
        yield file


def _instance(value: object, kind: type[T]) -> T:
    if not isinstance(value, kind):
        raise ValueError
    return value


def described_value(value: object) -> str:
    """Describe a value of JSON: its type in words, or the value itself if it cannot be a text of the user's."""
    words: dict[type, str] = {str: "a string", list: "a list", dict: "an object"}
    return words.get(type(value)) or _brief.repr(value)


def _number(value: object, low: float = -math.inf, high: float = math.inf) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ValueError
    number = float(value)
    if not (math.isfinite(number) and low <= number <= high):
        raise ValueError
    return number


def _integer(value: object, low: float = -math.inf, high: float = math.inf) -> int:
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise ValueError
    return value


def _string(value: object, choices: tuple[str, ...] = ()) -> str:
    text = _instance(value, str)
    text.encode()  # a lone surrogate is no character
    if choices and text not in choices:
        raise ValueError
    return text


_KINDS: dict[type, tuple[Callable[[object], Any], str]] = {
    int: (_integer, "whole numbers"),
    float: (_number, "numbers"),
    str: (_string, "strings"),
    bool: (lambda value: _instance(value, bool), "true or false"),
    dict: (lambda value: _instance(value, dict), "objects"),
    list: (lambda value: _instance(value, list), "lists"),
}


def _range(low: float, high: float) -> str:
    if math.isfinite(low) and math.isfinite(high):
        return f" in {low:g}..{high:g}" if high < 1e6 else f" in {low:,}..{high:,}"
    if math.isfinite(low):
        return f" of {low:,} or more"
    return f" of at most {high:,}" if math.isfinite(high) else ""
