"""The held-out files, and the prompts of the bundled workloads cut from them: code, prose, copying, a high temperature.

A hash of the file's name decides which files are taken, where a prompt starts and how long it is, so that prompts are
not picked by hand. A code prompt ends at the end of a line. A prompt of prose or of copying ends before the end of
its line: the tokenizer writes it and the next line's indentation as one token.
"""

from __future__ import annotations

import ast
import lzma
import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from forerun.train.corpus import SourceFile, hash_fraction, is_generated
from forerun.train.data.answer_prompts import code_prompt
from forerun.utils.workloads import Case, written
from tools.text import edited

PROMPTS_PER_FILE = 2
"""Code prompts cut from one file at most."""
PROMPTS_PER_WORKLOAD = 40
HIGH_TEMPERATURE = 1.5
MIN_PROSE_WORDS = 45
PROSE_PROMPT_LINES = 24
"""Lines of a prose prompt before its end, its docstring's lines included."""
SPAN_LINES = (20, 32)
SHOWN_LINES = 4
"""Lines of the second span that a copying prompt holds."""
MAX_LINE = 120
MAX_BYTES = 1_500_000
"""Of the held-out files' text."""
_WORD = re.compile(r"[A-Za-z]+[,.;:]?(?:\s|$)")


def code_prompts(files: Sequence[SourceFile], tokenizer: PreTrainedTokenizerBase) -> list[Case]:
    """Cut up to `PROMPTS_PER_FILE` prompts from every file long enough, in the order of a hash of name and number."""
    wanted = [(file, number) for file in files for number in range(PROMPTS_PER_FILE)]
    wanted.sort(key=lambda pair: hash_fraction(f"{pair[1]} of {pair[0].name}"))
    cut = [code_prompt(file, tokenizer, number) for file, number in wanted]
    return [prompt for prompt in cut if prompt is not None]


def prose_prompts(files: Sequence[SourceFile], limit: int = PROMPTS_PER_WORKLOAD) -> list[Case]:
    """Cut prompts that end a third into a long docstring, the longest of each file; at most one a file."""
    prompts = []
    for file in _in_order(files, "prose"):
        found = max(_docstrings(file.text), key=lambda each: each[2] - each[1], default=None)
        if found is None:
            continue
        lines, first, last = found
        cut = first + max(2, (last - first) // 3)
        prompt = "".join(lines[max(0, cut - PROSE_PROMPT_LINES) : cut]).removesuffix("\n")
        prompts.append(Case(file.name, prompt, "\n" + "".join(lines[cut:last])))
    return prompts[:limit]


def copying_prompts(files: Sequence[SourceFile], limit: int = PROMPTS_PER_WORKLOAD) -> list[Case]:
    """Cut prompts with a span of a file and the first lines of its copy, unchanged or edited; the copy goes on."""
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
        prompts.append(Case(file.name, shown, "\n".join(["", *copy[SHOWN_LINES:]])))
    return prompts[:limit]


def high_temperature_prompts(code: Sequence[Case], limit: int = PROMPTS_PER_WORKLOAD) -> list[Case]:
    """Return the last code prompts with a temperature at which few tokens are predictable."""
    return [replace(case, temperature=HIGH_TEMPERATURE) for case in code[-limit:]]


def _in_order(files: Sequence[SourceFile], kind: str) -> list[SourceFile]:
    return sorted(files, key=lambda file: hash_fraction(f"{kind} of {file.name}"))


def _docstrings(text: str) -> Iterator[tuple[list[str], int, int]]:
    """Yield (lines of the file, first line and line after the last) of every docstring that is long prose."""
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


def write_held_out(files: Sequence[SourceFile], path: Path) -> int:
    """Write held-out files in the order of their hashes until MAX_BYTES of text; returns how many.

    Files that say they were generated (codec tables) are left out: they are too easy to measure on.
    The bytes written depend on the files alone (no time stamp).
    """
    records: list[dict[str, str]] = []
    size = 0
    for file in sorted(files, key=lambda file: hash_fraction(file.name)):
        if is_generated(file.text):
            continue
        size += len(file.text.encode("utf-8"))
        if size > MAX_BYTES:
            break
        records.append({"file": file.name, "text": file.text})
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(lzma.compress(written(records).encode("utf-8"), preset=9 | lzma.PRESET_EXTREME))
    return len(records)
