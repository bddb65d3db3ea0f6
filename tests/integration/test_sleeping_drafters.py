"""Drafters that sleep now and then miss steps, and draft on from what they are told after: the text stays."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Any

import pytest

from forerun import LLM, SamplingParams
from forerun.speculation import CostModel, DraftChooser
from forerun.types import Sequence
from worlds import GREEDY

PROMPTS = ["import os\n\n\ndef join(", "class Queue:\n    def __init__(self", "for line in lines:\n"]


@pytest.mark.parametrize("drafter", ["eagle", "draft-model", "hybrid:sources=suffix+eagle"])
@pytest.mark.parametrize("params", [GREEDY, SamplingParams(temperature=0.8, seed=3)])
def test_the_text_is_plain_decodings(drafter: str, params: SamplingParams, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = LLM("bundled", None)
    options: Any = {"max_tokens": 40, "ignore_eos": True}
    drafting = LLM(plain.target, drafter, tokenizer=plain.tokenizer, max_batch=2)
    turns = {"asleep": 0, "awake": 0}

    def sleeps(chooser: DraftChooser) -> bool:
        """Sleep for three of seven steps, whatever pays."""
        asleep = sum(turns.values()) // 4 % 7 < 3
        turns["asleep" if asleep else "awake"] += 1
        return asleep

    def chooses(chooser: DraftChooser, sequences: Seq[Sequence], *_: object) -> list[int]:
        return [0 if chooser.is_asleep else max(min(2, each.room), 0) for each in sequences]

    monkeypatch.setattr(DraftChooser, "is_asleep", property(sleeps))
    monkeypatch.setattr(DraftChooser, "choose", chooses)
    expected: Any = plain.generate(PROMPTS, params, **options)
    found: Any = drafting.generate(PROMPTS, params, **options)
    assert [each.token_ids for each in found] == [each.token_ids for each in expected]
    assert min(turns.values()) > 10
    assert sum(each.stats.num_draft_tokens for each in found) > 0


def test_a_drafter_that_does_not_pay_falls_asleep_and_wakes_for_its_next_trial() -> None:
    costs = CostModel()
    costs.add_draft(1, 1, 5.0)
    chooser = DraftChooser(costs, acceptance=((0.1,), ()), can_sleep=True)
    sequence = Sequence(0, [1] * 8, 1, GREEDY, max_length=10**6)
    asleep = []
    for _ in range(600):
        assert chooser.choose([sequence], [1.0 + 0.1 * rows for rows in range(40)])[0] in (0, 1)
        asleep.append(chooser.is_asleep)
        chooser.observe([], 1.0, None)
    assert not any(asleep[:8]) and sum(asleep) > 300 and not all(asleep[300:])
