"""`forerun demo`, with models that need no weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from forerun.cli import demo
from forerun.cli.stage import Scene, split_accepted
from forerun.engine import StreamChunk

from .conftest import Invoke
from .fakes import FakeLLM, FakeTokenizer


@pytest.fixture
def workload(tmp_path: Path) -> str:
    path = tmp_path / "two.jsonl"
    path.write_text('{"file": "a.py", "prompt": "def a():"}\n{"file": "b.py", "prompt": "def b():"}\n')
    return str(path)


@pytest.fixture
def methods(monkeypatch: pytest.MonkeyPatch) -> dict[str, FakeLLM]:
    """What the demo believes to have opened."""
    fakes = {"plain": FakeLLM(), "draft-model": FakeLLM(drafts=True), "prompt-lookup": FakeLLM(drafts=True)}
    monkeypatch.setattr(demo, "open_methods", lambda *_: fakes)
    return fakes


def test_the_json_holds_what_it_promises(invoke: Invoke, methods: dict[str, FakeLLM], workload: str) -> None:
    result = invoke("demo", "--workload", workload, "--json", "--rounds", "2")
    assert result.exit_code == 0
    rows = json.loads(result.stdout)["results"]
    assert [row["method"] for row in rows] == ["plain", "draft-model", "prompt-lookup"]
    for row in rows:
        assert list(row) == [
            "method",
            "tokens_per_second",
            "speedup",
            "mean_acceptance_length",
            "acceptance_rate",
            "identical",
        ]
    assert rows[0]["speedup"] == 1
    assert [row["mean_acceptance_length"] for row in rows] == [1, 3, 3]
    assert [row["acceptance_rate"] for row in rows] == [None, 0.5, 0.5]
    assert all(row["identical"] is True for row in rows)


def test_every_prompt_is_shown_once_and_measured_in_every_round(
    invoke: Invoke, methods: dict[str, FakeLLM], workload: str
) -> None:
    invoke("demo", "--workload", workload, "--rounds", "3", "--max-tokens", "7")
    for fake in methods.values():
        assert [prompt for prompt, _ in fake.requests] == ["def a():", "def b():", *["def a():"] * 3, *["def b():"] * 3]
        assert all((p.greedy, p.ignore_eos, p.max_tokens) == (True, True, 7) for _, p in fake.requests)


def test_the_table_says_whether_the_texts_are_the_same(
    invoke: Invoke, methods: dict[str, FakeLLM], workload: str
) -> None:
    methods["prompt-lookup"].token_ids[-1] = 0
    methods["plain"].exact = False
    result = invoke("demo", "--workload", workload)
    lines = {line.split()[1]: line for line in result.stdout.splitlines() if line.startswith("│")}
    assert "yes" in lines["plain"]
    assert "yes" in lines["draft-model"]
    assert " no " in lines["prompt-lookup"]
    assert "Not exact here" in result.stdout
    assert "3.00" in lines["draft-model"]
    assert "50 %" in lines["draft-model"]


def test_ctrl_c_prints_the_rounds_that_are_complete(
    invoke: Invoke, methods: dict[str, FakeLLM], workload: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []
    generate = FakeLLM.generate

    def interrupted(self: FakeLLM, prompt: Any, params: Any) -> Any:
        calls.append(prompt)
        if len(calls) == 5:
            raise KeyboardInterrupt
        return generate(self, prompt, params)

    monkeypatch.setattr(FakeLLM, "generate", interrupted)
    result = invoke("demo", "--workload", workload, "--json")
    assert result.exit_code == 130
    assert len(json.loads(result.stdout)["results"]) == 3

    calls[:] = [""] * 3
    result = invoke("demo", "--workload", workload, "--json")
    assert result.exit_code == 130
    assert json.loads(result.stdout)["results"] == []

    calls[:] = [""] * 3
    result = invoke("demo", "--workload", workload)
    assert result.exit_code == 130
    assert result.stdout.splitlines()[-1] == "Interrupted."


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--drafters", "no-such"], "no-such"),
        (["--drafters", "prompt-lookup,prompt-lookup"], "prompt-lookup"),
        (["--model", "some/model", "--drafters", "draft-model"], "--draft"),
        (["--workload", "no-such"], "no-such"),
    ],
)
def test_bad_options_exit_with_2(invoke: Invoke, arguments: list[str], told: str, workload: str) -> None:
    result = invoke("demo", "--workload", workload, *arguments)
    assert result.exit_code == 2
    assert told in result.stderr


def test_drafters_follow_the_model() -> None:
    from forerun.drafters import DRAFTERS

    assert demo.choose_drafters("bundled", None, None) == {name: name for name in DRAFTERS}
    lone = demo.choose_drafters("some/model", None, None)
    assert {"prompt-lookup", "suffix", "lookahead"} <= set(lone)
    assert not {"draft-model", "draft-tree", "cross-vocab", "rest", "hybrid"} & set(lone)
    given = demo.choose_drafters("some/model", "a/draft", None)
    assert given["draft-model"] == "a/draft"
    assert given["hybrid"] == "hybrid:sources=suffix+a/draft"
    assert demo.choose_drafters("some/model", None, "rest:index=x") == {"rest:index=x": "rest:index=x"}


def test_what_is_left_out_is_said(invoke: Invoke, methods: dict[str, FakeLLM], workload: str) -> None:
    result = invoke("demo", "--workload", workload, "--model", "some/model", env={"COLUMNS": "80"})
    [line] = [line for line in result.stdout.splitlines() if line.startswith("Left out: ")]
    assert line.startswith("Left out: draft-model, draft-tree, staged, hybrid (give a draft model with --draft)")
    assert "rest (give --drafters rest:index=...)" in line
    assert "; cross-vocab (give --drafters cross-vocab:model=...); rest (give --drafters rest:index=...);" in line
    assert line.endswith("; prediction (no prompt has a reference for it).")
    assert any(
        line.startswith("Greedy, K=auto") and line.endswith("medians over both.") for line in result.stdout.splitlines()
    )
    assert "Left out: prediction (no" in invoke("demo", "--workload", workload).stdout
    assert "Left out" not in invoke("demo", "--workload", "code").stdout


def test_a_chunk_is_split_after_its_draft_tokens() -> None:
    tokenizer = FakeTokenizer()
    assert split_accepted(tokenizer, StreamChunk("alpha beta gamma ", [0, 1, 2], 2)) == ("alpha beta ", "gamma ")
    assert split_accepted(tokenizer, StreamChunk("alpha ", [0], 0)) == ("", "alpha ")
    assert split_accepted(tokenizer, StreamChunk("alp", [0, 1, 2], 2)) == ("alp", "")
    assert split_accepted(tokenizer, StreamChunk("alp", [0, 1, 2], 1)) == ("", "alp")


def test_accepted_tokens_are_coloured_and_the_others_are_not() -> None:
    scene = Scene("title", "prompt ", lambda: None)
    scene.add(FakeTokenizer(), StreamChunk("alpha beta gamma ", [0, 1, 2], 2))
    console = Console(force_terminal=True, width=60, color_system="standard", file=None)
    with console.capture() as capture:
        console.print(scene.panel(console))
    assert "\x1b[1;32malpha beta \x1b[0mgamma" in capture.get()
    assert "3 tokens" in scene.status
    assert "2 of them drafted" in scene.status
