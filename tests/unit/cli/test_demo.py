"""`forerun demo`, with models that need no weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from forerun.cli import demo
from forerun.cli.demo import default_settings
from forerun.cli.options import LLMOptions, choose_drafters
from forerun.engine import StreamChunk
from forerun.engine.text import split_accepted
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
    result = invoke("demo", "--all", "--prompts", workload, "--json")
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


def test_every_prompt_is_measured_in_every_round_after_one_to_warm_up(
    invoke: Invoke, methods: dict[str, FakeLLM], workload: str
) -> None:
    invoke("demo", "--all", "--prompts", workload, "--max-tokens", "7")
    for fake in methods.values():
        assert [prompt for prompt, _ in fake.requests] == ["def a():"] * 4 + ["def b():"] * 3
        assert all((p.greedy, p.ignore_eos, p.max_tokens) == (True, True, 7) for _, p in fake.requests)


def test_the_table_says_whether_the_texts_are_the_same(
    invoke: Invoke, methods: dict[str, FakeLLM], workload: str
) -> None:
    methods["prompt-lookup"].token_ids[-1] = 0
    methods["plain"].exact = False
    result = invoke("demo", "--all", "--prompts", workload)
    lines = {line.split()[0]: line for line in result.stdout.splitlines() if "│" in line}
    assert "yes" in lines["plain"]
    assert "yes" in lines["draft-model"]
    assert lines["prompt-lookup"].endswith(" no")
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
        if len(calls) == 8:
            raise KeyboardInterrupt
        return generate(self, prompt, params)

    monkeypatch.setattr(FakeLLM, "generate", interrupted)
    result = invoke("demo", "--all", "--prompts", workload, "--json")
    assert result.exit_code == 130
    assert len(json.loads(result.stdout)["results"]) == 3

    calls[:] = [""] * 6
    result = invoke("demo", "--all", "--prompts", workload, "--json")
    assert result.exit_code == 130
    assert json.loads(result.stdout)["results"] == []

    calls[:] = [""] * 6
    result = invoke("demo", "--all", "--prompts", workload)
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
    result = invoke("demo", "--all", "--prompts", workload, *arguments)
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
    assert [*choose_drafters("some/model", None, "auto,lookahead")] == ["suffix", "lookahead"]
    two = "suffix:min_match=3,max_match=9"
    assert choose_drafters("some/model", None, f"{two}; lookahead") == {two: two, "lookahead": "lookahead"}


def test_the_hybrid_of_a_shipped_head(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("forerun.drafters.registry.SHIPPED_HEADS", tmp_path)
    assert "hybrid" not in choose_drafters("some-model", None, None)
    (tmp_path / "eagle" / "some-model").mkdir(parents=True)
    chosen = choose_drafters("some-model", None, None)
    assert chosen["hybrid"] == "hybrid:sources=suffix+eagle" and chosen["eagle-tree"] == "eagle-tree"


def test_what_is_left_out_is_said(invoke: Invoke, methods: dict[str, FakeLLM], workload: str) -> None:
    result = invoke("demo", "--all", "--prompts", workload, "--model", "some/model", env={"COLUMNS": "80"})
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
    assert "prediction (no prompt" in invoke("demo", "--all", "--prompts", workload).stdout
    assert "prediction (no prompt" not in invoke("demo", "--all", "--prompts", "code", "--num-prompts", "1").stdout


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
    result = invoke("demo", "--all", "--prompts", questions, "--num-prompts", "3", "--max-tokens", "9")
    assert result.exit_code == 0
    prompts = [prompt for prompt, _ in methods["plain"].requests]
    assert len(prompts) == 4 and prompts[0] == prompts[1]
    assert all(prompt[0]["role"] == "user" for prompt in prompts)
    assert all((p.greedy, p.ignore_eos, p.max_tokens) == (True, False, 9) for _, p in methods["plain"].requests)
    assert "9 tokens an answer at most; prompts: 3 of 8, interleaved rounds: 1" in result.stdout


def test_nobody_chooses_which_questions_are_shown() -> None:
    """One of each category before the second of any, and the same on every machine."""
    cases = workloads.load_workload("questions")
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

    monkeypatch.setattr(store, "fetch_model", unreachable)
    result = invoke("demo", "--all", "--fetch", "--prompts", workload)
    assert result.exit_code == 0 and asked == ["smollm2"]
    assert "The bundled models are shown instead: There is no network. Get one.\n" in result.stdout
    assert "Loading bundled ..." in result.stdout
    invoke("demo", "--all", "--prompts", workload)
    invoke("demo", "--all", "--fetch", "--model", "bundled", "--prompts", workload)
    monkeypatch.setattr(store, "default_model", lambda: "smollm2")
    assert "Loading smollm2 ..." in invoke("demo", "--all", "--fetch", "--prompts", workload).stdout
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
