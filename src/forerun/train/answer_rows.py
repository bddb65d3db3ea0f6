"""From answers, and text that exists, to packed rows in the target's tokens."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from forerun.errors import ConfigError, PromptError
from forerun.files.write import digest, file_digest
from forerun.retrieval.sources import find_files, read_documents
from forerun.train.answer_file import Answered, is_answer_file, read_answers
from forerun.train.chat_text import ChatText
from forerun.train.corpus import hash_fraction
from forerun.train.packed import INDEX, PackedRows
from forerun.train.packing import Document, pack
from forerun.vocabulary import encode_text
from forerun.vocabulary.fingerprint import fingerprint

PROMPT_POSITIONS = 48
"""Positions of a prompt that are trained beside its answer: they cost little and add text of another kind."""
HELD_OUT_SHARE = 0.02
"""Share of the prompts that are never trained on."""


def pack_answers(
    sources: Path | Sequence[Path],
    tokenizer: Any,
    out: Path,
    *,
    name: str,
    vocab_size: int,
    window: int,
    prompt_positions: int = PROMPT_POSITIONS,
    held_out: float = HELD_OUT_SHARE,
    told: Callable[[str], None] = lambda line: None,
) -> PackedRows:
    """Pack files of answers, files of text and folders; rows that `out` holds of the same data are taken as they are.

    Args:
        sources: files of answers (.jsonl, .jsonl.gz), any other file as text, and folders of text or source.
        tokenizer: the target's, with its chat template.
        name: the target's, for messages.
        vocab_size: the target's.
        window: tokens of a row, less one.
        prompt_positions: see `PROMPT_POSITIONS`.
        held_out: share of prompts and texts that go to the held-out part, chosen by a hash.
        told: takes a line on what was left out.

    Raises:
        ConfigError: nothing usable, a broken line (file and line are named), or a full disk.
    """
    given = [sources] if isinstance(sources, Path) else sources
    files = find_files(given, remedy="Give files of answers, or files and folders of text.")
    chat = ChatText(tokenizer, name)
    made_from = {
        "tokenizer": fingerprint(tokenizer),
        "template": digest(str(getattr(tokenizer, "chat_template", None)).encode()),
        "data": _digest([path for path, _ in files]),
        "vocab_size": vocab_size,
        "window": window,
        "prompt_positions": prompt_positions,
        "held_out": held_out,
    }
    former = _former(out, made_from)
    if former is not None:
        return former
    documents = _Documents(chat, prompt_positions, held_out)
    rows = pack(
        (made for path, named in files for made in documents.of(path, named)),
        out,
        window=window,
        vocab_size=vocab_size,
        made_from=made_from,
    )
    if documents.num_left_out:
        told(f"{documents.num_left_out} lines or files left out: {documents.why}")
    return rows


class _Documents:
    """Documents of lines and texts, and a count of what had none.

    Attributes:
        num_left_out: lines that the template refused, and files that are no text.
        why: of the last of them.
    """

    def __init__(self, chat: ChatText, prompt_positions: int, held_out: float) -> None:
        self._chat, self._prompt_positions, self._held_out = chat, prompt_positions, held_out
        self.num_left_out, self.why = 0, ""

    def of(self, path: Path, named: bool) -> Iterator[Document]:
        """Of one file."""
        if is_answer_file(path):
            for line in read_answers(path):
                try:
                    document = self.line(line)
                except PromptError as error:
                    self._leave_out(str(error))
                    continue
                if len(document.tokens) > 1:
                    yield document
            return
        skipped: list[Path] = []
        for text in read_documents(path, named, "text", skipped):
            yield self._text(text.text)
        if skipped:
            self._leave_out(f"{path} is not UTF-8 text")

    def line(self, line: Answered) -> Document:
        """Of one line: of an answer all is wanted, of its prompt some positions."""
        if line.answer is None:
            return self._text(line.asked)
        prompt = self._chat.encode(line.prompt, system=line.system)
        answer = encode_text(self._chat.tokenizer, line.answer, special=False)
        if line.complete:
            answer.append(self._chat.end_token_id)
        some = range(1, len(prompt))
        chosen = set(random.Random(line.asked).sample(some, min(len(some), self._prompt_positions)))
        wanted = [place in chosen for place in range(len(prompt))] + [True] * len(answer)
        return Document([*prompt, *answer], wanted, hash_fraction(line.asked) < self._held_out)

    def _text(self, text: str) -> Document:
        tokens = encode_text(self._chat.tokenizer, text, special=True)
        return Document(tokens, [True] * len(tokens), hash_fraction(text) < self._held_out)

    def _leave_out(self, why: str) -> None:
        self.num_left_out, self.why = self.num_left_out + 1, why


def _former(out: Path, made_from: dict[str, Any]) -> PackedRows | None:
    """The rows that are there, if they are of the same data and sound."""
    if not (out / INDEX).is_file():
        return None
    try:
        rows = PackedRows(out)
    except ConfigError:
        return None
    return rows if rows.made_from == made_from else None


def _digest(files: Sequence[Path]) -> str:
    """Of the contents of files, in their order."""
    parts = []
    for path in files:
        try:
            with path.open("rb") as file:
                parts.append(file_digest(file))
        except OSError as failure:
            raise ConfigError(f"{path} cannot be read: {failure.strerror or failure}.") from None
    return digest("\n".join(parts).encode())
