"""Prompts as a user gives them: JSON lines with prompts, chats or turns; for raw text, pieces of files."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from forerun import workloads
from forerun.errors import ConfigError
from forerun.files.write import digest, file_digest
from forerun.retrieval.sources import find_files, read_documents
from forerun.train.corpus import (
    SourceFile,
    hash_fraction,
    is_generated,
    read_python_files,
    split,
    standard_library_root,
)
from forerun.train.workload_prompts import code_prompt
from forerun.workloads import Case

_PROMPTS = ".jsonl"
GIVEN = "given"
"""Kind of prompts that are given without a category."""
CUT = "text"
"""Kind of prompts that are cut from text."""


def parted(data: Sequence[Path]) -> tuple[list[Path], list[Path]]:
    """(files of prompts, everything else: files and folders of text or source)."""
    prompts = [path for path in data if path.suffix == _PROMPTS]
    return prompts, [path for path in data if path.suffix != _PROMPTS]


def read_prompts(files: Sequence[Path], *, chat: bool) -> list[Case]:
    """The prompts of files, each once.

    Args:
        chat: the target has a chat template: a raw prompt is a user's message.

    Raises:
        ConfigError: a file cannot be read, or a line of it (file and line are named).
    """
    found: dict[object, Case] = {}
    for path in files:
        for case in workloads.load(str(path)):
            if chat and case.prompt:
                case = replace(case, prompt="", messages=({"role": "user", "content": case.prompt},))
            asked = case.prompt, tuple(tuple(message.items()) for message in case.messages), case.turns
            found.setdefault(asked, replace(case, category=case.category or GIVEN))
    return list(found.values())


def cut_prompts(sources: Sequence[Path], tokenizer: Any, count: int) -> list[Case]:
    """Up to `count` prompts of 60 to 400 tokens, cut at line ends from files, in the order of a hash.

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


def files_digest(files: Iterable[Path]) -> str:
    """Of the contents of files, in their order. Raises ConfigError where one cannot be read."""
    parts = []
    for path in files:
        try:
            with path.open("rb") as file:
                parts.append(file_digest(file))
        except OSError as failure:
            raise ConfigError(f"{path} cannot be read: {failure.strerror or failure}. Give another one.") from None
    return digest("\n".join(parts).encode())
