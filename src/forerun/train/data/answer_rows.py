"""The packing of answers and of existing text into rows of the target's tokens."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from forerun.drafters.models.heads.fingerprint import FingerprintedTarget, same_target, target_fingerprint
from forerun.errors import ConfigError, PromptError
from forerun.models import find_tokenizer
from forerun.train.corpus import hash_fraction
from forerun.train.data.answer_file import (
    SUFFIXES,
    AnswerLine,
    ChatText,
    answered_by,
    holds_answers,
    is_answer_file,
    read_answers,
)
from forerun.train.data.answer_prompts import Overlap, files_digest
from forerun.train.data.packed import INDEX, PackedDocument, PackedShard, pack
from forerun.utils.files import digest
from forerun.utils.text_files import TEXT_PATTERNS, find_files, read_documents
from forerun.utils.vocabulary import encode_text, fingerprint
from forerun.utils.workloads import OVERLAP_WORDS

PROMPT_POSITIONS = 48
"""Positions of a prompt that are trained beside its answer: cheap, and text of another kind."""
HELD_OUT_SHARE = 0.02
"""Share of the prompts that are never trained on."""
_REMEDY = "Give files or folders of answers or text."
OVERLAP = f"{OVERLAP_WORDS} words in a row of prompts for evaluation"
_PATTERNS = (*(f"*{suffix}" for suffix in SUFFIXES), *TEXT_PATTERNS)
"""Patterns of files that are read from a folder."""


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
    evaluation: Sequence[str] = (),
    target: str = "",
    report: Callable[[str], None] = lambda line: None,
) -> PackedShard:
    """Pack files of answers, files of text and folders; rows that `out` holds of the same data are taken as they are.

    Args:
        sources: files of answers (.jsonl, .jsonl.gz), any other file as text, and folders of answers, text or source.
        tokenizer, name, vocab_size: the target's; the name is for messages.
        window: tokens of a row, less one.
        held_out: share of prompts and texts that go to the held-out part, chosen by a hash; where that is none of two
            or more, one of them.
        evaluation: workloads beside the bundled ones; what shares 13 words in a row with their prompts is left out.
        target: its fingerprint, which answers of another target lack.
        report: receives lines for the user.

    Raises:
        ConfigError: nothing usable, a broken line (file and line are named), or a full disk.
    """
    files = find_files([sources] if isinstance(sources, Path) else sources, _PATTERNS, remedy=_REMEDY)
    made_from = {
        "tokenizer": fingerprint(tokenizer),
        "template": digest(str(getattr(tokenizer, "chat_template", None)).encode()),
        "data": files_digest(path for path, _ in files),
        "vocab_size": vocab_size,
        "window": window,
        "prompt_positions": prompt_positions,
        "held_out": held_out,
        "evaluation": sorted(evaluation),
    }
    _report_foreign_answers(files, target, name, report)
    former = _former(out, made_from)
    if former is not None:
        return former
    documents = _Documents(files, ChatText(tokenizer, name), prompt_positions, held_out, Overlap(evaluation))
    size = {"window": window, "vocab_size": vocab_size}
    rows = pack(documents.all(), out, **size, made_from=made_from)
    if held_out and not len(rows.held_out()) and len(documents.lowest) > 1:
        rows = pack(documents.all(), out, **size, made_from=made_from)  # few, all above the share: one is held out
    for why, times in documents.left_out.most_common():
        report(f"{times:,} lines or texts left out: {why}")
    report(f"{rows.num_documents:,} documents of {rows.num_tokens:,} tokens in {len(rows):,} rows of {window:,}")
    return rows


def _report_foreign_answers(
    files: Sequence[tuple[Path, bool]], target: str, name: str, report: Callable[[str], None]
) -> None:
    for path, _ in files:
        answerer = answered_by(path) if target and is_answer_file(path) else ""
        if answerer and not same_target(answerer, target):
            report(f"{path}: another target than {name} gave these answers; a drafter learns less of them")


class _Documents:
    """Makes documents of lines and texts, and counts those that it leaves out.

    Attributes:
        left_out: why -> how many lines and texts, the last time that all were made.
        lowest: up to two hashes of prompts and texts, the lowest ones that differ.
    """

    def __init__(
        self,
        files: Sequence[tuple[Path, bool]],
        chat: ChatText,
        prompt_positions: int,
        held_out: float,
        overlap: Overlap,
    ) -> None:
        self._files = files
        self._chat = chat
        self._prompt_positions = prompt_positions
        self._held_out = held_out
        self._overlap = overlap
        self.left_out: Counter[str] = Counter({OVERLAP: 0})
        self.lowest: list[float] = []

    def all(self) -> Iterator[PackedDocument]:
        """Make all documents; the second time, the one of the lowest hash is held out, whatever the share."""
        if len(self.lowest) > 1:
            self._held_out = max(self._held_out, self.lowest[1])
        self.left_out = Counter({OVERLAP: 0})
        for path, named in self._files:
            yield from self.of(path, named)

    def of(self, path: Path, named: bool) -> Iterator[PackedDocument]:
        """Make the documents of one file. named: by the user; other files of a folder may hold something else."""
        if not named and is_answer_file(path) and not holds_answers(path):
            self.left_out["files without answers"] += 1
            return
        skipped: list[Path] = []
        texts = () if is_answer_file(path) else read_documents(path, named, "text", skipped)
        lines = read_answers(path) if is_answer_file(path) else (AnswerLine("", 0, each.text, None) for each in texts)
        for line in lines:
            if line.prompt_text in self._overlap or (line.answer or "") in self._overlap:
                self.left_out[OVERLAP] += 1
                continue
            try:
                document = self._line(line)
            except PromptError as error:
                self.left_out[str(error)] += 1
                continue
            if len(document.tokens) > 1:
                yield document
        if skipped:
            self.left_out["not UTF-8"] += len(skipped)

    def _line(self, line: AnswerLine) -> PackedDocument:
        """Make a document: all of an answer is wanted, and some positions of its prompt; of existing text, all."""
        fraction = hash_fraction(line.prompt_text)
        self.lowest = sorted({*self.lowest, fraction})[:2]
        held_out = fraction < self._held_out
        tokenizer = self._chat.tokenizer
        if line.answer is None:
            tokens = encode_text(tokenizer, line.prompt_text, special=True)
            return PackedDocument(tokens, [True] * len(tokens), held_out)
        prompt = self._chat.encode(line.prompt, system=line.system)
        answer = encode_text(tokenizer, line.answer, special=False)
        if line.complete:
            answer.append(self._chat.end_token_id)
        some = range(1, len(prompt))
        chosen = set(random.Random(line.prompt_text).sample(some, min(len(some), self._prompt_positions)))
        wanted = [position in chosen for position in range(len(prompt))] + [True] * len(answer)
        return PackedDocument([*prompt, *answer], wanted, held_out)


def _former(out: Path, made_from: dict[str, Any]) -> PackedShard | None:
    """Return the rows in `out`, if they are of the same data and sound."""
    if not (out / INDEX).is_file():
        return None
    try:
        rows = PackedShard(out)
    except ConfigError:
        return None
    return rows if rows.made_from == made_from else None


def target_tokenizer(target: str) -> Any:
    """Load the tokenizer of a target. Raises ConfigError where it has none."""
    tokenizer = find_tokenizer(target)
    if tokenizer is None:
        raise ConfigError(f"{target} has no tokenizer, by which text becomes tokens. Give the folder of a whole model.")
    return tokenizer


def read_rows(
    data: Path, target: FingerprintedTarget, tokenizer: Any, packed: Path, window: int, console: Console
) -> PackedShard:
    """Open a folder of packed rows; files of answers, texts and folders of them are packed first.

    Args:
        packed: the folder for rows that are packed here, which are reused if they are of the same data.
        window: tokens of such a row.

    Raises:
        ConfigError: nothing usable is there, or it is of another tokenizer.
    """
    if not (data / INDEX).is_file():
        rows = pack_answers(
            data,
            tokenizer,
            packed,
            name=target.name,
            vocab_size=target.vocab_size,
            window=window,
            target=target_fingerprint(target),
            report=lambda line: console.print(line, highlight=False),
        )
        _report_nothing_held_out(rows, console)
        return rows
    rows = PackedShard(data)
    _report_nothing_held_out(rows, console)
    of_rows = rows.made_from.get("tokenizer")
    of_target = fingerprint(tokenizer)
    if of_rows != of_target or rows.vocab_size != target.vocab_size:
        raise ConfigError(
            f"{data} was packed with another tokenizer than that of {target.name}: fingerprint {of_rows} and "
            f"{rows.vocab_size:,} tokens, not {of_target} and {target.vocab_size:,}. Pack the answers anew."
        )
    return rows


def _report_nothing_held_out(rows: PackedShard, console: Console) -> None:
    """Print that the result cannot be judged, where that is so, before time is spent on it."""
    if not len(rows.held_out()):
        console.print(
            f"nothing is held out, so that what is learnt cannot be judged: the data holds {rows.num_documents:,} "
            "documents. Give two or more with different prompts or texts; fifty answers or more judge well.",
            highlight=False,
            soft_wrap=True,
        )
