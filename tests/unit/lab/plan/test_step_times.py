"""Steps timed in the engine."""

from __future__ import annotations

from typing import Any

from doubles import FakeModel
from forerun import SamplingParams
from forerun.drafters import PromptLookup
from forerun.engine.step_times import step_costs, verified_steps

PROMPT = [5, 3, 8, 5, 3, 8, 5, 3]
PARAMS = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)


def test_every_k_has_the_parts_of_a_step() -> None:
    model: Any = FakeModel(order=1)  # soon repeats itself
    costs = step_costs(model, None, PromptLookup, 3, PROMPT, PARAMS, rounds=2)
    assert costs.most == 3 and costs.plain > 0
    assert all(value > 0 for part in (costs.target, costs.rest) for value in part)
    assert all(value > 0 for value in costs.draft[1:])


def test_the_steps_are_those_that_gave_tokens_at_this_k() -> None:
    model: Any = FakeModel(order=1)
    plain = list(verified_steps(model, None, None, 0, PROMPT, PARAMS))
    drafted = list(verified_steps(model, None, PromptLookup(), 4, PROMPT, PARAMS))
    assert sum(step.num_tokens for step in plain) == sum(step.num_tokens for step in drafted) == 24
    assert len(drafted) < len(plain) == 24
    assert max(step.num_draft_tokens for step in drafted) == 4
