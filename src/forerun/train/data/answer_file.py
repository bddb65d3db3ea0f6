"""A file of answers: JSON lines, gzipped where its name ends in .gz, in which a target's answers are kept for training.

    {"kind": "translation", "temp": 0, "system": true, "prompt": "...", "answer": "...", "complete": true}

A line holds one of `prompt` (a user's message), `messages` (a chat) and `text` (raw text), and `answer`, which is the
target's. Without an answer, `text` is text that exists: the target's predictions are learnt at all of its tokens.
"""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forerun.errors import ConfigError
from forerun.files.json_file import Fields
from forerun.workloads import read_records

SUFFIXES = (".jsonl", ".jsonl.gz")
_REMEDY = "Put the line right, or leave it out."
_FORMS = ("prompt", "messages", "text")


@dataclass(frozen=True, slots=True)
class Answered:
    """One line.

    Attributes:
        kind: what sort of prompt it is; empty if nobody says.
        temperature: at which the answer was drawn; 0 is greedy.
        prompt: raw text, or a chat, each message with "role" and "content".
        system: the template's usual system message stands before a chat that has none of its own.
        answer: the target's; None: `prompt` is text that exists.
        complete: it ended by itself.
    """

    kind: str
    temperature: float
    prompt: str | list[dict[str, str]]
    answer: str | None
    system: bool = True
    complete: bool = False

    @property
    def asked(self) -> str:
        """The prompt as one text: the messages of a chat, one after another."""
        if isinstance(self.prompt, str):
            return self.prompt
        return "\n".join(message["content"] for message in self.prompt)

    def record(self) -> dict[str, Any]:
        """The line's object."""
        head: dict[str, Any] = {"kind": self.kind, "temp": self.temperature}
        if isinstance(self.prompt, str):
            asked: dict[str, Any] = {"text": self.prompt}
        else:
            *first, last = self.prompt
            asked = {"system": self.system, "prompt": last["content"]}
            if first and [message["role"] for message in first] == ["system"]:
                asked["system"] = first[0]["content"]
            elif first or last["role"] != "user":
                asked = {"messages": self.prompt}
        return {**head, **asked, "answer": self.answer, "complete": self.complete}


def is_answer_file(path: Path) -> bool:
    """Whether the name is one of JSON lines."""
    return path.name.endswith(SUFFIXES)


def record_path(path: Path) -> Path:
    """Where it is written what the answers of a file depend on, and how many there are of which kind."""
    return path.with_name(f"{path.name}.json")


def answered_by(path: Path) -> str:
    """The fingerprint of the target that gave a file's answers; empty where nobody says.

    Raises:
        ConfigError: the file's record cannot be read.
    """
    record = record_path(path)
    if not record.exists():
        return ""
    run = Fields.read(record, ConfigError, remedy="Remove it, or have the answers made anew.").fields("run", None)
    return "" if run is None else run.string("target", "")


def read_answers(path: Path) -> Iterator[Answered]:
    """The lines of a file.

    Raises:
        ConfigError: it cannot be read, or a line is not of this form; the message names file and line.
    """
    try:
        with gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open(encoding="utf-8") as lines:
            for record in read_records(lines, str(path)):
                yield _answered(record)
    except (OSError, EOFError, UnicodeDecodeError, zlib.error) as failure:
        raise ConfigError(f"{path} cannot be read: {failure}. Give JSON lines in UTF-8, gzipped or not.") from None


def holds_answers(path: Path) -> bool:
    """Whether the first line is of this form: folders hold prompts and measurements in JSON lines too."""
    try:
        return next(read_answers(path), None) is not None
    except ConfigError:
        return False


def _answered(record: Fields) -> Answered:
    forms = [form for form in _FORMS if form in record]
    if len(forms) != 1:
        found = " and ".join(forms) or "none of them"
        raise ConfigError(f"{record.place}: one of {', '.join(_FORMS)} must be there, but it holds {found}. {_REMEDY}")
    answer = record.string("answer", None)
    if answer is None and forms != ["text"]:
        raise ConfigError(
            f"{record.place}: there is no answer. Let `forerun train answers` have the target answer the prompts."
        )
    system = record.values.get("system", True)
    return Answered(
        record.string("kind", ""),
        record.number("temp", 0.0, low=0),
        _prompt(record, forms[0], system),
        answer,
        system is not False,
        record.flag("complete", False),
    )


def _prompt(record: Fields, form: str, system: object) -> str | list[dict[str, str]]:
    if form == "text":
        return record.string("text")
    if form == "messages":
        return [_message(record, number, value) for number, value in enumerate(record.list_of("messages", dict))]
    if not isinstance(system, (bool, str, type(None))):
        raise ConfigError(f"{record.place}: system must be true, false or a text. {_REMEDY}")
    user = {"role": "user", "content": record.string("prompt")}
    return [{"role": "system", "content": system}, user] if isinstance(system, str) else [user]


def _message(record: Fields, number: int, value: Mapping[str, Any]) -> dict[str, str]:
    message = Fields.of(value, f"{record.place}: messages[{number}]", ConfigError, remedy=_REMEDY, private=True)
    return {"role": message.string("role"), "content": message.string("content")}
