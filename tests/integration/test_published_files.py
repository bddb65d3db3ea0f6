"""Commands on a published file: FORERUN_MODELS names the folder of the files of docs/peers.md."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest

from forerun import LLM
from serving import LIMIT, serving
from written_answers import answered, called

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


def tool(name: str, about: str, /, **properties: Any) -> dict[str, Any]:
    schema = {"type": "object", "properties": properties, "required": [*properties]}
    return {"type": "function", "function": {"name": name, "description": about, "parameters": schema}}


TEXT = {"type": "string"}
WEATHER = tool("get_weather", "Get the current weather of a city", city=TEXT)
READ = tool("read_file", "Read a file", path=TEXT)
PERSON = tool("Person", "A person", name=TEXT, age={"type": "integer"})
NAMED = {"type": "function", "function": {"name": "Person"}}
ASKED: dict[str, tuple[list[dict[str, Any]], str, Any, list[tuple[str, Any]] | None]] = {
    # tools, what is asked, tool_choice, the calls; None: some of these tools
    "single": ([WEATHER], "What is the weather in Paris?", "auto", [("get_weather", {"city": "Paris"})]),
    "several": ([WEATHER, READ], "Read the file src/main.py.", "required", None),
    "parallel": ([WEATHER], "What is the weather in Paris and in Rome?", "auto", None),
    "none": ([WEATHER, READ], "Write a haiku about the sea.", "auto", []),
    "by name": (
        [PERSON],
        "Ada Lovelace died at the age of 36.",
        NAMED,
        [("Person", {"name": "Ada Lovelace", "age": 36})],
    ),
    "required though none fits": ([WEATHER], "Write a haiku about the sea.", "required", None),
}


def test_a_small_coder_calls() -> None:
    """Fenced calls are read, and forced ones come at once: whole and streamed, with drafts and without."""
    with serving(LLM(str(FILE), "suffix")) as served, httpx.Client(base_url=served.url, timeout=LIMIT) as client:
        for name, (tools, text, choice, expected) in ASKED.items():
            fields = {"messages": [{"role": "user", "content": text}], "tools": tools, "tool_choice": choice}
            found = []
            for speculative in (True, False):
                body = answered(client, **fields, speculative=speculative, max_tokens=400)
                message = body["choices"][0]["message"]
                calls = message.get("tool_calls", [])
                found.append((message["content"] or "", [each["function"] for each in calls]))
                assert body["usage"]["completion_tokens"] < 120, name
                streamed: dict[int, dict[str, str]] = {}
                said = ""
                for event in answered(client, **fields, speculative=speculative, max_tokens=400, stream=True):
                    delta = event["choices"][0]["delta"]
                    said += delta["content"]
                    for piece in delta.get("tool_calls", ()):
                        call = streamed.setdefault(piece["index"], {"name": "", "arguments": ""})
                        call["name"] += piece["function"].get("name", "")
                        call["arguments"] += piece["function"]["arguments"]
                found.append((said, [*streamed.values()]))
            assert all(each == found[0] for each in found), name
            names = {each["function"]["name"] for each in tools}
            assert called(calls) == expected or (expected is None and {each for each, _ in called(calls)} <= names), (
                name
            )
            assert calls or expected == []
