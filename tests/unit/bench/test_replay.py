"""Generations priced by a table: what they take depends on the table and on K, never on the clock."""

from __future__ import annotations

from typing import Any

import pytest

from doubles import FakeModel
from forerun import LLM, SamplingParams
from forerun.bench.replay import Costs, Priced, compare, plain_speed, replay
from forerun.bench.step_costs import Curve, DrafterCosts, drafter_costs, target_costs
from forerun.drafters import PromptLookup
from forerun.engine.budget import FixedBudget
from forerun.types import Draft, Drafter, Sequence

PROMPT = [5, 3, 8, 5, 3, 8, 5, 3]
PARAMS = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)


def llm() -> LLM:
    model: Any = FakeModel(order=1)  # soon repeats itself
    return LLM(model)


def costs(draft: float = 0.1) -> Costs:
    """A forward costs 1 and a tenth per row; a node costs `draft`."""
    return Costs(Curve([1, 65], [1.1, 7.5]), DrafterCosts(Curve([0, 64], [0.0, 64 * draft]), 0.0, Curve([0], [0.0])))


def test_a_curve_is_linear_between_its_points_and_flat_beyond() -> None:
    curve = Curve.of_medians({1: [2.0, 2.0, 9.0], 3: [4.0, 4.0], 2: [100.0]})
    assert [curve(count) for count in (0, 1, 2, 3, 9)] == [2, 2, 3, 4, 4]
    assert Curve.of_medians({7: [1.5]})(0) == 1.5
    assert Curve.of_medians({})(3) == 0


def test_a_run_costs_what_its_steps_cost() -> None:
    plain = llm()
    k4 = replay(plain, PromptLookup, FixedBudget(4), "K=4", costs(), [PROMPT], [PARAMS])
    k0 = replay(plain, PromptLookup, FixedBudget(0), "K=0", costs(), [PROMPT], [PARAMS])
    assert k0.tokens_per_second == pytest.approx(plain_speed(costs()))
    assert (k0.mean_acceptance_length, k0.mean_nodes, k0.idle) == (1, 0, 1)
    assert k4.idle == 0
    step = 1 + 0.1 + 0.2 * k4.mean_nodes  # the table is linear, so the average step costs what the average draft does
    assert k4.tokens_per_second == pytest.approx(k4.mean_acceptance_length / step)
    assert k4.tokens_per_second > 1.5 * k0.tokens_per_second


def test_the_inner_budget_sees_the_table_not_the_clock() -> None:
    seen = []

    class Watching(FixedBudget):
        def observe(self, cost: Any, outcomes: Any) -> None:
            seen.append(cost)

    replay(llm(), PromptLookup, Watching(4), "", costs(), [PROMPT], [PARAMS])
    verified = [cost for cost in seen if cost.num_prompt_rows == 0]
    assert all(cost.time_target == pytest.approx(1 + 0.1 * cost.num_rows) for cost in verified)
    assert all(cost.time_draft == pytest.approx(0.1 * (cost.num_rows - 1)) for cost in verified)


def test_auto_is_near_the_best_and_never_below_plain() -> None:
    good = compare(llm(), PromptLookup, "good", costs(), [PROMPT] * 4, [PARAMS] * 4, [1, 2, 4, 8])
    assert good.best.name != "plain"
    assert good.auto_over_best > 0.9
    assert good.auto_over_plain == pytest.approx(good.auto_over_best * good.best_over_plain)

    class Wrong:
        def start(self, sequence: Sequence) -> None: ...
        def commit(self, steps: Any) -> None: ...
        def stop(self, sequence: Sequence) -> None: ...
        def draft(self, sequences: Any, budgets: Any, price: float = 0.0) -> list[Draft]:
            return [Draft.chain([9] * min(budget, s.room)) for s, budget in zip(sequences, budgets)]

    def wrong() -> Drafter:
        return Wrong()

    bad = compare(llm(), wrong, "bad", costs(0.5), [PROMPT] * 4, [PARAMS] * 4, [1, 4])
    assert bad.best.name == "plain"
    assert bad.auto_over_plain > 0.9


def test_costs_are_measured() -> None:
    plain = llm()
    target = target_costs(plain.target, context=8, rounds=3, rows=(1, 4))
    assert target.counts == [1, 4]
    assert min(target.seconds) > 0
    measured = drafter_costs(plain, PromptLookup, [2, 4], PROMPT, PARAMS)
    assert max(measured.draft.counts) == 4
    assert min(measured.draft.seconds) > 0 and measured.idle > 0 and measured.rest(0) > 0


def test_prices_add_up_over_sequences() -> None:
    priced = Priced(FixedBudget(0), costs())
    assert (priced.seconds, priced.num_tokens) == (0, 0)
    priced.stop(Sequence(0, [1], 1, PARAMS))
