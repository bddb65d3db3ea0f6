"""Generations priced by a table: what they take depends on the table and on K, never on the clock."""

from __future__ import annotations

from typing import Any

import pytest

from doubles import FakeModel
from forerun import LLM, SamplingParams
from forerun.drafters import Drafter, PromptLookup
from forerun.engine.step_times import CostCurve, DrafterCosts, drafter_costs, target_costs
from forerun.lab.bench.priced_run import EchoModel, PricedDrafter, Setting, priced_run
from forerun.lab.bench.replay import compare, priced, sources_of
from forerun.models import Rows
from forerun.speculation import AutomaticPolicy, FixedPolicy
from forerun.types import Draft, Sequence

PROMPT = [5, 3, 8, 5, 3, 8, 5, 3]
PARAMS = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)


def llm() -> LLM:
    model: Any = FakeModel(order=1)  # soon repeats itself
    return LLM(model, None)


def setting(drafter: Any = PromptLookup, draft: float = 0.1, idle: float = 0.0, echo: bool = False) -> Setting:
    """A forward costs 1 and a tenth per row; a node costs `draft`, a step of the drafter `idle` in any case."""
    costs = DrafterCosts(CostCurve([0, 64], [idle, idle + 64 * draft]), idle, CostCurve([0], [0.0]))
    return Setting(
        llm(), lambda clock: PricedDrafter(drafter(), costs, clock), CostCurve([1, 65], [1.1, 7.5]), costs.rest, echo
    )


def test_a_curve_is_linear_between_its_points_and_flat_beyond() -> None:
    curve = CostCurve.of_medians({1: [2.0, 2.0, 9.0], 3: [4.0, 4.0], 2: [100.0]})
    assert [curve(count) for count in (0, 1, 2, 3, 9)] == [2, 2, 3, 4, 4]
    assert CostCurve.of_medians({7: [1.5]})(0) == 1.5
    assert CostCurve.of_medians({})(3) == 0


def test_a_run_costs_what_its_steps_cost() -> None:
    k4 = priced_run(setting(), FixedPolicy(4), "K=4", [PROMPT], [PARAMS])
    k0 = priced_run(setting(), FixedPolicy(0), "K=0", [PROMPT], [PARAMS])
    assert k0.tokens_per_second == pytest.approx(setting().plain_speed)
    assert (k0.mean_acceptance_length, k0.mean_nodes, k0.idle) == (1, 0, 1)
    assert k4.idle == 0
    step = 1 + 0.1 + 0.2 * k4.mean_nodes  # the table is linear, so the average step costs what the average draft does
    assert k4.tokens_per_second == pytest.approx(k4.mean_acceptance_length / step)
    assert k4.tokens_per_second > 1.5 * k0.tokens_per_second


def test_the_inner_budget_sees_the_table_not_the_clock() -> None:
    seen = []

    class Watching(FixedPolicy):
        def observe(self, cost: Any, outcomes: Any) -> None:
            seen.append(cost)

    priced_run(setting(), Watching(4), "", [PROMPT], [PARAMS])
    verified = [cost for cost in seen if cost.num_prompt_rows == 0]
    assert all(cost.time_target == pytest.approx(1 + 0.1 * cost.num_rows) for cost in verified)
    assert all(cost.time_draft == pytest.approx(0.1 * (cost.num_rows - 1)) for cost in verified)


def test_a_drafter_that_is_not_asked_still_costs_its_upkeep() -> None:
    idle = priced_run(setting(idle=0.4), FixedPolicy(0), "K=0", [PROMPT], [PARAMS])
    assert idle.tokens_per_second == pytest.approx(1 / 1.5)
    asked = priced_run(setting(idle=0.4), FixedPolicy(4), "K=4", [PROMPT], [PARAMS])
    assert asked.tokens_per_second == pytest.approx(asked.mean_acceptance_length / (1.5 + 0.2 * asked.mean_nodes))


