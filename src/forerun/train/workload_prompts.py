"""The prompts of the bundled workloads, cut from the held-out files: code, prose, copying, and a high temperature.

A hash of the file's name decides which files are taken, where a prompt starts and how long it is, so that nobody picks
prompts that look good. A code prompt ends at the end of a line. A prompt of prose or of copying ends before the end of
its line: the tokenizer writes it and the next line's indentation as one token.
"""

from __future__ import annotations

import ast
import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace

from transformers import PreTrainedTokenizerBase

from forerun.train.augment import edited
from forerun.train.corpus import SourceFile, hash_fraction
from forerun.workloads import Case

PROMPTS_PER_FILE = 2
"""Code prompts cut from one file at most."""
MIN_PROMPT_TOKENS, MAX_PROMPT_TOKENS = 60, 400
REFERENCE_TOKENS = 256
"""Tokens of a code prompt's reference, the text that follows it in its file."""
PROMPTS_PER_WORKLOAD = 40
HIGH_TEMPERATURE = 1.5
MIN_PROSE_WORDS = 45
PROSE_PROMPT_LINES = 24
"""Lines before the place where a prose prompt ends, its docstring's lines included."""
SPAN_LINES = (20, 32)
SHOWN_LINES = 4
"""Lines of the second span that a copying prompt holds."""
MAX_LINE = 120
_WORD = re.compile(r"[A-Za-z]+[,.;:]?(?:\s|$)")


def code_prompts(files: Sequence[SourceFile], tokenizer: PreTrainedTokenizerBase) -> list[Case]:
    """Up to `PROMPTS_PER_FILE` prompts from every file long enough, in the order of a hash of name and number."""
    wanted = [(file, number) for file in files for number in range(PROMPTS_PER_FILE)]
    wanted.sort(key=lambda pair: hash_fraction(f"{pair[1]} of {pair[0].name}"))
    cut = [code_prompt(file, tokenizer, number) for file, number in wanted]
    return [prompt for prompt in cut if prompt is not None]


def code_prompt(file: SourceFile, tokenizer: PreTrainedTokenizerBase, number: int = 0) -> Case | None:
    """Prompt `number` of a file: 60 to 400 tokens ending at a line end, or None if the file is too short.

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


def prose_prompts(files: Sequence[SourceFile], limit: int = PROMPTS_PER_WORKLOAD) -> list[Case]:
    """Prompts that end a third into a long docstring, the longest of each file; at most one a file."""
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
        prompts.append(Case(file.name, shown, "\n".join(["", *copy[SHOWN_LINES:]])))
    return prompts[:limit]


def high_temperature_prompts(code: Sequence[Case], limit: int = PROMPTS_PER_WORKLOAD) -> list[Case]:
    """The last code prompts, to be sampled at a temperature where few tokens can be guessed."""
    return [replace(case, temperature=HIGH_TEMPERATURE) for case in code[-limit:]]


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


def _take(counts: Sequence[int], start: int, tokens: int) -> int:
    """The line before which about `tokens` tokens from line `start` on are taken (at least one line)."""
    size, end = 0, start
    while end < len(counts) and (end == start or size + counts[end] <= tokens):
        size += counts[end]
        end += 1
    return end


def _last_start(counts: Sequence[int], needed: int) -> int:
    """The last line after which at least `needed` tokens follow; 0 if the file is shorter."""
    following = 0
    for index in range(len(counts) - 1, -1, -1):
        following += counts[index]
        if following >= needed:
            return index
    return 0
