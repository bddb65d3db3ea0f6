"""The automatic policy in worlds whose best choice is known. Time is counted, never measured."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import numpy as np
import pytest

from forerun import SamplingParams
from forerun.config import MAX_NUM_DRAFT_TOKENS
from forerun.speculation import AutomaticPolicy, CostModel, DraftChooser, DraftOutcome, FixedPolicy, StepCost
from forerun.types import Draft, Sequence, Verdict
from worlds import GREEDY, World, best_fixed, calibrated, live

NUM_STEPS = 500


def flat(rows: int) -> float:
    return 1 + 0.01 * max(0, rows - 4)


def steep(rows: int) -> float:
    """Up to four rows cost the same, as kernels pad."""
    return 1 + 0.12 * max(0, rows - 4)


def line(rows: int) -> float:
    return 1 + 0.06 * (rows - 1)


def chain(each: float) -> object:
    """A model that drafts token by token; more sequences cost a little more."""
    return lambda num_draft_tokens, asked: each * num_draft_tokens * (1 + 0.05 * (asked - 1))


WORLDS = {
    "cheap drafts": World(lambda s, t, d: 0.8, chain(0.05), flat),
    "nearly always right": World(lambda s, t, d: 0.95, chain(0.02), flat),
    "costly drafts": World(lambda s, t, d: 0.8, chain(0.3), flat),
    "costly rows": World(lambda s, t, d: 0.8, chain(0.05), steep),
    "poor drafts": World(lambda s, t, d: 0.4, chain(0.1), line),
    "not worth it": World(lambda s, t, d: 0.1, chain(0.2), line),
    "always wrong": World(lambda s, t, d: 0.0, chain(0.1), flat),
    "always wrong and slow": World(lambda s, t, d: 0.0, lambda k, asked: 8 + 2 * k, flat),
    "seldom found": World(lambda s, t, d: 0.9, lambda k, asked: 0.01, line, found=lambda s, t: 0.15),
    "in bursts": World(lambda s, t, d: 0.95 if t // 80 % 2 else 0.1, lambda k, asked: 0.01, line),
    "easy and hard": World(lambda s, t, d: 0.9 if s % 2 else 0.2, chain(0.1), flat),
    "in one go": World(lambda s, t, d: 0.8 * 0.95**d, lambda k, asked: 0.3, flat),
    "eight": World(lambda s, t, d: 0.7, chain(0.08), lambda rows: 1 + 0.03 * rows, batch=8),
    "eight, easy and hard": World(lambda s, t, d: 0.9 if s % 2 else 0.1, chain(0.05), line, batch=8),
    "thirty-two": World(lambda s, t, d: 0.6, chain(0.08), line, batch=32),
}
FEW = (0, 1, 2, 3, 4, 5, 6, 8, 12, 16, 24, 32)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", WORLDS)
def test_within_three_per_cent_of_the_best_fixed_number(name: str) -> None:
    """Learning of acceptance included. A policy that knew the world from the start would reach 1."""
    world = WORLDS[name]
    num_steps = NUM_STEPS if world.batch == 1 else NUM_STEPS // 2
    best = best_fixed(world, num_steps, FEW if world.batch == 1 else FEW[:8])
    lived = live(world, calibrated(world), num_steps, seed=1)
    assert lived.speed() >= 0.97 * best
    plain = live(world, FixedPolicy(0), 100).speed()
    assert lived.speed(20) >= 0.985 * plain  # each sequence is considered anew


@pytest.mark.parametrize("name", ["cheap drafts", "costly rows", "poor drafts", "always wrong", "eight"])
def test_without_calibration_costs_are_learned(name: str) -> None:
    world = WORLDS[name]
    assert live(world, AutomaticPolicy(), NUM_STEPS, seed=1).speed() >= 0.96 * best_fixed(world, NUM_STEPS, FEW[:8])


def test_sequences_of_one_batch_are_told_apart() -> None:
    world = WORLDS["eight, easy and hard"]
    assert live(world, AutomaticPolicy(), 250).speed() > 1.03 * best_fixed(world, 250, FEW[:8])


def test_noise_costs_little_and_a_hiccup_does_not_stick() -> None:
    quiet = WORLDS["costly rows"]
    noisy = World(quiet.accept, quiet.draft, quiet.target, noise=0.15)
    assert live(noisy, AutomaticPolicy(), NUM_STEPS).speed() >= 0.94 * best_fixed(quiet, NUM_STEPS, FEW)

    steps = iter(range(10**6))

    def hiccups(num_draft_tokens: int, asked: int) -> float:
        return 0.05 * num_draft_tokens * (20 if next(steps) % 25 == 3 else 1)

    hiccuping = World(quiet.accept, hiccups, quiet.target)
    num_draft_tokens = live(hiccuping, AutomaticPolicy(), NUM_STEPS).num_draft_tokens
    assert np.mean([own[0] == 0 for own in num_draft_tokens[20:]]) < 0.1


@pytest.mark.parametrize("before", [0.0, 0.9])
def test_a_change_of_regime_is_noticed(before: float) -> None:
    """Both ways: from drafts that never pay to drafts that do, and back."""
    after = 0.9 - before
    turn = 16 if before else 4  # a few hundred steps either way
    world = World(lambda s, t, d: before if s < turn else after, chain(0.05), flat)
    lived = live(world, AutomaticPolicy(), 1200)
    first = (
        [own[0] for own in lived.num_draft_tokens[100:200]]
        if before
        else [own[0] for own in lived.num_draft_tokens[200:400]]
    )
    last = [own[0] for own in lived.num_draft_tokens[-200:]]
    few, many = (last, first) if before else (first, last)
    assert np.mean([own > 0 for own in few]) < 0.3
    assert np.mean(many) > 3


def test_probing_is_bounded_by_what_it_costs() -> None:
    for seconds in (0.1, 1.0, 8.0):
        world = World(lambda s, t, d: 0.0, lambda k, asked, own=seconds: own * k, flat)
        lived = live(world, AutomaticPolicy(), 3000)
        assert lived.speed(20) >= 0.985
        assert any(own[0] > 0 for own in lived.num_draft_tokens[1500:])  # but it never gives up


def test_a_crowd_tries_nothing_that_could_not_even_pay_if_it_all_came_true(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(lambda s, t, d: 0.9, chain(0.1), lambda rows: 1.0 * rows, batch=16)
    policy = AutomaticPolicy(DraftChooser(calibrated(world).costs, can_sleep=True))
    made, choose = [], policy.chooser.choose
    monkeypatch.setattr(policy.chooser, "choose", lambda *given: made.append(1) or choose(*given))
    assert not any(any(own) for own in live(world, policy, 1000).num_draft_tokens)
    assert len(made) < 1000 / 3


def test_no_flapping() -> None:
    """Where plain decoding and drafting are as good as each other, one of them is kept."""
    world = World(lambda s, t, d: 0.5, lambda k, asked: 0.48 * k, flat)
    num_draft_tokens = [own[0] for own in live(world, AutomaticPolicy(), 1000).num_draft_tokens[100:]]
    changes = sum((a == 0) != (b == 0) for a, b in pairwise(num_draft_tokens))
    assert changes < 250


def test_the_price_is_what_a_node_must_be_worth() -> None:
    """At the optimum tokens per second times what one more node costs: here a node costs 0.05 + 0.01 of a second."""
    policy = calibrated(WORLDS["cheap drafts"])
    live(WORLDS["cheap drafts"], policy, 300)
    sequence = Sequence(10**6, [0], 1, GREEDY, max_length=100)
    plan = next(plan for plan in (policy.plan([sequence]) for _ in range(20)) if plan.min_acceptance_prob > 0)
    rate = live(WORLDS["cheap drafts"], AutomaticPolicy(), 300).speed()
    assert plan.min_acceptance_prob == pytest.approx(rate * 0.06, rel=0.35)
    assert plan.num_draft_tokens[0] > 1


def test_nothing_beyond_the_room() -> None:
    policy = AutomaticPolicy()
    live(WORLDS["nearly always right"], policy, 100)
    for room in (-1, 0, 1, 3):
        sequence = Sequence(10**6, [0] * 8, 1, GREEDY, max_length=9 + room)
        assert 0 <= policy.plan([sequence]).num_draft_tokens[0] <= max(0, room)


def test_nothing_beyond_the_most() -> None:
    world = World(lambda s, t, d: 1.0, lambda k, asked: 0.0, lambda rows: 1.0, length=4000)
    lived = live(world, AutomaticPolicy(), 100)
    assert max(own[0] for own in lived.num_draft_tokens) == MAX_NUM_DRAFT_TOKENS
    assert max(own[0] for own in live(world, AutomaticPolicy(DraftChooser(max_tokens=6)), 60).num_draft_tokens) == 6


def test_steps_with_prompt_chunks_teach_no_costs() -> None:
    policy = AutomaticPolicy()
    sequence = Sequence(0, [1], 1, GREEDY, max_length=100)
    outcome = DraftOutcome(sequence, 2, Draft.chain([1, 2]), Verdict([0], 3))
    policy.observe(StepCost(260, 257, 5, 9.0, 9.0, 0.0), [outcome])
    assert policy.costs.target("greedy", 1, 5) is None
    assert policy.costs.largest_draft == 0


def test_a_step_after_a_prompt_changes_no_cost_that_is_known() -> None:
    policy = AutomaticPolicy()
    outcome = DraftOutcome(Sequence(0, [1], 1, GREEDY, max_length=100), 0, Draft.empty(), Verdict([], 1))
    for after_prompt, seconds in (*[(False, 1.0)] * 20, *[(True, 2.0)] * 200):
        policy.observe(StepCost(1, 0, 1, 0.0, seconds, 0.0, is_after_prompt=after_prompt), [outcome])
    known = policy.costs.target("greedy", 1, 1)
    assert known is not None and known[1] == pytest.approx(1.0)


def test_greedy_and_drawn_requests_have_costs_of_their_own() -> None:
    policy = AutomaticPolicy()
    for number, (params, seconds) in enumerate(((GREEDY, 1.0), (SamplingParams(), 2.0))):
        sequence = Sequence(number, [1], 1, params, max_length=100)
        for _ in range(10):
            policy.observe(
                StepCost(1, 0, 1, 0.0, seconds, 0.0), [DraftOutcome(sequence, 0, Draft.empty(), Verdict([], 1))]
            )
    greedy, drawn = policy.costs.target("greedy", 1, 1), policy.costs.target("drawn", 1, 1)
    assert greedy is not None and drawn is not None
    assert drawn[1] / greedy[1] == pytest.approx(2, rel=0.2)


def test_state_goes_with_the_sequence() -> None:
    policy = AutomaticPolicy()
    world = World(lambda s, t, d: 0.5, chain(0.1), flat, batch=4, length=20)
    live(world, policy, 400)
    assert len(policy.chooser._uses) <= 4
    assert len(policy.chooser.acceptance["greedy"]._own) <= 4


def test_plans_stand_for_some_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    policy, made = AutomaticPolicy(), []
    choose = policy.chooser.choose
    monkeypatch.setattr(policy.chooser, "choose", lambda *given: made.append(1) or choose(*given))
    live(WORLDS["cheap drafts"], policy, 1000)
    assert len(made) < 1000 / 3


def test_trials_become_rarer_and_quick_again_where_one_comes_true() -> None:
    lived = live(WORLDS["always wrong"], calibrated(WORLDS["always wrong"]), 4000)
    tried = [own[0] > 0 for own in lived.num_draft_tokens]
    assert sum(tried[100:1100]) > sum(tried[3000:]) > 0


PROMPTED = World(lambda s, t, d: 0.8, lambda k, asked: 0.1 * k, lambda rows: 1 + 0.02 * rows, prompt=200, catch_up=0.01)
"""Following a prompt costs two plain steps, a draft of four tokens 0.4."""


@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("make", [calibrated, lambda world: AutomaticPolicy()])
def test_a_costly_first_draft_does_not_end_drafting(batch: int, make: Callable[[World], AutomaticPolicy]) -> None:
    world = World(**{**PROMPTED.__dict__, "batch": batch})
    lived = live(world, make(world), 600)
    assert lived.speed() >= 0.95 * best_fixed(world, 600)
    assert np.mean([any(own) for own in lived.num_draft_tokens[100:]]) > 0.9


def test_drafting_does_not_begin_where_the_rest_is_too_short_for_it() -> None:
    """Of prompts of 4,000 tokens and answers of 20."""
    world = World(**{**PROMPTED.__dict__, "prompt": 4000, "length": 20})
    plain = live(world, FixedPolicy(0), 3000).speed()
    assert live(world, FixedPolicy(4), 3000).speed() < 0.7 * plain
    assert live(world, calibrated(world), 3000).speed() >= 0.985 * plain


def test_a_drafter_that_follows_no_more_than_some_tokens_is_not_held_for_a_long_prompt() -> None:
    costs = calibrated(PROMPTED).costs
    sequence = Sequence(10**6, [0] * 5000, 4999, GREEDY, max_length=5100)
    assert AutomaticPolicy(DraftChooser(costs)).plan([sequence]).reason == "no gain"
    assert AutomaticPolicy(DraftChooser(costs, follows=64)).plan([sequence]).reason == "gain"


def test_copies_that_are_worth_more_are_not_replaced() -> None:
    chooser = DraftChooser(calibrated(WORLDS["cheap drafts"]).costs, acceptance=((0.9,), ()))
    sequences = [Sequence(i, [0] * 8, 1, GREEDY, max_length=1000) for i in range(2)]
    prices = [1 + 0.01 * rows for rows in range(200)]
    both = chooser.choose(sequences, prices)
    assert min(both) > 2
    one = chooser.choose(sequences, prices, [[0.99, 0.98, 0.97, 0.96, 0.95, 0.94, 0.93, 0.92, 0.91], []])
    assert one[0] == 0 and one[1] > 2
    assert chooser.choose(sequences[:1], prices, [[0.99**i for i in range(1, 30)]]) == [0]


def test_a_plan_gives_every_sequence_its_number_while_it_stands() -> None:
    """Room shrinks within a standing plan."""
    policy = AutomaticPolicy()
    live(WORLDS["nearly always right"], policy, 200)
    sequence = Sequence(10**6, [0] * 8, 1, GREEDY, max_length=60)
    for _ in range(6):
        room = sequence.room
        (own,) = policy.plan([sequence]).num_draft_tokens
        assert own <= room
        sequence.token_ids += [0] * 10
        sequence.token_ids = sequence.token_ids[:59]


def test_a_window_costs_all_its_rows_whether_or_not_they_are_candidates() -> None:
    costs = CostModel()
    costs.add_draft(1, 8, 1e-6)
    chooser = DraftChooser(costs, fixed_length=8)
    sequence = Sequence(0, [1] * 8, 1, GREEDY, max_length=10**6)
    prices = [1.0 + 0.3 * rows for rows in range(9)]
    for _ in range(40):  # no n-gram was found to go with the window
        assert chooser.choose([sequence], prices)[0] in (0, 8)
        outcome = DraftOutcome(sequence, 8, Draft([1] * 8, list(range(-1, 7)), num_candidates=0), Verdict([], 1))
        chooser.observe([outcome], 1.0, 1e-6)
    assert chooser.choose([sequence], prices) == [0]
