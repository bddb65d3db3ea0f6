"""Commands on a published file: FORERUN_MODELS names the folder of the files of docs/peers.md."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

FILE = Path(os.environ.get("FORERUN_MODELS", "")) / "qwen2.5-coder-0.5b-instruct-q4_k_m.gguf"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not FILE.is_file(), reason=f"FORERUN_MODELS names no folder with {FILE.name}"),
]


def forerun(*arguments: str) -> Any:
    command = [sys.executable, "-m", "forerun", *arguments]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def test_a_plan_counts_what_the_file_holds() -> None:
    made = forerun("plan", str(FILE), "--machine", "h100", "--json")
    assert made["target"]["number_format"] == "Q4_K_M"
    assert 0.97 * FILE.stat().st_size < made["memory"]["target_weights"] < FILE.stat().st_size


def test_forwards_are_of_the_files_own_weights() -> None:
    found = forerun("bench", "forward", "--model", str(FILE), "--rows", "1", "--rounds", "1", "--json", "-")
    assert found["target"]["number_format"] == "Q4_K_M" and "Q4_K_M" in found["tables"][0]["rows"][0][0]


def test_both_instruction_sets_write_the_same_answer(tmp_path: Path) -> None:
    few = ["--prompts", "questions", "--num-prompts", "1", "--max-tokens", "24"]
    again = f"forerun={sys.executable}:instructions=avx2"
    found = forerun("bench", "peers", "--model", str(FILE), *few, "--peer", again, "--json", "-")
    assert [each["name"] for each in found["details"]["peers"]] == ["forerun Q4_K_M", "forerun Q4_K_M avx2"]
    same = [each["value"] for each in found["figures"] if each["name"] == "same_text"]
    assert same == [1.0] * 4 and found["details"]["left_out"] == []
