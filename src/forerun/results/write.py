"""Results as JSON: an entry of a list on a line, six digits of a number, no NaN."""

from __future__ import annotations

import dataclasses
import json
import math
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from forerun.errors import ConfigError
from forerun.files.write import write_bytes
from forerun.results.schema import FORMAT, VERSION, Results

DIGITS = 6
_ROOM = __name__.rpartition(".")[0]
_FOLDERS = re.compile(r"(?:^|(?<=[=,;:]))(?:~|\.{1,2})?/(?!/)(?:[^/,;=:]+/)*")
"""The folders of a path that begins an argument or an option's value in it."""
_KEY_FLAG, _SECRET = "--api-key", "KEY"


def as_object(results: Results) -> dict[str, Any]:
    """What a file holds."""
    fields = {name: _plain(value) for name, value in _fields(results).items() if name != "source"}
    return {"format": FORMAT, "version": VERSION, **fields}


def text_of(results: Results) -> str:
    """The JSON text: entries of the lists each on a line, so that changes of one are seen in a diff; without blanks, of
    which there would be a tenth."""
    parts = []
    for name, value in as_object(results).items():
        if isinstance(value, list) and value:
            lines = ",\n".join(_dumped(each) for each in value)
            parts.append(f'"{name}":[\n{lines}\n]')
        else:
            parts.append(f'"{name}":{_dumped(value)}')
    return "{\n" + ",\n".join(parts) + "\n}\n"


def save(results: Results, path: Path) -> None:
    """Write them, replacing a former file. Raises ConfigError."""
    write_bytes(path, text_of(results).encode(), error=ConfigError)


def command_line(arguments: Sequence[str]) -> str:
    """The command as it was typed, with the names of files in place of their paths, and without keys."""
    shown = [
        _SECRET if before == _KEY_FLAG else f"{_KEY_FLAG}={_SECRET}" if each.startswith(f"{_KEY_FLAG}=") else each
        for before, each in zip(["", *arguments], arguments, strict=False)
    ]
    return shlex.join(["forerun", *map(without_folders, shown)])


def without_folders(text: str) -> str:
    """A name or path, or an option with one, without the folders that it lies in."""
    return _FOLDERS.sub("", text) or text


def _dumped(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))


def _plain(value: Any) -> Any:
    """In dicts, lists, texts and finite numbers."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {name: _plain(each) for name, each in _fields(value).items()}
    if hasattr(value, "_asdict"):
        return _plain(value._asdict())
    if isinstance(value, Mapping):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}") if math.isfinite(value) else None
    return _plain(value.item()) if hasattr(value, "item") else str(value)  # a number of NumPy's


def _fields(value: Any) -> dict[str, Any]:
    """Name -> value; of the schema's classes without those that have their default."""
    of_schema = type(value).__module__.startswith(_ROOM)
    return {
        field.name: getattr(value, field.name)
        for field in dataclasses.fields(value)
        if not (of_schema and _is_default(field, getattr(value, field.name)))
    }


def _is_default(field: dataclasses.Field[Any], held: object) -> bool:
    if field.default_factory is not dataclasses.MISSING:
        return bool(held == field.default_factory())
    return bool(held == field.default or (field.default == () and held == []))
