"""Answers that are remembered: fewer forwards, the same text, of the tenant alone, whatever drafts and restarts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from forerun import LLM, ConfigError
from forerun.config import EngineConfig
from forerun.drafters.lookup.remembered.remembered_text import RememberedText
from forerun.engine import Engine, Generation, llm as llm_module, opening

PROMPT = "def quicksort(items):"


def answer(llm: LLM, tenant: str | None = None, prompt: str = PROMPT) -> Generation:
    return llm.generate(prompt, temperature=0, max_tokens=48, tenant=tenant)


@pytest.mark.parametrize("drafter", ["suffix", "hybrid:sources=suffix+prompt-lookup", ["suffix", "prompt-lookup"]])
def test_what_was_answered_is_drafted_after_a_restart(tmp_path: Path, drafter: str | list[str]) -> None:
    with LLM("bundled", drafter, num_draft_tokens=8) as llm:
        plain = answer(llm)
    with LLM("bundled", drafter, num_draft_tokens=8, remember=tmp_path / "answers") as llm:
        first = answer(llm)
        second = answer(llm)
        stranger = answer(llm, "another")
    with LLM("bundled", drafter, num_draft_tokens=8, remember=tmp_path / "answers", remember_size=0.5) as llm:
        third = answer(llm)
        still_stranger = answer(llm, "a third")
    every = (first, second, stranger, third, still_stranger)
    assert {tuple(each.token_ids) for each in every} == {tuple(plain.token_ids)}
    forwards = plain.stats.num_forwards
    assert [each.stats.num_forwards for each in (first, stranger, still_stranger)] == [forwards] * 3
    assert second.stats.num_forwards < 0.6 * forwards
    assert third.stats.num_forwards < 0.6 * forwards
    assert (tmp_path / "answers").stat().st_size <= 2**19


@pytest.mark.parametrize(
    ("drafter", "k"), [(None, None), ("draft-model", None), ("prompt-lookup", None), ("suffix", 0)]
)
def test_without_a_drafter_that_reads_it_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, drafter: str | None, k: int | None
) -> None:
    monkeypatch.delattr(opening, "load_model")  # it is refused before
    with pytest.raises(ConfigError, match=r"copies nothing from answers of the past. Give a drafter that does"):
        LLM("bundled", drafter, remember=tmp_path / "new" / "answers", num_draft_tokens=k)
    assert not (tmp_path / "new").exists()


def test_wrong_options_and_files_are_errors(tmp_path: Path) -> None:
    path = tmp_path / "answers"
    with pytest.raises(ConfigError, match="remember is not given"):
        LLM("bundled", "suffix", remember_size=1)
    with pytest.raises(ConfigError, match=r"remember_size is 0\.01"):
        LLM("bundled", "suffix", remember=path, remember_size=0.01)
    with pytest.raises(ConfigError, match=r"remember '\.' cannot be used"):
        LLM("bundled", "suffix", remember="")
    with LLM("bundled", "suffix", remember=path) as llm:
        with pytest.raises(ConfigError, match="in use by another process"):
            LLM("bundled", "suffix", remember=path)
        with pytest.raises(ConfigError, match="Engine opens no file"):
            Engine(llm.target, config=EngineConfig(remember=str(path)))
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ConfigError, match="no file of answers"):
        LLM("bundled", "suffix", remember=tmp_path / "notes.txt")


def test_memory_is_divided_before_answers_are_sorted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    began: list[str] = []

    def first(name: str, then: Callable[..., object]) -> Callable[..., object]:
        def call(*given: object) -> object:
            began.append(name)
            return then(*given)

        return call

    monkeypatch.setattr(llm_module, "bound_memory", first("divided", llm_module.bound_memory))
    monkeypatch.setattr(RememberedText, "_sort_soon", first("sorted", RememberedText._sort_soon))
    with LLM("bundled", "suffix", remember=tmp_path / "answers"):
        assert began == ["divided", "sorted"]
