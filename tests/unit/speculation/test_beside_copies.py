"""The choice of a drafter that takes time, beside copies that cost nothing. Times are counted in plain steps."""

from __future__ import annotations

import pytest

from forerun import SamplingParams
from forerun.speculation import AcceptanceStats, AutomaticPolicy, CostModel, DraftChooser, DraftOutcome, StepCost
from forerun.speculation.choose_k import SLEEPS
from forerun.types import Draft, Sequence, Verdict

PRICES = [1 + 0.1 * rows for rows in range(64)]
SURE = [0.99, 0.98, 0.97, 0.96, 0.95, 0.94]
PAIR = ((0.8, 0.85), (0.6, 0.8))


def chooser(follow: float = 0.0, token: float = 0.25) -> DraftChooser:
    """A drafter of `token` a token and `follow` for each token of a prompt, accepted as in a pair of one family."""
    costs = CostModel()
    for k in (1, 4):
        costs.add_draft(1, k, token * k)
    if follow:
        costs.add_first_draft(1, 1, 100, token + 100 * follow)
    return DraftChooser(costs, acceptance=PAIR, can_sleep=True, continues=True)


def sequence(length: int = 100) -> Sequence:
    return Sequence(0, [1] * length, length, SamplingParams(temperature=0, max_tokens=400))


def chosen(drafter: DraftChooser, each: Sequence, copy: list[float], tokens: int = 1) -> int:
    """Return K of one step, after which so many tokens are committed."""
    (k,) = drafter.choose([each], PRICES, [copy], len(copy))
    each.token_ids += [2] * tokens
    drafter.observe([DraftOutcome(each, 0, Draft.empty(), Verdict([], 2))], 1.0, None)
    return k


def test_a_draft_goes_on_below_the_part_of_a_copy_that_is_surer_than_itself() -> None:
    drafter = chooser(token=0.05)
    (k,) = drafter.choose([sequence()], PRICES, [[0.95, 0.9, 0.3]], 3)
    assert drafter.num_given == 2 < k
    (k,) = drafter.choose([sequence()], PRICES, [[0.95, 0.9, 0.3]], 0)  # the copy is a tree
    assert drafter.num_given == 0
    (k,) = drafter.choose([sequence()], PRICES, [[0.3, 0.1]], 2)
    assert drafter.num_given == 0 < k  # the copy is less sure than a draft
    (k,) = drafter.choose([sequence()], PRICES, [SURE * 4], 24)
    assert drafter.num_given == k == 0  # it is long, and nothing is drafted


def test_a_prompt_is_followed_once_copies_leave_enough_tokens_to_repay_it() -> None:
    copying = sequence()
    drafter = chooser(0.05)
    assert not any(chosen(drafter, copying, SURE if step % 2 else [], 7 if step % 2 else 1) for step in range(40))
    drafter.stop(copying)
    plain = sequence()
    drafted = [chosen(drafter, plain, []) for _ in range(40)]
    assert not drafted[0] and any(drafted)
    drafter.stop(plain)
    dear = chooser(1.0)
    assert not any(chosen(dear, sequence(), []) for _ in range(64))


def test_where_only_copies_are_better_the_drafter_stays_awake() -> None:
    drafter = chooser(0.1)
    each = sequence()
    for _ in range(3 * SLEEPS):
        assert chosen(drafter, each, SURE * 4, 20) == 0
        assert not drafter.is_asleep
    hopeless = DraftChooser(drafter.costs, acceptance=((0.01,), (0.01,)), can_sleep=True)
    while not hopeless.is_asleep:
        chosen(hopeless, each, [])
    hopeless.stop(each)  # the next sequence is considered anew
    assert not hopeless.is_asleep


def test_drafts_that_end_early_cost_the_forwards_that_were_made() -> None:
    drafter = chooser()
    each = sequence()
    for _ in range(50):
        each.token_ids.append(2)
        outcome = DraftOutcome(each, 8, Draft.chain([3, 4]), Verdict([], 2))
        drafter.observe([outcome], 1.0, 0.5)
    assert drafter.costs.draft(1, 8)[2] == pytest.approx(0.5, rel=0.1)


def test_one_long_sequence_does_not_decide_for_those_to_come() -> None:
    stats = AcceptanceStats(prior=(0.8,))
    for _ in range(200):
        stats.observe("poor", 1, 1, [])
    assert stats.expect("poor", 1)[0][0] < 0.1
    assert stats.expect("beside it", 1)[0][0] < 0.2
    stats.stop("poor")
    assert stats.expect("next", 1)[0][0] > 1.5 * 0.1
    for number in range(20):  # many do
        for _ in range(4):
            stats.observe(number, 1, 1, [])
        stats.stop(number)
    assert stats.expect("next", 1)[0][0] < 0.2


def test_a_trial_wakes_a_sleeping_drafter_which_learns_from_it() -> None:
    policy = AutomaticPolicy(DraftChooser(chooser().costs, acceptance=((0.01,), (0.01,)), can_sleep=True))
    for rows in range(1, 9):
        policy.costs.add_target("greedy", 1, 0, rows, 1 + 0.1 * rows)
    each = sequence()
    probes = 0
    for _ in range(200):
        plan = policy.plan([each])
        (k,) = plan.num_draft_tokens
        draft = Draft.chain([3] * k)
        each.token_ids += [3] * (k + 1)
        if plan.reason == "probe":
            probes += 1
            assert not policy.is_asleep
        cost = StepCost(k + 1, 0, 100, 0.25 * k, 1 + 0.1 * k, 0.0)
        outcome = DraftOutcome(each, k, draft, Verdict(list(range(k)), 3))
        policy.observe(cost, [outcome])
    assert probes and policy.plan([each]).num_draft_tokens[0] > 0  # all were accepted
