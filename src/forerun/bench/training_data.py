"""Which prompts of a measurement stand in what its drafters were made from, as far as that can be told.

Of texts: OVERLAP_WORDS words in a row that both have. Of an index of a corpus: as many tokens in a row as it is sorted
by.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from forerun.bench.prompts import Request
from forerun.config import INDEX_DEPTH
from forerun.drafters.table import DRAFTERS
from forerun.drafters.text.rest import Rest
from forerun.engine import LLM
from forerun.errors import ConfigError
from forerun.results import DrafterFacts
from forerun.retrieval.sources import find_files
from forerun.workloads import Case, word_runs

_TRAINED = ("model", "head")
"""Kinds of drafters that are made from texts."""


def seen_cases(cases: Mapping[str, Sequence[Case]], sources: Sequence[Path]) -> set[str] | None:
    """The names of the cases that share OVERLAP_WORDS words in a row with a text of the sources; None without sources.

    sources: files of text or JSON lines, packed by gzip or not, and folders of texts.

    Raises:
        ConfigError: one of them cannot be read.
    """
    if not sources:
        return None
    owners: dict[tuple[str, ...], set[str]] = {}
    for case in (case for each in cases.values() for case in each):
        for text in case.texts:
            for run in word_runs(text):
                owners.setdefault(run, set()).add(case.name)
    found: set[str] = set()
    for path, _ in find_files(sources):
        for text in _texts(path):
            for run in word_runs(text):
                found |= owners.get(run, set())
    return found


def seen_in_index(rest: Rest, requests: Sequence[Request]) -> int:
    """How many of the prompts hold as many tokens in a row of the index's corpus as it is sorted by."""
    index, length = rest.index, min(INDEX_DEPTH, rest.index.header.depth)

    def is_seen(tokens: list[int]) -> bool:
        ends = range(length, len(tokens) + 1)
        return any(index.find(tokens[end - length : end], length, length) for end in ends)

    return sum(is_seen(request.token_ids) for request in requests)


def with_seen(
    drafters: Sequence[DrafterFacts],
    engines: Mapping[str, LLM],
    prompts: Mapping[str, Sequence[Request]],
    seen: set[str] | None,
) -> list[DrafterFacts]:
    """The drafters, with the number of prompts that they have seen.

    Args:
        engines: one of each drafter, in the same order.
        prompts: by workload.
        seen: names of cases that stand in the training data that was given; None where none was.
    """
    requests = [request for each in prompts.values() for request in each]
    found = []
    for facts, llm in zip(drafters, engines.values(), strict=True):
        if isinstance(llm.drafter, Rest):
            count = seen_in_index(llm.drafter, requests)
            facts = replace(facts, seen=count, seen_source=f"{INDEX_DEPTH} tokens in a row in its index")
        elif seen is not None and DRAFTERS[facts.name.partition(":")[0]].kind in _TRAINED:
            count = sum(request.name.partition(", turn ")[0] in seen for request in requests)
            facts = replace(facts, seen=count, seen_source="the training data given")
        found.append(facts)
    return found


def _texts(path: Path) -> Iterator[str]:
    opened = gzip.open if path.suffix == ".gz" else open
    name = path.name.removesuffix(".gz")
    try:
        with opened(path, "rt", encoding="utf-8", errors="replace") as file:
            if name.endswith(".jsonl"):
                for line in file:
                    yield from _strings(_value(line))
            else:
                yield file.read()
    except (OSError, EOFError, zlib.error) as error:
        raise ConfigError(
            f"--training-data has {path}, which cannot be read: {error}. Give texts or JSON lines."
        ) from None


def _value(line: str) -> object:
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return line


def _strings(value: object) -> Iterator[str]:
    """All texts in a value of JSON."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        for each in value:
            yield from _strings(each)
