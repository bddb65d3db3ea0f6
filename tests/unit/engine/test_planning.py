"""When a standing plan gives way to another, and what a step after a rest teaches."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Any

import numpy as np
import pytest

from forerun import SamplingParams
from forerun.speculation import AcceptanceStats, AutomaticPolicy, CostModel, DraftOutcome, Prospects, StepCost
from forerun.speculation.goodput import ProspectsAlone
from forerun.types import Draft, Sequence, Verdict
from worlds import GREEDY

MOST = 4


def sequences(count: int, params: SamplingParams = GREEDY) -> list[Sequence]:
    return [Sequence(i, [0] * 9, 1, params, max_length=1000) for i in range(count)]


def step(policy: AutomaticPolicy, own: Seq[Sequence], given: Seq[int], draft: float = 0.1, accepted: int = 1) -> None:
    """One step: everybody drafts what it was given, and so many nodes are accepted."""
    rows = sum(given) + len(own)
    outcomes = []
    for sequence, count in zip(own, given):
        made = Draft.chain([0] * count) if count else Draft.empty()
        outcomes.append(DraftOutcome(sequence, count, made, Verdict(list(range(min(accepted, count))), 0)))
    cost = StepCost(rows, 0, 8 * len(own), draft, 1 + 0.01 * rows, 0.0)
    policy.observe(cost, outcomes)


def learned(count: int) -> tuple[AutomaticPolicy, list[Sequence]]:
    """A policy that has seen plain steps and drafts of MOST nodes."""
    policy, own = AutomaticPolicy(), sequences(count)
    step(policy, own, [0] * count)
    step(policy, own, [MOST] * count)
    return policy, own


def settled(policy: AutomaticPolicy, own: list[Sequence]) -> list[int]:
    """What is planned once the standing plan has run out."""
    for _ in range(200):
        plan = policy.plan(own)
    return plan.num_draft_tokens


@pytest.mark.parametrize(
    ("batch", "first", "second", "gain", "moves"),
    [
        (1, 3, 4, 1.005, False),
        (1, 3, 4, 1.015, True),
        (1, 4, 3, 1.005, False),
        (1, 4, 3, 1.015, True),
        (1, 3, 0, 0.99, False),  # alone, drafting goes on while it is no slower than plain decoding
        (1, 3, 0, 1.005, True),
        (1, 0, 3, 1.015, False),
        (1, 0, 3, 1.025, True),
        (2, 4, 3, 1.005, False),
        (2, 4, 3, 1.015, True),
        (2, 3, 0, 0.975, False),  # in a crowd it must give more
        (2, 3, 0, 0.985, True),
        (2, 0, 3, 1.04, False),
        (2, 0, 3, 1.06, True),
    ],
)
def test_a_plan_stands_until_another_is_clearly_better(
    batch: int, first: int, second: int, gain: float, moves: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    rates = np.full(1 + 2 * MOST, 0.5)
    choices = np.arange(len(rates))

    class Alone(ProspectsAlone):
        def __init__(self, *given: Any) -> None:
            super().__init__(*given)
            self.rates = rates[: len(self.rates)].tolist()

    def together(self: Prospects) -> Any:
        return rates[None, :], np.repeat(choices[None, :, None], len(self.gains), axis=2)

    monkeypatch.setattr("forerun.speculation.choose_k.ProspectsAlone", Alone)
    monkeypatch.setattr(Prospects, "rates_together", together)
    policy, own = learned(batch)
    rates[first] = 2.0
    assert settled(policy, own) == [first] * batch
    rates[first] = 1.0
    assert settled(policy, own) == [first] * batch
    rates[second] = gain
    assert settled(policy, own) == [second if moves else first] * batch


def test_a_draft_after_a_rest_says_nothing_of_what_drafts_usually_cost() -> None:
    """After a pause the drafter may have to catch up: what the draft costs more is told apart."""
    moved, catching_up = [], []
    for rests in (0, 1, 3):
        policy, own = AutomaticPolicy(), sequences(1)
        for _ in range(6):
            step(policy, own, [2], 1.0)
        for _ in range(rests):
            step(policy, own, [0], 0.0)
        before = float(policy.costs.draft(1, 2)[2])
        step(policy, own, [2], 2.0)
        moved.append(float(policy.costs.draft(1, 2)[2]) - before)
        catching_up.append(policy.costs.catch_up(10))
    assert moved[0] > 0.05 and moved[1:] == pytest.approx([0, 0], abs=0.001)  # the pace moves a little
    assert catching_up[1] > catching_up[0] and catching_up[2] > catching_up[0]


def test_a_step_in_which_somebody_has_not_rested_counts_a_quarter(monkeypatch: pytest.MonkeyPatch) -> None:
    shares: list[float] = []

    def add_draft(self: CostModel, batch: int, num_draft_tokens: int, seconds: float, share: float = 1.0) -> None:
        shares.append(share)

    monkeypatch.setattr(CostModel, "add_draft", add_draft)
    policy, own = AutomaticPolicy(), sequences(2)
    for given in ([2, 2], [2, 0], [2, 2], [0, 0], [2, 2], [2, 2], [0, 2], [0, 2], [2, 0]):
        step(policy, own, given)
    assert shares == [1, 0.25, 1, 1, 1]  # none where nobody drafted in the step before


def test_a_sequence_that_has_rested_forgets_a_part_of_what_it_showed(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[tuple[int, float]] = []
    inner = AcceptanceStats.observe

    def observe(
        self: AcceptanceStats, key: Any, num_draft_tokens: int, drafted: int, accepted: Seq[int], forget: float = 1.0
    ) -> None:
        told.append((key.id, forget))
        inner(self, key, num_draft_tokens, drafted, accepted, forget)

    monkeypatch.setattr(AcceptanceStats, "observe", observe)
    policy, own = AutomaticPolicy(), sequences(2)
    for given in ([2, 2], [2, 0], [2, 2], [2, 2], [0, 2], [0, 2], [2, 2]):
        step(policy, own, given)
    assert [forget < 1 for key, forget in told if key == 0] == [False] * 4 + [True]
    assert [forget < 1 for key, forget in told if key == 1] == [False, True] + [False] * 4
    assert len({forget for _, forget in told}) == 2


def test_forgetting_is_about_the_sequence_itself() -> None:
    """The less of the past is kept, the more one draft says."""
    after = []
    for forget in (1.0, 0.5):
        acceptance = AcceptanceStats()
        for _ in range(40):
            acceptance.observe("a", 4, 4, [0, 1, 2, 3])
        acceptance.observe("a", 4, 4, [], forget)
        after.append(float(acceptance.expect(["a"], 4)[0].sum()))
    assert after[1] < after[0]


def test_a_batch_counts_as_greedy_only_if_all_are() -> None:
    policy = AutomaticPolicy()
    mixed = [*sequences(1), *sequences(1, SamplingParams())]
    for own, seconds in ((sequences(2), 1.0), (mixed, 2.0)):
        for _ in range(3):
            cost = StepCost(2, 0, 16, 0.0, seconds, 0.0)
            policy.observe(cost, [DraftOutcome(each, 0, Draft.empty(), Verdict([], 0)) for each in own])
    for kind, seconds in (("greedy", 1.0), ("drawn", 2.0)):
        table = policy.costs.target(kind, 2, 16)
        assert table is not None and table[2] == pytest.approx(seconds, rel=0.05)
