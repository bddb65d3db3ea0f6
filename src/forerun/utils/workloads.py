"""Workloads: prompts as JSON lines, bundled ones and a user's files.

A line holds one of "prompt" (raw text), "messages" (a chat, each message with "role" and "content"), "turns" (user
messages put one after another, the model's answers between them) and "question" (one such turn). It may hold "category"
(prompts of one category are reported together), "id", "question_id", "task_id" or "file" (the prompt's name or
source), "reference" or "canonical_solution" (the text that follows the prompt in its file) and "temperature" (at which
the prompt is to be sampled). So the question files of MT-bench and Spec-Bench are workloads, and HumanEval's problems
and GSM8K's questions too. Lists of reference answers, one a turn, and GSM8K's answers are for judges and are not read.
A file may be packed by gzip (.gz).
"""

from __future__ import annotations

import gzip
import json
import re
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from forerun.config import ASSETS
from forerun.errors import ConfigError
from forerun.utils.files import write_bytes
from forerun.utils.json_file import Fields

WORKLOADS = ASSETS / "workloads"
"""Folder of the bundled workloads."""
_SUFFIXES = (".jsonl", ".jsonl.gz")
"""Of their files."""
EVERYDAY = ("coding", "editing", "extraction", "chat")
"""Categories of the bundled questions that assistants are asked daily; extraction is what a given text says."""
OVERLAP_WORDS = 13
"""Words in a row that prompts and training texts may share by chance at most."""
_WORD = re.compile(r"\w+")
_REMEDY = 'Put the line right: one JSON object with its texts as strings, such as {"prompt": "Why is the sky blue?"}.'
_FORMS = ("prompt", "messages", "turns", "question")
_SAVED = _FORMS[:3]
_ASSISTANT = "assistant"


@dataclass(frozen=True, slots=True)
class Case:
    """One prompt of a workload: a text, a chat, or turns. Two of `prompt`, `messages` and `turns` are empty.

    Attributes:
        name: its id, the file that it was cut from, or its line.
        prompt: the text that the model is given, raw.
        reference: the text that followed the prompt in its file; empty if unknown.
        temperature: the temperature to sample it at; None leaves that to the measurement.
        messages: a chat, each message with "role" and "content"; the last is to be answered.
        turns: user messages put one after another, the model's answers between them.
        category: cases of one category are reported together; empty if it has none.
    """

    name: str
    prompt: str = ""
    reference: str = ""
    temperature: float | None = None
    messages: tuple[Mapping[str, str], ...] = ()
    turns: tuple[str, ...] = ()
    category: str = ""

    @property
    def is_chat(self) -> bool:
        """Return whether the case needs a chat template."""
        return bool(self.messages or self.turns)

    @property
    def texts(self) -> tuple[str, ...]:
        """Return all texts that the case gives to the model."""
        return (self.prompt, *(message["content"] for message in self.messages), *self.turns)

    @property
    def opening(self) -> str | list[dict[str, str]]:
        """Return the first prompt, as `LLM.generate` takes it: the text, the chat, or the first turn."""
        if self.turns:
            return [{"role": "user", "content": self.turns[0]}]
        return [dict(message) for message in self.messages] or self.prompt


def bundled_workloads() -> list[str]:
    """Return the names of the bundled workloads."""
    return sorted(path.name.partition(".jsonl")[0] for path in WORKLOADS.glob("*.jsonl*"))


def load_workload(workload: str, limit: int | None = None) -> list[Case]:
    """Load the first `limit` cases of a bundled workload, or of a JSONL file with a prompt, chat or turns on each line.

    Raises:
        ConfigError: there is no such workload, or a line of it cannot be read.
    """
    bundled = (WORKLOADS / f"{workload}{suffix}" for suffix in _SUFFIXES)
    path = next((path for path in bundled if path.is_file()), Path(workload))
    if not path.is_file():
        raise ConfigError(
            f"There is no workload and no file {workload!r}. Give one of "
            f"{', '.join(bundled_workloads()) or 'none bundled'}, or the path of a JSONL file with a prompt, messages "
            "or turns on every line."
        )
    try:
        with (gzip.open if path.suffix == ".gz" else open)(path, "rt", encoding="utf-8-sig") as lines:
            cases = [_case(record) for record in islice(read_records(lines, path.name), limit)]
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise ConfigError(f"The workload {path} cannot be read: {error}. Give a JSONL file in UTF-8.") from None
    if not cases:
        raise ConfigError(
            f"{path} holds no prompts. Put one JSON object with a prompt, messages or turns on each line."
        )
    return cases