def test_a_hybrid_decides_by_the_virtual_clock() -> None:
    """Two runs of a hybrid agree to the last bit, although wall-clock times differ."""
    plain = llm()
    costs = {
        name: DrafterCosts(CostCurve([0, 64], [0.0, 3.0]), 0.0, CostCurve([0], [0.0]))
        for name in ("suffix", "prompt-lookup")
    }
    spec = "hybrid:sources=suffix+prompt-lookup,mode=first"
    assert sources_of(spec) == (["suffix", "prompt-lookup"], "first")
    assert sources_of("suffix") == (["suffix"], "")
    hybrid = Setting(
        plain, lambda clock: priced(plain, spec, costs, clock), CostCurve([1, 65], [1.1, 7.5]), CostCurve([0], [0.0])
    )
    runs = [priced_run(hybrid, AutomaticPolicy(), "auto", [PROMPT] * 3, [PARAMS] * 3) for _ in range(2)]
    assert runs[0] == runs[1]
    assert runs[0].tokens_per_second > hybrid.plain_speed


def test_auto_is_near_the_best_and_never_below_plain() -> None:
    good = compare(setting(), "good", [PROMPT] * 4, [PARAMS] * 4, [1, 2, 4, 8])
    assert good.best.name != "plain"
    assert good.auto_over_best > 0.9
    assert good.auto_over_plain == pytest.approx(good.auto_over_best * good.best_over_plain)

    class Wrong(Drafter):
        def start(self, sequence: Sequence) -> None: ...
        def commit(self, steps: Any) -> None: ...
        def stop(self, sequence: Sequence) -> None: ...
        def draft(self, sequences: Any, num_draft_tokens: Any, min_acceptance_prob: float = 0.0) -> list[Draft]:
            return [Draft.chain([9] * min(k, s.room)) for s, k in zip(sequences, num_draft_tokens)]

    def wrong() -> Drafter:
        return Wrong()

    bad = compare(setting(wrong, 0.5), "bad", [PROMPT] * 4, [PARAMS] * 4, [1, 4])
    assert bad.best.name == "plain"
    assert bad.auto_over_plain > 0.9


def test_costs_are_measured() -> None:
    plain = llm()
    target = target_costs(plain.target, context=8, rounds=3, rows=(1, 4))
    assert target.counts == [1, 4]
    assert min(target.seconds) > 0
    measured = drafter_costs(plain.target, plain.tokenizer, PromptLookup, [2, 4], PROMPT, PARAMS)
    assert max(measured.draft.counts) == 4
    assert min(measured.draft.seconds) > 0 and measured.idle > 0 and measured.rest(0) > 0


@pytest.mark.parametrize("params", [PARAMS, SamplingParams(temperature=1.2, seed=3, max_tokens=50)])
def test_an_echo_gives_the_verdicts_of_the_target(params: SamplingParams) -> None:
    prompts = [PROMPT, PROMPT[:3], [7, 7, 7]]
    real = compare(setting(), "real", prompts, [params] * 3, [1, 4, 9])
    echo = compare(setting(echo=True), "echo", prompts, [params] * 3, [1, 4, 9])
    assert echo.fixed == real.fixed
    assert echo.auto == real.auto
    assert real.fixed[1].mean_nodes > 0


def test_an_echo_describes_itself_as_the_model_and_nothing_more() -> None:
    model: Any = FakeModel(eos_token_ids=[3])
    echo = EchoModel(model)
    described = (
        "name",
        "vocab_size",
        "context_length",
        "eos_token_ids",
        "dtype",
        "device",
        "num_parameters",
        "exactness",
        "adapter",
    )
    assert all(getattr(echo, name) == getattr(model, name) for name in described)
    with pytest.raises(AttributeError):
        echo.table  # type: ignore[attr-defined]  # noqa: B018


def test_an_echo_follows_its_text_along_branches_and_earlier_scratch() -> None:
    echo = EchoModel(FakeModel())
    echo.text = [5, 3, 8, 7, 2, 6]
    cache = echo.new_cache()

    def said(token_ids: list[int], parents: list[int] | None = None, num_logits: int | None = None) -> list[int]:
        logits = echo.forward([Rows(cache, token_ids, parents, num_logits)]).logits
        assert logits.shape[1] == 11
        return logits.argmax(-1).tolist()

    assert said([5, 3], num_logits=1) == [8]
    cache.commit([0, 1])
    assert said([8, 9, 7, 5], [-1, 0, 0, 1]) == [7, 0, 2, 0]  # the last two: on the text, and below a wrong token
    assert said([2], [2]) == [6]
    assert said([6]) == [0]  # nothing follows the end
    cache.commit([0, 2, 4, 5])
    assert (cache.tokens, cache.num_scratch) == (echo.text, 0)
    cache.truncate(3)
    assert said([7]) == [2]
