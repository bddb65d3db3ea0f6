"""Prompts that a user gives: JSON lines with prompts, chats or turns; for raw text, pieces of files."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from forerun.errors import ConfigError
from forerun.train.corpus import (
    SourceFile,
    hash_fraction,
    is_generated,
    read_python_files,
    split,
    standard_library_root,
)
from forerun.utils import workloads
from forerun.utils.files import digest, file_digest
from forerun.utils.text_files import find_files, read_documents
from forerun.utils.workloads import Case, word_runs

_PROMPTS = ".jsonl"
GIVEN = "given"
"""Kind of prompts that are given without a category."""
CUT = "text"
"""Kind of prompts that are cut from text."""
MIN_PROMPT_TOKENS = 60
MAX_PROMPT_TOKENS = 400
REFERENCE_TOKENS = 256
"""Tokens of a code prompt's reference, the text that follows it in its file."""


class Overlap:
    """The set of runs of 13 words of the prompts of workloads.

    Args:
        evaluation: workloads beside the bundled ones, and paths of JSONL files with prompts.

    Attributes:
        num_prompts: how many prompts there are.

    Raises:
        ConfigError: there is no such workload, or it cannot be read.
    """

    def __init__(self, evaluation: Sequence[str]) -> None:
        cases = [
            case
            for workload in [*workloads.bundled_workloads(), *evaluation]
            for case in workloads.load_workload(workload)
        ]
        self.num_prompts = len(cases)
        self._runs = {run for case in cases for text in case.texts for run in word_runs(text)}

    def __contains__(self, text: str) -> bool:
        """Return whether a text shares 13 words in a row with one of the prompts."""
        return any(run in self._runs for run in word_runs(text))


def split_by_kind(data: Sequence[Path]) -> tuple[list[Path], list[Path]]:
    """Split into (files of prompts, files and folders of text or source)."""
    prompts = [path for path in data if path.suffix == _PROMPTS]
    return prompts, [path for path in data if path.suffix != _PROMPTS]


def read_prompts(files: Sequence[Path], *, chat: bool) -> list[Case]:
    """Read the prompts of files, each once.

    Args:
        chat: the target has a chat template: a raw prompt is a user's message.

    Raises:
        ConfigError: a file cannot be read, or a line of it (file and line are named).
    """
    found: dict[object, Case] = {}
    for path in files:
        for case in workloads.load_workload(str(path)):
            if chat and case.prompt:
                case = replace(case, prompt="", messages=({"role": "user", "content": case.prompt},))
            key = case.prompt, tuple(tuple(message.items()) for message in case.messages), case.turns
            found.setdefault(key, replace(case, category=case.category or GIVEN))
    return list(found.values())


def cut_prompts(sources: Sequence[Path], tokenizer: Any, count: int) -> list[Case]:
    """Cut up to `count` prompts of 60 to 400 tokens, ending at line ends of files, in the order of a hash.

    Without sources, of the standard library's files that are not held out.

    Raises:
        ConfigError: a source does not exist or cannot be read.
    """
    if sources:
        paths = find_files(sources, remedy="Give files or folders of text or source.")
        read = (document for path, named in paths for document in read_documents(path, named, "text", []))
        files = [SourceFile(document.name, document.text) for document in read]
    else:
        training, _ = split(read_python_files(standard_library_root()))
        files = [file for file in training if not is_generated(file.text)]
    cases: list[Case] = []
    number = 0
    while len(cases) < count:
        ordered = sorted(files, key=lambda file: hash_fraction(f"{number} of {file.name}"))
        found = 0
        for file in ordered:
            case = code_prompt(file, tokenizer, number) if len(cases) < count else None
            if case is not None:
                cases.append(replace(case, reference="", category=CUT))
                found += 1
        if not found:
            break
        number += 1
    return cases


def code_prompt(file: SourceFile, tokenizer: Any, number: int = 0) -> Case | None:
    """Cut prompt `number` of a file: 60 to 400 tokens ending at a line end, or None if the file is too short.

    A second prompt and more are only cut from files long enough for all of them not to crowd.
    """
    lines = file.text.splitlines(keepends=True)
    counts = [len(ids) for ids in tokenizer(lines, verbose=False)["input_ids"]] if lines else []
    if number > 0 and sum(counts) < (number + 1) * 2 * (MAX_PROMPT_TOKENS + REFERENCE_TOKENS):
        return None
    spread = MAX_PROMPT_TOKENS - MIN_PROMPT_TOKENS
    wanted = MIN_PROMPT_TOKENS + int(hash_fraction(f"length {number} of {file.name}") * spread)
    last_start = _last_start(counts, wanted + REFERENCE_TOKENS)
    start = int(hash_fraction(f"start {number} in {file.name}") * (last_start + 1))
    end = _take(counts, start, wanted)
    prompt = "".join(lines[start:end])
    size = len(tokenizer(prompt, verbose=False)["input_ids"])
    if not MIN_PROMPT_TOKENS <= size <= MAX_PROMPT_TOKENS or end >= len(lines):
        return None
    return Case(file.name, prompt, "".join(lines[end : _take(counts, end, REFERENCE_TOKENS)]))


def _take(counts: Sequence[int], start: int, tokens: int) -> int:
    """Return the line before which about `tokens` tokens from line `start` on are taken (at least one line)."""
    size = 0
    end = start
    while end < len(counts) and (end == start or size + counts[end] <= tokens):
        size += counts[end]
        end += 1
    return end


def _last_start(counts: Sequence[int], needed: int) -> int:
    """Return the last line after which at least `needed` tokens follow; 0 if the file is shorter."""
    following = 0
    for index in range(len(counts) - 1, -1, -1):
        following += counts[index]
        if following >= needed:
            return index
    return 0


def files_digest(files: Iterable[Path]) -> str:
    """Digest the contents of files, in their order. Raises ConfigError where one cannot be read."""
    parts = []
    for path in files:
        try:
            with path.open("rb") as file:
                parts.append(file_digest(file))
        except OSError as failure:
            raise ConfigError(f"{path} cannot be read: {failure.strerror or failure}. Give another one.") from None
    return digest("\n".join(parts).encode())
