"""`forerun demo`, with models that need no weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from forerun.cli import demo
from forerun.cli.demo import default_settings
from forerun.cli.demo_screen import Scene, split_accepted
from forerun.cli.options import LLMOptions, choose_drafters
from forerun.engine import StreamChunk
from forerun.errors import FetchError
from forerun.utils import fetch as store, workloads

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
    result = invoke("demo", "--prompts", workload, "--json", "--rounds", "2")
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
    invoke("demo", "--prompts", workload, "--rounds", "3", "--max-tokens", "7")
    for fake in methods.values():
        assert [prompt for prompt, _ in fake.requests] == ["def a():", "def b():", *["def a():"] * 3, *["def b():"] * 3]
        assert all((p.greedy, p.ignore_eos, p.max_tokens) == (True, True, 7) for _, p in fake.requests)


def test_the_table_says_whether_the_texts_are_the_same(
    invoke: Invoke, methods: dict[str, FakeLLM], workload: str
) -> None:
    methods["prompt-lookup"].token_ids[-1] = 0
    methods["plain"].exact = False
    result = invoke("demo", "--prompts", workload)
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
    result = invoke("demo", "--prompts", workload, "--json")
    assert result.exit_code == 130
    assert len(json.loads(result.stdout)["results"]) == 3

    calls[:] = [""] * 3
    result = invoke("demo", "--prompts", workload, "--json")
    assert result.exit_code == 130
    assert json.loads(result.stdout)["results"] == []

    calls[:] = [""] * 3
    result = invoke("demo", "--prompts", workload)
    assert result.exit_code == 130
    assert result.stdout.splitlines()[-1] == "Interrupted."


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--drafters", "no-such"], "no-such"),
        (["--drafters", "prompt-lookup,prompt-lookup"], "prompt-lookup"),
        (["--model", "some/model", "--drafters", "draft-model"], "--draft"),
        (["--prompts", "no-such"], "no-such"),
    ],
)
def test_bad_options_exit_with_2(invoke: Invoke, arguments: list[str], told: str, workload: str) -> None:
    result = invoke("demo", "--prompts", workload, *arguments)
    assert result.exit_code == 2
    assert told in result.stderr


def test_drafters_follow_the_model() -> None:
    from forerun.drafters import DRAFTERS

    assert choose_drafters("bundled", None, None) == {n: n for n, row in DRAFTERS.items() if row.serves("bundled")}
    lone = choose_drafters("some/model", None, None)
    assert {"prompt-lookup", "suffix", "lookahead"} <= set(lone)
    assert not {"draft-model", "draft-tree", "cross-vocab", "rest", "hybrid"} & set(lone)
    given = choose_drafters("some/model", "a/draft", None)
    assert given["draft-model"] == "a/draft"
    assert given["hybrid"] == "hybrid:sources=suffix+a/draft"
    assert choose_drafters("some/model", None, "rest:index=x") == {"rest:index=x": "rest:index=x"}
    assert choose_drafters("some/model", None, "eagle") == {"eagle": "eagle"}, "a head is found by the weights"
    two = "suffix:min_match=3,max_match=9"
    assert choose_drafters("some/model", None, f"{two}; lookahead") == {two: two, "lookahead": "lookahead"}


def test_the_hybrid_of_a_shipped_head(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("forerun.drafters.registry.SHIPPED_HEADS", tmp_path)
    assert "hybrid" not in choose_drafters("some-model", None, None)
    (tmp_path / "eagle" / "some-model").mkdir(parents=True)
    chosen = choose_drafters("some-model", None, None)
    assert chosen["hybrid"] == "hybrid:sources=suffix+eagle" and chosen["eagle-tree"] == "eagle-tree"


def test_what_is_left_out_is_said(invoke: Invoke, methods: dict[str, FakeLLM], workload: str) -> None:
    result = invoke("demo", "--prompts", workload, "--model", "some/model", env={"COLUMNS": "80"})
    [line] = [line for line in result.stdout.splitlines() if line.startswith("Left out: ")]
    assert line.startswith("Left out: draft-model, draft-tree, staged, hybrid (give a draft model with --draft)")
    assert "rest (give --drafters rest:index=...)" in line
    for name in ("cross-vocab", "eagle", "eagle-tree"):
        assert f"; {name} (give --drafters {name}:model=...);" in line
    assert line.endswith("; prediction (no prompt has a reference for it).")
    assert any(
        line.startswith("bfloat16, greedy, K=auto") and line.endswith("medians over both.")
        for line in result.stdout.splitlines()
    )
    assert "prediction (no prompt" in invoke("demo", "--prompts", workload).stdout
    assert "prediction (no prompt" not in invoke("demo", "--prompts", "code", "--num-prompts", "1").stdout


@pytest.fixture
def questions(tmp_path: Path) -> str:
    """Chats in two categories."""
    lines = [
        {"id": f"{category}/{number}", "category": category, "messages": [{"role": "user", "content": f"{number}?"}]}
        for category in ("editing", "chat")
        for number in range(4)
    ]
    path = tmp_path / "questions.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)


def test_chats_are_asked_as_chats_and_end_where_the_model_ends_them(
    invoke: Invoke, methods: dict[str, FakeLLM], questions: str
) -> None:
    result = invoke("demo", "--prompts", questions, "--num-prompts", "3", "--max-tokens", "9")
    assert result.exit_code == 0
    prompts = [prompt for prompt, _ in methods["plain"].requests]
    assert len(prompts) == 6 and sorted(str(each) for each in prompts[:3]) == sorted(str(each) for each in prompts[3:])
    assert all(prompt[0]["role"] == "user" for prompt in prompts)
    assert all((p.greedy, p.ignore_eos, p.max_tokens) == (True, False, 9) for _, p in methods["plain"].requests)
    assert "9 tokens an answer at most; prompts: 3 of 8, interleaved rounds: 1" in result.stdout


def test_on_a_pipe_there_are_lines_and_no_screen(invoke: Invoke, methods: dict[str, FakeLLM], questions: str) -> None:
    result = invoke("demo", "--prompts", questions, "--num-prompts", "1")
    lines = result.stdout.splitlines()
    [title] = [number for number, line in enumerate(lines) if line.startswith("plain  ·  prompt 1 of 1, ")]
    assert lines[title + 1].startswith("> ") and lines[title + 2].startswith("alpha beta")
    assert "\x1b" not in result.stdout and "\r" not in result.stdout
    assert sum("alpha beta" in line for line in lines) == 1


def test_all_prompts_are_measured_by_category(invoke: Invoke, methods: dict[str, FakeLLM], questions: str) -> None:
    methods["prompt-lookup"].token_ids[-1] = 0
    result = invoke("demo", "--prompts", questions, "--all", "--rounds", "2")
    assert len(methods["plain"].requests) == 1 + 2 * 8
    rows = [
        [cell.strip() for cell in line.strip("│").split("│")] for line in result.stdout.splitlines() if line[:1] == "│"
    ]
    assert [row[0] for row in rows] == ["plain", "draft-model", "prompt-lookup", "editing", "chat"]
    assert [len(row) for row in rows] == [6, 6, 6, 5, 5]
    assert rows[-1][-1] == "no"
    found = json.loads(invoke("demo", "--prompts", questions, "--all", "--json").stdout)
    assert found["prompts"] == 8 and set(found["categories"]) == {"editing", "chat"}
    assert "categories" not in json.loads(invoke("demo", "--prompts", questions, "--json").stdout)
    both = invoke("demo", "--prompts", questions, "--all", "--num-prompts", "3")
    assert both.exit_code == 2 and "The key all and --num-prompts" in both.stderr


def test_nobody_chooses_which_questions_are_shown() -> None:
    """One of each category before the second of any, and the same on every machine."""
    cases = workloads.load("questions")
    first = demo.by_hash(cases)
    categories = [case.category for case in first]
    assert len(set(categories[:8])) == 8 and all(categories.count(each) >= 5 for each in categories)
    assert first == demo.by_hash(cases[::-1]) and len(first) == len(cases) >= 40
    assert [case.name for case in first[: demo.NUM_QUESTIONS]] == [
        "coding/fix-bug",
        "chat/new-colleague",
        "editing/more-formal",
        "reasoning/race",
        "writing/wedding-toast",
    ]


def test_fetch_brings_a_model_or_says_in_one_line_why_not(
    invoke: Invoke, methods: dict[str, FakeLLM], workload: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def unreachable(name: str, **_: Any) -> Path:
        asked.append(name)
        raise FetchError("There is no network. Get one.")

    monkeypatch.setattr(store, "fetch", unreachable)
    result = invoke("demo", "--fetch", "--prompts", workload)
    assert result.exit_code == 0 and asked == ["smollm2"]
    assert "The bundled models are shown instead: There is no network. Get one.\n" in result.stdout
    assert "Loading bundled ..." in result.stdout
    invoke("demo", "--prompts", workload)
    invoke("demo", "--fetch", "--model", "bundled", "--prompts", workload)
    monkeypatch.setattr(store, "default_model", lambda: "smollm2")
    assert "Loading smollm2 ..." in invoke("demo", "--fetch", "--prompts", workload).stdout
    assert asked == ["smollm2"]


def test_the_fetched_model_has_4_bits_unless_something_else_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "default_model", lambda: "smollm2")
    monkeypatch.setattr("forerun.kernels.cpu.native", object)
    assert default_settings(LLMOptions(), False, print).quantize == "int4"
    for asked in ({"dtype": "float64"}, {"quantize": "int8"}, {"device": "cuda"}, {"adapter": "folder"}):
        assert default_settings(LLMOptions(**asked), False, print) == LLMOptions(**asked)
    monkeypatch.setattr("forerun.kernels.cpu.native", lambda: None)
    assert default_settings(LLMOptions(), False, print).quantize is None


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