def save_workload(cases: Sequence[Case], path: Path) -> None:
    """Write cases so that `load_workload` reads them; the folder is made if it is missing."""
    records = []
    for case in cases:
        forms = {form: held for form in _SAVED if (held := getattr(case, form))}
        record: dict[str, Any] = {"file": case.name, **forms, "reference": case.reference}
        optional = {"temperature": case.temperature, "category": case.category or None}
        records.append(record | {key: value for key, value in optional.items() if value is not None})
    write_bytes(path, written(records).encode(), error=ConfigError)


def categories_in_turn(cases: Sequence[Case]) -> list[Case]:
    """Return the first case of each category, the second of each, and so on; without categories, all in their order."""
    seen: dict[str, int] = {}
    ranked = []
    for case in cases:
        ranked.append((seen.get(case.category, 0), case))
        seen[case.category] = ranked[-1][0] + 1
    return [case for _, case in sorted(ranked, key=lambda each: each[0])]


def everyday_questions() -> list[Case]:
    """Return the bundled questions of EVERYDAY categories in turn, in this order."""
    cases = [case for case in load_workload("questions") if case.category in EVERYDAY]
    return categories_in_turn(sorted(cases, key=lambda case: EVERYDAY.index(case.category)))


def word_runs(text: str) -> Iterator[tuple[str, ...]]:
    """Return every run of OVERLAP_WORDS words, by which the same text is found in two files."""
    words = _WORD.findall(text.lower())
    return (tuple(words[start : start + OVERLAP_WORDS]) for start in range(len(words) - OVERLAP_WORDS + 1))


def temperatures(cases: Sequence[Case]) -> list[float]:
    """Return the temperatures of the cases, in ascending order; empty if they have none."""
    return sorted({case.temperature for case in cases if case.temperature is not None})


def read_records(lines: Iterable[str], file_name: str) -> Iterator[Fields]:
    """Yield the object of every line that is not blank; its place is FILE:LINE.

    Raises:
        ConfigError: a line is not a JSON object; the message names the file and the line, and shows nothing of it.
    """
    for number, line in enumerate(lines, 1):
        if line.strip():
            yield Fields.parse(line.strip(), f"{file_name}:{number}", ConfigError, remedy=_REMEDY, private=True)


def written(records: Iterable[dict[str, Any]]) -> str:
    """Return the records as JSON lines."""
    return "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records)


def _case(record: Fields) -> Case:
    forms = [form for form in _FORMS if form in record]
    if len(forms) != 1:
        found = " and ".join(forms) or "none of them"
        raise ConfigError(f"{record.place}: one of {', '.join(_FORMS)} must be there, but it holds {found}. {_REMEDY}")
    if not record.values[forms[0]]:
        raise ConfigError(f"{record.place}: {forms[0]} is empty. {_REMEDY}")
    has_answers = "turns" in record and isinstance(record.values.get("reference"), list)
    return Case(
        _name(record),
        record.string("prompt", ""),
        "" if has_answers else record.string("reference", "") or record.string("canonical_solution", ""),
        record.number("temperature", None, low=0),
        _messages(record),
        _turns(record),
        record.string("category", ""),
    )


def _name(record: Fields) -> str:
    """Return the name of a case; its line where it has none."""
    number = record.values.get("question_id")
    if isinstance(number, int) and not isinstance(number, bool):
        return f"question {number}"
    names = [record.string(key, "") for key in ("id", "question_id", "task_id", "file")]
    return next(filter(None, names), record.place)


def _messages(record: Fields) -> tuple[Mapping[str, str], ...]:
    """Check the chat message by message. Raises ConfigError."""
    messages: list[Mapping[str, str]] = []
    for number, value in enumerate(record.list_of("messages", dict, [])):
        message = Fields.of(value, f"{record.place}: messages[{number}]", ConfigError, remedy=_REMEDY, private=True)
        messages.append({"role": message.string("role"), "content": message.string("content")})
    if messages and messages[-1]["role"] == _ASSISTANT:
        raise ConfigError(
            f"{record.place}: the last of the messages is the model's own, so none is left to "
            "answer. Leave it out, or add a message of the user's."
        )
    return tuple(messages)


def _turns(record: Fields) -> tuple[str, ...]:
    """Check the user's messages. Raises ConfigError."""
    turns = (record.string("question"),) if "question" in record else tuple(record.list_of("turns", str, []))
    if not all(turns):
        raise ConfigError(f"{record.place}: one of the turns is empty. {_REMEDY}")
    return turns
