"""The agent's conversation: what a turn computes, whatever drafts, and after a restart."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from time import sleep
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from clients.tools_model import write
from forerun import LLM, ConfigError
from forerun.drafters.lookup.remembered import remembered_text, sorted_answers
from forerun.drafters.lookup.rest.index_file import sort_suffixes
from forerun.kernels.cpu import native
from forerun.kernels.cpu.page_layout import PAGE
from forerun.lab.bench import agent
from forerun.lab.bench.agent import (
    FILES,
    TOOLS,
    TURNS,
    AnsweredTurn,
    conversation,
    encode_turns,
    measure_agent,
    measure_second_day,
    replay_turns,
)
from forerun.lab.bench.prompts import BenchPrompt


def test_conversation() -> None:
    turns = conversation()
    assert len(turns) == TURNS == 12
    for before, after in pairwise(turns):
        assert after[: len(before)] == before and [each["role"] for each in after[len(before) :]] == [
            "assistant",
            "tool",
        ]
    calls = [message["tool_calls"][0]["function"] for message in turns[-1] if "tool_calls" in message]
    offered = {tool["function"]["name"]: tool["function"]["parameters"]["required"] for tool in TOOLS}
    assert all([*call["arguments"]] == [*offered[call["name"]]] for call in calls)
    assert {call["arguments"]["path"] for call in calls if "path" in call["arguments"]} == {*FILES}


@pytest.mark.skipif(native() is None, reason="there are no native kernels here")
def test_a_turn_computes_its_own_tokens_and_a_page_at_most(tmp_path: Path) -> None:
    write(tmp_path / "model")
    with LLM(tmp_path / "model", None, dtype="float32", prefix_reuse="on") as plain:
        prompts = encode_turns(plain, conversation(5, 2000, 12), 8)
        drafters = {"suffix": "suffix", "recycling": "recycling"}
        turns, rows, restarts = measure_agent(plain, drafters, prompts, 8, tmp_path / "kept")
        with pytest.raises(ConfigError, match="turn 1 has"):
            encode_turns(plain, conversation(5, 2000, 12), 32_000)
    assert turns[0].computed == turns[0].prompt == turns[0].own
    for turn in turns[1:]:
        assert 0 < turn.computed <= turn.own + PAGE < turn.prompt and turn.first_token > 0
    assert [row.drafter for row in rows] == ["none", "suffix", "recycling"] and all(row.same for row in rows)
    assert rows[0].tokens_per_forward == 1
    first, first_kept, last, last_kept = restarts
    assert first.computed == first.prompt and last.computed == last.prompt and not first.read + last.read
    for each in (first_kept, last_kept):
        assert each.read == each.prompt - each.computed and each.computed <= 2 * PAGE


def test_the_second_day_begins_with_all_of_the_first_sorted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def slow(*given: Any) -> NDArray[np.uint32]:
        sleep(0.5)
        return sort_suffixes(*given)

    def noted(llm: LLM, prompts: Sequence[BenchPrompt], max_tokens: int) -> list[AnsweredTurn]:
        if (past := llm.engine.remembered) is not None:
            assert past._sorter is None or not past._sorter.is_alive()
        return replay_turns(llm, prompts, max_tokens)

    monkeypatch.setattr(remembered_text, "_MOST_NEW", 8)  # of a larger file, opening does not wait
    monkeypatch.setattr(sorted_answers, "sort_suffixes", slow)
    monkeypatch.setattr(agent, "replay_turns", noted)
    write(tmp_path / "model")
    with LLM(tmp_path / "model", None, dtype="float32", prefix_reuse="on") as plain:
        first, second = (encode_turns(plain, conversation(2, 500, 6, task), 8) for task in ("edit", "document"))
        (row,) = measure_second_day(plain, {"suffix": "suffix"}, first, second, 8, tmp_path)
    assert row.without.same and row.remembering.same
