"""Every plan says why it drafts or not, and what is learned at one batch size is known at others."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import pytest

from forerun.speculation import AutomaticPolicy, CostModel, DraftChooser, DraftPlan, FixedPolicy
from forerun.types import Sequence
from worlds import GREEDY, World, live


def sequences(count: int, room: int = 100) -> list[Sequence]:
    return [Sequence(10**6 + i, [0] * 8, 1, GREEDY, max_length=9 + room) for i in range(count)]


def chain(num_draft_tokens: int, asked: int) -> float:
    return 0.05 * num_draft_tokens


def test_a_fixed_number_is_fixed_but_for_room() -> None:
    assert FixedPolicy(4).plan(sequences(2)).reason == "fixed"
    assert FixedPolicy(0).plan(sequences(2, room=0)).reason == "fixed"
    assert FixedPolicy(4).plan(sequences(2, room=0)).reason == "no room"


def test_reasons_of_auto() -> None:
    policy = AutomaticPolicy()
    assert policy.plan(sequences(1)).reason == "measuring"
    live(World(lambda s, t, d: 0.9, chain, lambda rows: 1.0), policy, 100)
    seen = {(plan.reason, plan.num_draft_tokens[0] > 0) for plan in (policy.plan(sequences(1)) for _ in range(5))}
    assert ("gain", True) in seen
    assert policy.plan(sequences(1, room=0)).reason == "no room"
    poor = AutomaticPolicy()
    live(World(lambda s, t, d: 0.0, chain, lambda rows: 1.0 + 0.1 * rows), poor, 400)
    assert poor.plan(sequences(1)).reason in ("no gain", "probe")


class Telling(AutomaticPolicy):
    """Remembers whether each sequence drafted, and why."""

    def plan(self, sequences: Seq[Sequence]) -> DraftPlan:
        plan = super().plan(sequences)
        self.told = getattr(self, "told", set())
        self.told |= {(k > 0, plan.reason_of(index)) for index, k in enumerate(plan.num_draft_tokens)}
        return plan


@pytest.mark.parametrize("share", [1, 2])
def test_every_sequence_has_its_own_reason(share: int) -> None:
    """Of four: all, or every second one, have drafts that come true, and all come to their end."""
    policy = Telling(DraftChooser(CostModel()))
    world = World(lambda s, t, d: 0.9 * (s % share == 0), chain, lambda rows: 1.0 + 0.2 * rows, batch=4, length=90)
    live(world, policy, 600)
    why = {reason for drafts, reason in policy.told if drafts}
    why_not = {reason for drafts, reason in policy.told if not drafts}
    assert "gain" in why <= {"gain", "probe"}
    assert {1: "no room", 2: "no gain"}[share] in why_not <= {"no gain", "no room", "measuring", "full batch"}


def test_reasons_of_a_fixed_number_for_each_sequence() -> None:
    plan = FixedPolicy(4).plan([*sequences(1), *sequences(1, room=0), *sequences(1)])
    assert plan.num_draft_tokens == [4, 0, 4]
    assert [plan.reason_of(index) for index in range(3)] == ["fixed", "no room", "fixed"]


def test_what_pays_alone_but_not_in_a_batch_is_told() -> None:
    policy = AutomaticPolicy()
    alone = World(lambda s, t, d: 0.7, chain, lambda rows: max(1.0, rows / 6))
    live(alone, policy, 100)
    live(World(alone.accept, alone.draft, alone.target, batch=16), policy, 100)
    reasons = {policy.plan(sequences(16)).reason for _ in range(3)}
    assert "full batch" in reasons


def test_whole_drafts_are_tried_in_runs_and_only_where_they_could_pay() -> None:
    """Lookahead's window: the drafts of a step come from the steps before it."""

    def plans(target: float) -> list[int]:
        policy = AutomaticPolicy(DraftChooser(fixed_length=7, acceptance=((0.01,), ())))
        world = World(lambda s, t, d: 0.0, lambda k, asked: 0.0, lambda rows: 1.0 + target * rows, length=4000)
        return [own[0] for own in live(world, policy, 2000).num_draft_tokens]

    dear, cheap = plans(100.0), plans(0.01)
    assert set(cheap) == {0, 7} and "7" * 12 in "".join(map(str, cheap)) and sum(cheap) < 7 * 400
    assert sum(dear) <= 7 * 24


def test_a_batch_never_seen_has_the_shape_of_those_that_were() -> None:
    costs = CostModel()
    for rows in (1, 2, 4, 8, 16, 32, 64):
        for _ in range(5):
            costs.add_target("greedy", 1, 0, rows, 1.0 + 0.1 * rows)
    for _ in range(5):
        costs.add_target("greedy", 16, 0, 16, 1.1 * (1.0 + 1.6))
    table = costs.target("greedy", 16, 0, 65)
    assert table is not None
    assert table[16] == pytest.approx(2.86, rel=0.02)
    assert table[64] == pytest.approx(1.1 * 7.4, rel=0.1)  # a line from one point would say 3 or so
    again = CostModel.restored(costs.state()).target("greedy", 16, 0, 65)
    assert again is not None and again[64] == pytest.approx(table[64], rel=0.05)


def test_drafting_grows_as_it_was_seen_to_grow() -> None:
    costs = CostModel()
    costs.add_draft(1, 4, 1.0)
    assert costs.draft(16, 4)[4] == pytest.approx(4.0, rel=0.1)  # the square root, until another number is seen
    costs.add_draft(4, 4, 4.0)
    assert costs.growth == pytest.approx(1.0)
    assert costs.draft(16, 4)[4] == pytest.approx(16.0, rel=0.1)
