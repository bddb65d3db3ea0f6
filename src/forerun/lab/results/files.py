"""Files of results: read with every value checked, and written as JSON, one entry of a list per line."""

from __future__ import annotations

import dataclasses
import json
import math
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from forerun.errors import ConfigError
from forerun.kernels.provenance import Environment
from forerun.lab.results.schema import (
    FORMAT,
    KINDS,
    VERSION,
    DrafterFacts,
    Figure,
    PromptFacts,
    Results,
    RunRow,
    TableFacts,
    TargetFacts,
)
from forerun.utils.files import write_bytes
from forerun.utils.json_file import REQUIRED, Fields

T = TypeVar("T")
_MOST = 1 << 53
"""What is larger is damage."""
_REMEDY = "Measure again with `forerun bench ... --json FILE`, or leave the file out."


def load_results(path: str | Path) -> Results:
    """Read the results that a file holds.

    Raises:
        ConfigError: it cannot be read, is no such file, is of another version, or a value in it cannot be.
    """
    found = Fields.read(path, ConfigError, remedy=_REMEDY)
    check_version(found)
    rows = _list(found, "rows", RunRow)
    prompts = _list(found, "prompts", PromptFacts)
    for number, row in enumerate(rows):
        if not 0 <= row.prompt < len(prompts):
            raise ConfigError(
                f"{found.place}: rows[{number}] is of prompt {row.prompt}, but there are {len(prompts)} prompts. "
                f"{_REMEDY}"
            )
    target = found.fields("target", None)
    return Results(
        kind=found.string("kind", choices=tuple(KINDS)),
        command=found.string("command"),
        environment=read_into(Environment, found.fields("environment")),
        target=None if target is None else read_into(TargetFacts, target),
        settings=_values(found, "settings"),
        drafters=_list(found, "drafters", DrafterFacts),
        prompts=prompts,
        rows=rows,
        figures=_list(found, "figures", Figure),
        tables=_list(found, "tables", TableFacts),
        details=_values(found, "details"),
        source=found.place,
    )


def check_version(found: Fields) -> None:
    """Raise ConfigError where an object is not results of the version that is read here."""
    if found.values.get("format") != FORMAT:
        raise ConfigError(
            f"{found.place}: it holds no results of forerun's: its format is not {FORMAT!r}. Give a file that "
            "`forerun bench ... --json FILE` wrote; reports of forerun 0.1.0 cannot be read."
        )
    version = found.integer("version", low=1)
    if version != VERSION:
        newer = "Update forerun." if version > VERSION else _REMEDY
        raise ConfigError(
            f"{found.place}: it is of version {version} of the schema, but this forerun reads {VERSION}. {newer}"
        )


def _values(found: Fields, key: str) -> Mapping[str, Any]:
    held = found.fields(key, None)
    return {} if held is None else held.values


def _list(found: Fields, key: str, kind: type[T]) -> list[T]:
    return [
        read_into(kind, Fields(f"{found.place}: {key}[{number}]", value, found.error, found.remedy))
        for number, value in enumerate(found.list_of(key, dict, []))
    ]


def read_into(kind: type[T], found: Fields) -> T:
    """Read an object into one of the schema's classes, or another with such fields. Raises `found.error` as `Fields`.

    Keys that it lacks are from another forerun, and are left out.
    """
    values: dict[str, Any] = {}
    for field in dataclasses.fields(kind):  # type: ignore[arg-type]
        factory = field.default_factory
        default = factory() if factory is not dataclasses.MISSING else field.default
        values[field.name] = _READERS[str(field.type)](
            found, field.name, REQUIRED if default is dataclasses.MISSING else default
        )
    return kind(**values)


def _count(found: Fields, key: str, default: Any) -> Any:
    return found.integer(key, default, low=0, high=_MOST)


def _amount(found: Fields, key: str, default: Any) -> Any:
    """Read a time or a share."""
    return found.number(key, default, low=0)


def _maybe(read: Callable[[Fields, str, Any], Any]) -> Callable[[Fields, str, Any], Any]:
    return lambda found, key, _: read(found, key, None)


def _figure(found: Fields, key: str, _: Any) -> Any:
    """Read a number, or None where it is missing, NaN or infinite."""
    value = found.values.get(key)
    return None if isinstance(value, float) and not math.isfinite(value) else found.number(key, None)


