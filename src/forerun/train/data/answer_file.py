"""Answers in files, for training, and how a model's chat template writes messages.

A file holds JSON lines, gzipped where its name ends in .gz:

    {"kind": "translation", "temp": 0, "system": true, "prompt": "...", "answer": "...", "complete": true}

A line holds one of `prompt` (a user's message), `messages` (a chat) and `text` (raw text), and `answer`, which is the
target's. Without an answer, `text` is text that exists: the target's predictions are learnt at all of its tokens.
A template is a program; its effect is found by rendering messages that hold marks.
"""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from forerun.engine.chat_template import apply_template, encode
from forerun.errors import ConfigError
from forerun.train.accelerator import end_of_text
from forerun.utils.json_file import Fields
from forerun.utils.vocabulary import encode_text, special_tokens
from forerun.utils.workloads import read_records

SUFFIXES = (".jsonl", ".jsonl.gz")
_REMEDY = "Put the line right, or leave it out."
_FORMS = ("prompt", "messages", "text")


@dataclass(frozen=True, slots=True)
class AnswerLine:
    """One line.

    Attributes:
        kind: category of the prompt; empty if unknown.
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
    def prompt_text(self) -> str:
        """Return the prompt as one text: the messages of a chat, one after another."""
        if isinstance(self.prompt, str):
            return self.prompt
        return "\n".join(message["content"] for message in self.prompt)

    def record(self) -> dict[str, Any]:
        """Return the line's JSON object."""
        head: dict[str, Any] = {"kind": self.kind, "temp": self.temperature}
        if isinstance(self.prompt, str):
            prompt: dict[str, Any] = {"text": self.prompt}
        else:
            *first, last = self.prompt
            prompt = {"system": self.system, "prompt": last["content"]}
            if first and [message["role"] for message in first] == ["system"]:
                prompt["system"] = first[0]["content"]
            elif first or last["role"] != "user":
                prompt = {"messages": self.prompt}
        return {**head, **prompt, "answer": self.answer, "complete": self.complete}


def is_answer_file(path: Path) -> bool:
    """Return whether the name is one of JSON lines."""
    return path.name.endswith(SUFFIXES)


def record_path(path: Path) -> Path:
    """Return the path of a file's record: the inputs that its answers depend on, and counts by kind."""
    return path.with_name(f"{path.name}.json")


def answered_by(path: Path) -> str:
    """Return the fingerprint of the target that gave a file's answers; empty if unknown.

    Raises:
        ConfigError: the file's record cannot be read.
    """
    record = record_path(path)
    if not record.exists():
        return ""
    run = Fields.read(record, ConfigError, remedy="Remove it, or have the answers made anew.").fields("run", None)
    return "" if run is None else run.string("target", "")


def read_answers(path: Path) -> Iterator[AnswerLine]:
    """Read the lines of a file.

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
    """Return whether the first line is of this form: folders hold prompts and measurements in JSON lines too."""
    try:
        return next(read_answers(path), None) is not None
    except ConfigError:
        return False


def _answered(record: Fields) -> AnswerLine:
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
    return AnswerLine(
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


_SYSTEM, _USER = "QxSystemxQ", "QxUserxQ"
"""Marks that no template changes."""


class ChatText:
    """A tokenizer's chat template, and raw text where it has none.

    Args:
        name: the model's, for messages.
    """

    def __init__(self, tokenizer: Any, name: str) -> None:
        self.tokenizer = tokenizer
        self.name = name
        self.has_template = bool(getattr(tokenizer, "chat_template", None))

    def encode(self, prompt: str | Sequence[Mapping[str, str]], *, system: bool = True) -> list[int]:
        """Encode a raw text, or a chat that is to be answered.

        Args:
            system: the template may add a system message where the chat has none.

        Raises:
            PromptError: the template refuses the messages, or there is none.
        """
        if isinstance(prompt, str) or system or self.bare_opening is None or len(prompt) != 1:
            return encode(prompt if isinstance(prompt, str) else list(prompt), self.tokenizer, self.name)
        rendered = self._render([{"role": "user", "content": _USER}], answered=True)
        text = self.bare_opening + prompt[0]["content"] + rendered[rendered.index(_USER) + len(_USER) :]
        return encode_text(self.tokenizer, text, special=False)

    def user_opening(self, system: str | None) -> str:
        """Return the text before a user's first message, with this system message.

        Raises:
            ConfigError: the template shows no user's message.
        """
        messages = [{"role": "user", "content": _USER}]
        if system is not None and self._takes_system:
            messages.insert(0, {"role": "system", "content": system})
        opening, mark, _ = self._render(messages).partition(_USER)
        if not mark or not opening:
            raise ConfigError(f"The chat template of {self.name} does not show a user's message. Give prompts.")
        return opening

    @cached_property
    def closing(self) -> str:
        """Return the text between a message and the next; empty if unknown."""
        if not self.has_template:
            return ""
        return self._render([{"role": "user", "content": _USER}]).partition(_USER)[2]

    @cached_property
    def end_token_id(self) -> int:
        """Return the token that ends an answer.

        Raises:
            ConfigError: the tokenizer has none.
        """
        ids = encode_text(self.tokenizer, self.closing, special=False) if self.closing else []
        if ids and ids[0] in special_tokens(self.tokenizer).values():
            return ids[0]
        return end_of_text(self.tokenizer)

    @cached_property
    def bare_opening(self) -> str | None:
        """Return the text before a user's first message without a system message; None if unknown.

        Some templates always add a system message. The opening of the user's turn is then the text between a system
        message and the user's, without the closing of the former.
        """
        if not self._takes_system:
            return None
        messages = [{"role": "system", "content": _SYSTEM}, {"role": "user", "content": _USER}]
        before, _, rest = self._render(messages).partition(_SYSTEM)
        between = rest.partition(_USER)[0]
        if not self.closing or not between.startswith(self.closing):
            return None
        opening = between.removeprefix(self.closing)
        of_system = opening.replace("user", "system")
        return before.removesuffix(of_system) + opening if before.endswith(of_system) else None

    @cached_property
    def _takes_system(self) -> bool:
        """Return whether the template shows a system message before the user's."""
        if not self.has_template:
            return False
        messages = [{"role": "system", "content": _SYSTEM}, {"role": "user", "content": _USER}]
        try:
            text = self._render(messages)
        except Exception:  # a template may raise anything
            return False
        return 0 <= text.find(_SYSTEM) < text.find(_USER)

    def _render(self, messages: list[dict[str, str]], *, answered: bool = False) -> str:
        return apply_template(self.tokenizer, messages, add_generation_prompt=answered)
