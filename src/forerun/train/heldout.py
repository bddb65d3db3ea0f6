"""The held-out files as they ship, and the prompts cut from them.

Everything that could be chosen (which files, where a prompt starts, how long it is) is decided by a
hash of the file's name: nobody picked the prompts that look good.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from forerun.config import ASSETS
from forerun.errors import ConfigError
from forerun.train.corpus import SourceFile, hash_fraction, is_generated

HELD_OUT_FILE = ASSETS / "heldout.jsonl.gz"
PROMPTS_FILE = ASSETS / "workloads" / "code.jsonl"
HELD_OUT_CORPUS = "Python source of the standard library of CPython 3.11.7"
"""What the held-out files that ship were held out from."""
MAX_BYTES = 1_500_000
PROMPTS_PER_FILE = 2
MIN_PROMPT_TOKENS, MAX_PROMPT_TOKENS = 60, 400
REFERENCE_TOKENS = 256
"""How much of what really follows is kept beside a prompt."""


@dataclass(frozen=True, slots=True)
class CodePrompt:
    """The end of `prompt` is a line end of `file`; `reference` is how the file goes on."""

    file: str
    prompt: str
    reference: str


def write_held_out(files: Sequence[SourceFile], path: Path, max_bytes: int = MAX_BYTES) -> int:
    """Write held-out files in the order of their hashes until `max_bytes` of text; returns how many.

    Files that say they were generated (codec tables) are left out: they are too easy to measure on.
    The bytes written depend on the files alone (no time stamp).
    """
    lines: list[str] = []
    size = 0
    for file in sorted(files, key=lambda file: hash_fraction(file.name)):
        if is_generated(file.text):
            continue
        size += len(file.text.encode("utf-8"))
        if size > max_bytes:
            break
        lines.append(json.dumps({"file": file.name, "text": file.text}, ensure_ascii=False) + "\n")
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as raw, gzip.GzipFile(filename="", mode="wb", fileobj=raw, mtime=0) as packed:
        packed.write("".join(lines).encode("utf-8"))
    return len(lines)


def read_held_out(path: Path = HELD_OUT_FILE) -> list[SourceFile]:
    """The files `write_held_out` wrote.

    Raises:
        ConfigError: `path` is missing or is not such a file.
    """
    try:
        with gzip.open(path, "rt", encoding="utf-8") as packed:
            rows = [json.loads(line) for line in packed]
        return [SourceFile(row["file"], row["text"]) for row in rows]
    except (OSError, ValueError, KeyError, EOFError) as error:
        raise ConfigError(
            f"{path} cannot be read as held-out files ({error}). "
            "Give a gzipped JSON-lines file with `file` and `text` in every line."
        ) from error


def holds_out_the_same(files: Sequence[SourceFile]) -> bool:
    """Whether `files` hold every file that ships, unchanged: then they come from the same corpus."""
    return set(read_held_out()) <= set(files)


def cut_prompt(file: SourceFile, tokenizer: PreTrainedTokenizerBase, number: int = 0) -> CodePrompt | None:
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
    return CodePrompt(file.name, prompt, "".join(lines[end : _take(counts, end, REFERENCE_TOKENS)]))


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


def cut_prompts(files: Sequence[SourceFile], tokenizer: PreTrainedTokenizerBase) -> list[CodePrompt]:
    """Up to `PROMPTS_PER_FILE` prompts from every file long enough, in the order of a hash of name and number."""
    wanted = [(file, number) for file in files for number in range(PROMPTS_PER_FILE)]
    wanted.sort(key=lambda pair: hash_fraction(f"{pair[1]} of {pair[0].name}"))
    cut = [cut_prompt(file, tokenizer, number) for file, number in wanted]
    return [prompt for prompt in cut if prompt is not None]


def write_prompts(prompts: Sequence[CodePrompt], path: Path) -> None:
    """One JSON object a line: `file`, `prompt`, `reference`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(asdict(p), ensure_ascii=False) + "\n" for p in prompts), encoding="utf-8")


def read_prompts(path: Path = PROMPTS_FILE) -> list[CodePrompt]:
    """The prompts `write_prompts` wrote.

    Raises:
        ConfigError: `path` is missing or is not such a file.
    """
    try:
        rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        return [CodePrompt(row["file"], row["prompt"], row["reference"]) for row in rows]
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(
            f"{path} cannot be read as prompts ({error}). "
            "Give a JSON-lines file with `file`, `prompt` and `reference` in every line."
        ) from error
