"""The demo's first minute: what is drawn, what the table says, and how it ends."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest
from rich.console import Console

from forerun.cli import demo
from forerun.cli.demo_screen import Stage, picture
from forerun.engine import SequenceStats
from forerun.lab.bench import minute
from forerun.lab.bench.minute import FORERUN, PLAIN, TRANSFORMERS, Performance, Run
from forerun.lab.bench.tables import Table

from .conftest import Invoke
from .fakes import FakeLLM, FakeTokenizer


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch) -> dict[str, FakeLLM]:
    fakes = {PLAIN: FakeLLM(), FORERUN: FakeLLM(drafts=True)}
    monkeypatch.setattr(demo, "open_methods", lambda *_: fakes)
    monkeypatch.setattr(demo, "open_reference", lambda *_: None)
    monkeypatch.setattr(minute, "calibrate_engines", lambda *_: {1: 1.0, 3: 1.25, 5: 1.5})
    return fakes


def shown() -> Performance:
    runs = {TRANSFORMERS: Run(60, 6.0, 1.0), PLAIN: Run(60, 2.0, 0.2), FORERUN: Run(60, 1.0, 0.2)}
    return Performance("edit", "Correct this:\n\na\nb\nc\nd", 60, [("alpha ", True), ("beta", False)], runs, why="ten")


def test_the_table_has_the_results_numbers() -> None:
    one, other = shown(), shown()
    other.identical, other.runs[TRANSFORMERS].is_cut = False, True
    table = Table.of("", minute.COLUMNS, [one, other])
    assert table.rows[0] == ["edit", "10.0", "30.0", "60.0", "6.00×", "2.00×", "yes"]
    assert table.rows[1] == ["edit", "11.8", "30.0", "60.0", "5.08×", "2.00×", "no"], (
        "its prompt is not held against it"
    )
    other.runs[TRANSFORMERS].tokens = minute.LEAST_TOKENS - 1
    assert Table.of("", minute.COLUMNS, [other]).rows[0][1:5:3] == ["–", "–"], "too few tokens"
    other.runs[TRANSFORMERS] = Run(60, 6.0, 1.0, is_disturbed=True)
    assert other.speed(TRANSFORMERS) == "–", "its threads wait for each other"
    del one.runs[TRANSFORMERS]
    assert Table.of("", minute.COLUMNS, [one]).rows[0][1:5:3] == ["–", "–"]


def test_why_so_little_was_drafted_is_said_in_words() -> None:
    growth = {3: 1.9}
    assert minute.explain(SequenceStats(8, 8, decisions={"off: no gain": 8}), growth).startswith(
        "off: a step of three rows costs 1.9 steps"
    )
    assert minute.explain(SequenceStats(8, 8, decisions={"on: gain": 8}), growth).startswith("off: nothing in the text")
    seldom = SequenceStats(9, 8, 2, 1, [2], [2], [1], decisions={"on: gain": 3, "off: no gain": 5})
    assert "1 of 2 drafted tokens were right, 1.1 tokens a step; off in 5 of 8 steps: a step of" in minute.explain(
        seldom, growth
    )
    empty = SequenceStats(9, 8, 2, 1, [2], [2], [1], decisions={"on: gain": 8})
    assert minute.explain(empty, growth).endswith("in 6 of 8 steps nothing was found to draft")


def test_on_a_pipe_there_are_lines_alone(invoke: Invoke, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(minute, "MOST_SECONDS", 600.0)
    result = invoke("demo", "--model", "bundled", "--max-tokens", "6", "--num-prompts", "1")
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert "\x1b" not in result.stdout and "\r" not in result.stdout
    [title] = [number for number, line in enumerate(lines) if line == "1 of 1 · copying"]
    assert lines[title + 1].startswith("> ")
    for name in (TRANSFORMERS, PLAIN, FORERUN):
        assert any(line.startswith(f"{name}: ") and line.endswith("tokens/s, 6 tokens") for line in lines)
    [row] = [line for line in lines if line.startswith("copying") and "│" in line]
    assert row.endswith("yes")
    assert any(line.startswith("Calibrated: ") for line in lines) and lines[-1].startswith("Next: ")


def test_each_answer_is_given_by_both_engines_in_every_round(invoke: Invoke, engines: dict[str, FakeLLM]) -> None:
    found = json.loads(invoke("demo", "--model", "some/model", "--prompts", "demo", "--json").stdout)
    assert found["kind"] == "demo" and [each["name"] for each in found["details"]["performances"]] == [
        "edit", "question", "chat"
    ]  # fmt: skip
    for fake in engines.values():
        assert len(fake.requests) == 3 * minute.ROUNDS
        assert all(params.greedy and not params.ignore_eos for _, params in fake.requests)
    again = minute.recorded(found["details"]["performances"])
    assert again[0].identical and again[0].runs[FORERUN].tokens == 6
    assert again[0].text[:2] == [["alpha beta ", True], ["gamma ", False]]


def test_a_pair_answers_questions_on_code_too_and_drafts_beside_suffix_matches(
    invoke: Invoke, engines: dict[str, FakeLLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[dict[str, str]] = []

    def open_methods(model: str, drafters: dict[str, str], *_: object) -> dict[str, FakeLLM]:
        opened.append(drafters)
        return engines

    monkeypatch.setattr(demo, "_has_chat_template", lambda _: True)
    monkeypatch.setattr(demo, "open_methods", open_methods)
    result = invoke("demo", "--model", "some/model.gguf", "--draft", "some/draft.gguf")
    assert result.exit_code == 0, result.output
    titles = [line for line in result.stdout.splitlines() if " of 3 · " in line]
    assert titles == ["1 of 3 · coding", "2 of 3 · editing", "3 of 3 · extraction"]
    assert opened == [{FORERUN: "hybrid:sources=suffix+some/draft.gguf"}]
    assert result.stdout.endswith("--drafter hybrid:sources=suffix+some/draft.gguf\n")
    assert invoke("demo", "--model", "some/model.gguf").exit_code == 0 and opened[1] == {FORERUN: "auto"}


def test_another_text_is_an_error_and_red(invoke: Invoke, engines: dict[str, FakeLLM]) -> None:
    engines[FORERUN].token_ids[-1] = 0
    assert invoke("demo", "--model", "some/model", "--prompts", "demo").exit_code == demo.DIFFERENT == 1
    console = Console(force_terminal=True, color_system="standard", file=io.StringIO())
    failed = shown()
    failed.identical = False
    Stage(console=console).table(Table.of("", minute.COLUMNS, [shown(), failed]))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "no\x1b[0m" in {line.rpartition(" ")[2] for line in text.splitlines()} and text.count("\x1b[1;31m") == 1


def test_ctrl_c_ends_quietly(invoke: Invoke, engines: dict[str, FakeLLM]) -> None:
    engines[FORERUN].fail_after = 1
    result = invoke("demo", "--model", "some/model", "--prompts", "demo")
    assert result.exit_code == 130 and result.stdout.splitlines()[-1] == "Interrupted."


def test_a_terminal_shows_accepted_tokens_in_green_and_a_dumb_one_no_codes(monkeypatch: pytest.MonkeyPatch) -> None:
    def output() -> str:
        console = Console(force_terminal=True, color_system="auto", width=80, file=io.StringIO(), highlight=False)
        performance = Performance("edit", "Correct this.", 6)
        with Stage(console=console).performance("1 of 1", performance) as redraw:
            performance.text, performance.runs = shown().text, shown().runs
            redraw()
        return console.file.getvalue()  # type: ignore[attr-defined, no-any-return]

    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    assert "\x1b[1;32malpha \x1b[0mbeta" in output() and "60.0 tokens/s" in output()
    monkeypatch.setenv("TERM", "dumb")
    assert "\x1b" not in output() and "alpha beta" in output()


def test_the_picture_is_small_and_loads_nothing() -> None:
    drawn = picture([shown()] * 3, Table.of("", minute.COLUMNS, [shown()] * 3), ["edit: ten."])
    assert len(drawn) < 60_000 and "url(" not in drawn.replace("url(#", "") and "alpha" in drawn
    assert drawn == picture([shown()] * 3, Table.of("", minute.COLUMNS, [shown()] * 3), ["edit: ten."])


def test_transformers_is_stopped_when_its_time_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    def generate(_: Any, ids: list[int], most: int, ends: Any, stopping_criteria: Any) -> None:
        [after] = stopping_criteria
        for count in range(1, most + 1):
            if bool(after(torch.tensor([[*ids, *[0] * count]]), None)):
                return

    monkeypatch.setattr(minute, "generate_greedily", generate)
    for most, tokens in ((100.0, 5), (-1.0, 2)):
        monkeypatch.setattr(minute, "MOST_SECONDS", most)
        performance = Performance("edit", "", 5)
        fake: Any = FakeLLM()
        minute._run_reference(type("", (), {"model": None})(), fake, [1, 2], [], performance, lambda: None)
        run = performance.runs[TRANSFORMERS]
        assert (run.tokens, run.is_cut) == (tokens, most < 0)
        assert performance.text == [(FakeTokenizer().decode([0] * tokens), False)]