def _labels(found: Fields, key: str, default: Any) -> Any:
    held = found.fields(key, default)
    for name, value in held.values.items():
        if isinstance(value, bool) or not isinstance(value, (str, int, float)):
            raise held.wrong(name, "a text or a number")
    return held.values


def _k_values(found: Fields, key: str, default: Any) -> Any:
    values = found.values.get(key, default)
    if not isinstance(values, (list, tuple)) or not all(isinstance(each, (int, str)) for each in values):
        raise found.wrong(key, "a list of numbers or texts")
    return tuple(values)


def _rows(found: Fields, key: str, default: Any) -> Any:
    rows = found.list_of(key, list, default)
    if not all(isinstance(cell, str) for row in rows for cell in row):
        raise found.wrong(key, "rows of texts")
    if any(len(row) != len(rows[0]) for row in rows):
        raise found.wrong(key, "rows of as many cells each")
    return rows


def _of(kind: type) -> Callable[[Fields, str, Any], Any]:
    return lambda found, key, default: tuple(found.list_of(key, kind, list(default)))


_READERS: Mapping[str, Callable[[Fields, str, Any], Any]] = {
    "str": Fields.string,
    "str | None": _maybe(Fields.string),
    "int": _count,
    "int | None": _maybe(_count),
    "float": _amount,
    "bool": Fields.flag,
    "bool | None": _maybe(Fields.flag),
    "float | None": _figure,
    "Labels": _labels,
    "Environment": lambda found, key, _: read_into(Environment, found.fields(key)),
    "Sequence[int | str]": _k_values,
    "Sequence[int]": _of(int),
    "Sequence[float]": _of(float),
    "Sequence[str]": lambda found, key, default: found.list_of(key, str, default),
    "Sequence[Sequence[str]]": _rows,
}
"""By the annotation of a field: how its value is read."""


DIGITS = 6
_PACKAGE = __name__.rpartition(".")[0]
_FOLDERS = re.compile(r"(?:^|(?<=[=,;:+\"]))(?:~|\.{1,2})?/(?!/)(?:[^/,;=:]+/)*")
"""The folders of a path that begins an argument or an option's value in it."""
_KEY_FLAG = "--api-key"
_SECRET = "KEY"


def as_object(results: Results) -> dict[str, Any]:
    """Return the object that is written to a file."""
    fields = {name: _plain(value) for name, value in _fields(results).items() if name != "source"}
    return {"format": FORMAT, "version": VERSION, **fields}


def results_text(results: Results) -> str:
    """Format as JSON: entries of the lists each on a line, so that a diff shows changes of one; without blanks."""
    parts = []
    for name, value in as_object(results).items():
        if isinstance(value, list) and value:
            lines = ",\n".join(_dumped(each) for each in value)
            parts.append(f'"{name}":[\n{lines}\n]')
        else:
            parts.append(f'"{name}":{_dumped(value)}')
    return "{\n" + ",\n".join(parts) + "\n}\n"


def save_results(results: Results, path: Path) -> None:
    """Write results to a file, replacing a former one. Raises ConfigError."""
    write_bytes(path, results_text(results).encode(), error=ConfigError)


def command_line(arguments: Sequence[str]) -> str:
    """Return the command as it was typed, with names of files in place of paths, and without keys."""
    shown = []
    for before, each in zip(["", *arguments], arguments, strict=False):
        if before == _KEY_FLAG:
            shown.append(_SECRET)
        elif each.startswith(f"{_KEY_FLAG}="):
            shown.append(f"{_KEY_FLAG}={_SECRET}")
        else:
            shown.append(each)
    return shlex.join(["forerun", *map(without_folders, shown)])


def without_folders(text: str) -> str:
    """Remove the folders from a name or path, or from an option with one."""
    return _FOLDERS.sub("", text) or text


def _dumped(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))


def _plain(value: Any) -> Any:
    """Convert to dicts, lists, texts and finite numbers."""
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
    """Return name -> value; for the schema's classes without fields that have their default."""
    of_schema = type(value).__module__.startswith(_PACKAGE)
    return {
        field.name: getattr(value, field.name)
        for field in dataclasses.fields(value)
        if not (of_schema and _is_default(field, getattr(value, field.name)))
    }


def _is_default(field: dataclasses.Field[Any], held: object) -> bool:
    if field.default_factory is not dataclasses.MISSING:
        return bool(held == field.default_factory())
    return bool(held == field.default or (field.default == () and held == []))
