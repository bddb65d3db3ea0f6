"""Prompts of several kinds, cut from the held-out files: prose, copying, and code at a high temperature.

As with the code prompts of `heldout`, a hash of the file's name decides whatever could be chosen. A prompt of prose or
of copying ends before the end of its line: the tokenizer writes it and the next line's indentation as one token.
"""

from __future__ import annotations

import ast
import json
import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from forerun.train.augment import edited
from forerun.train.corpus import SourceFile, hash_fraction
from forerun.train.heldout import CodePrompt

PROMPTS_PER_WORKLOAD = 40
HIGH_TEMPERATURE = 1.5
MIN_PROSE_WORDS = 45
PROSE_PROMPT_LINES = 24
"""Lines before the place where a prose prompt ends, the docstring's own among them."""
SPAN_LINES = (20, 32)
SHOWN_LINES = 4
"""Lines of the second span that a copying prompt holds."""
MAX_LINE = 120
_WORD = re.compile(r"[A-Za-z]+[,.;:]?(?:\s|$)")


@dataclass(frozen=True, slots=True)
class HotPrompt:
    """A code prompt that is to be sampled at `temperature`."""

    file: str
    prompt: str
    reference: str
    temperature: float


def prose_prompts(files: Sequence[SourceFile], limit: int = PROMPTS_PER_WORKLOAD) -> list[CodePrompt]:
    """Prompts that end a third into a long docstring, the longest of each file; at most one a file."""
    prompts = []
    for file in _in_order(files, "prose"):
        found = max(_docstrings(file.text), key=lambda each: each[2] - each[1], default=None)
        if found is None:
            continue
        lines, first, last = found
        cut = first + max(2, (last - first) // 3)
        prompt = "".join(lines[max(0, cut - PROSE_PROMPT_LINES) : cut]).removesuffix("\n")
        prompts.append(CodePrompt(file.name, prompt, "\n" + "".join(lines[cut:last])))
    return prompts[:limit]


def copying_prompts(files: Sequence[SourceFile], limit: int = PROMPTS_PER_WORKLOAD) -> list[CodePrompt]:
    """Prompts with a span of a file and the first lines of its copy, unchanged or edited; the copy goes on."""
    prompts = []
    for file in _in_order(files, "copying"):
        lines = file.text.split("\n")
        length = SPAN_LINES[0] + int(hash_fraction(f"span of {file.name}") * (SPAN_LINES[1] - SPAN_LINES[0]))
        if len(lines) < 2 * length:
            continue
        start = int(hash_fraction(f"copy in {file.name}") * (len(lines) - length))
        span = lines[start : start + length]
        if max(map(len, span)) > MAX_LINE or sum(not line.strip() for line in span) > length // 3:
            continue
        copy = edited(span, random.Random(f"copy of {file.name}"))
        shown = "\n".join([*span, "", *copy[:SHOWN_LINES]])
        prompts.append(CodePrompt(file.name, shown, "\n".join(["", *copy[SHOWN_LINES:]])))
    return prompts[:limit]


def high_temperature_prompts(code: Sequence[CodePrompt], limit: int = PROMPTS_PER_WORKLOAD) -> list[HotPrompt]:
    """Code prompts, to be sampled at a temperature where hardly anything can be guessed."""
    return [HotPrompt(each.file, each.prompt, each.reference, HIGH_TEMPERATURE) for each in code[-limit:]]


def write_workload(prompts: Sequence[CodePrompt | HotPrompt], path: Path) -> None:
    """One JSON object a line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(asdict(p), ensure_ascii=False) + "\n" for p in prompts), encoding="utf-8")


def _in_order(files: Sequence[SourceFile], kind: str) -> list[SourceFile]:
    return sorted(files, key=lambda file: hash_fraction(f"{kind} of {file.name}"))


def _docstrings(text: str) -> Iterator[tuple[list[str], int, int]]:
    """(lines of the file, first line and line after the last) of every docstring that is long prose."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError):
        return
    lines = text.splitlines(keepends=True)
    for node in ast.walk(tree):
        if not isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)) or not node.body:
            continue
        string = node.body[0]
        if not (isinstance(string, ast.Expr) and isinstance(string.value, ast.Constant)):
            continue
        value, last = string.value.value, string.end_lineno
        if isinstance(value, str) and last is not None and _is_prose(value):
            yield lines, string.lineno - 1, last


def _is_prose(text: str) -> bool:
    words = _WORD.findall(text)
    return (
        ">>>" not in text and len(words) >= MIN_PROSE_WORDS and sum(map(len, words)) > 0.6 * len(" ".join(text.split()))
    )
