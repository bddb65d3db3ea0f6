"""Workloads: prompts with their references as JSON lines, one object a line, the bundled ones and a user's files.

A line holds "prompt", and where they are known "file" (the prompt's source), "reference" (the text that follows the
prompt in that file) and "temperature" (at which the prompt is to be sampled).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forerun.config import ASSETS
from forerun.errors import ConfigError
from forerun.files.json_file import Fields
from forerun.files.write import write_bytes

WORKLOADS = ASSETS / "workloads"
"""Folder of the bundled workloads."""
_REMEDY = "Put the line right: one JSON object with its texts as strings."


@dataclass(frozen=True, slots=True)
class Case:
    """One prompt of a workload.

    Attributes:
        name: the file that it was cut from, or the place of its line.
        prompt: the text that the model is given.
        reference: the text that followed the prompt in its file; empty if unknown.
        temperature: the temperature to sample it at; None leaves that to the measurement.
    """

    name: str
    prompt: str
    reference: str = ""
    temperature: float | None = None


def names() -> list[str]:
    """The bundled workloads."""
    return sorted(path.stem for path in WORKLOADS.glob("*.jsonl"))


def load(workload: str, limit: int | None = None) -> list[Case]:
    """The first `limit` cases of a bundled workload, or of a JSONL file with a "prompt" on every line.

    Raises:
        ConfigError: there is no such workload, or a line of it cannot be read.
    """
    bundled = WORKLOADS / f"{workload}.jsonl"
    path = bundled if bundled.is_file() else Path(workload)
    if not path.is_file():
        raise ConfigError(
            f"There is no workload {workload!r}. Give one of {', '.join(names()) or 'none bundled'}, "
            "or the path of a JSONL file with a prompt on every line."
        )
    try:
        with path.open(encoding="utf-8") as lines:
            cases: list[Case] = []
            for record in read_records(lines, path.name):
                if limit is not None and len(cases) >= limit:
                    break
                cases.append(_case(record))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"The workload {path} cannot be read: {error}. Give a JSONL file in UTF-8.") from None
    if not cases:
        raise ConfigError(f"{path} holds no prompts. Put one JSON object with a prompt on each line.")
    return cases


def save(cases: Sequence[Case], path: Path) -> None:
    """Write cases so that `load` reads them; the folder is made if it is missing."""
    records = []
    for case in cases:
        record: dict[str, Any] = {"file": case.name, "prompt": case.prompt, "reference": case.reference}
        records.append(record if case.temperature is None else record | {"temperature": case.temperature})
    write_bytes(path, written(records).encode(), error=ConfigError)


def temperatures(cases: Sequence[Case]) -> list[float]:
    """The temperatures that the cases ask for, in ascending order; empty if they leave that open."""
    return sorted({case.temperature for case in cases if case.temperature is not None})


def read_records(lines: Iterable[str], file_name: str) -> Iterator[Fields]:
    """The object of every line that is not blank; its place is FILE:LINE.

    Raises:
        ConfigError: a line is not a JSON object; the message names the file and the line, and shows nothing of it.
    """
    for number, line in enumerate(lines, 1):
        if line.strip():
            yield Fields.parse(line, f"{file_name}:{number}", ConfigError, remedy=_REMEDY, private=True)


def written(records: Iterable[dict[str, Any]]) -> str:
    """The records as JSON lines."""
    return "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records)


def _case(record: Fields) -> Case:
    return Case(
        record.string("file", record.place),
        record.string("prompt"),
        record.string("reference", ""),
        record.number("temperature", None, low=0),
    )
