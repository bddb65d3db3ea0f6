"""Prompts that stand in what drafters were made from."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from forerun.bench.training_data import seen_cases
from forerun.errors import ConfigError
from forerun.workloads import Case

WORDS = " ".join(f"word{place}" for place in range(13))


def test_prompts_that_share_thirteen_words_are_found(tmp_path: Path) -> None:
    cases = {
        "a": [Case("seen", prompt=f"So: {WORDS.upper()}!"), Case("short", prompt=WORDS.removesuffix(" word12"))],
        "b": [Case("chat", turns=("hello", f"{WORDS} and more"))],
    }
    with gzip.open(tmp_path / "answers.jsonl.gz", "wt") as file:
        file.write(json.dumps({"messages": [{"content": f"before, {WORDS}."}]}) + "\nnot json\n")
    (tmp_path / "other.txt").write_text("nothing of it")
    assert seen_cases(cases, [tmp_path / "answers.jsonl.gz"]) == {"seen", "chat"}
    assert seen_cases(cases, [tmp_path / "other.txt"]) == set()
    assert seen_cases(cases, [tmp_path]) == set()  # of a folder, texts are taken
    with pytest.raises(ConfigError, match="does not exist"):
        seen_cases(cases, [tmp_path / "none"])
