"""Generations priced by a table: what they take depends on the table and on K, never on the clock."""

from __future__ import annotations

from typing import Any

import pytest

from doubles import FakeModel, Scripted
from forerun import LLM, SamplingParams
from forerun.drafters import Drafter, Hybrid, PromptLookup
from forerun.lab.bench.priced_run import EchoModel, Setting, priced_run
from forerun.lab.bench.replay import MedianCurve, replay_counts, replayed_costs, sources_of, target_costs
from forerun.models import Rows
from forerun.speculation import CostModel, FixedPolicy, TrimmingPolicy
from forerun.types import Draft, Sequence

PROMPT = [5, 3, 8, 5, 3, 8, 5, 3]
PARAMS = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)


def llm() -> LLM:
    model: Any = FakeModel(order=1)  # soon repeats itself
    return LLM(model, None)


def setting(drafter: Any = PromptLookup, draft: float = 0.1, idle: float = 0.0, echo: bool = False) -> Setting:
    """A forward costs 1 and a tenth per row; a draft costs `draft` a node up to four, a step of the drafter `idle`."""
    costs = CostModel()
    for rows in (1, 2, 3, 4, 5, 6, 8, 12, 16, 32, 64):
        costs.add_target("greedy", 1, 0, rows, 1 + 0.1 * rows, 9)
    costs.add_idle(idle)
    for k in (1, 4):
        costs.add_draft(1, k, idle + k * draft)
    return Setting(llm(), lambda: drafter(), costs, echo)


def test_a_curve_is_linear_between_its_points_and_flat_beyond() -> None:
    curve = MedianCurve.of_medians({1: [2.0, 2.0, 9.0], 3: [4.0, 4.0], 2: [100.0]})
    assert [curve(count) for count in (0, 1, 2, 3, 9)] == [2, 2, 3, 4, 4]
    assert MedianCurve.of_medians({7: [1.5]})(0) == 1.5
    assert MedianCurve.of_medians({})(3) == 0


def test_a_run_costs_what_its_steps_cost() -> None:
    k4 = priced_run(setting(), FixedPolicy(4), "K=4", [PROMPT], [PARAMS])
    k0 = priced_run(setting(), FixedPolicy(0), "K=0", [PROMPT], [PARAMS])
    assert k0.tokens_per_second == pytest.approx(setting().plain_speed)
    assert (k0.mean_acceptance_length, k0.mean_nodes, k0.idle) == (1, 0, 1)
    assert k4.idle == 0
    step = 1 + 0.1 + 0.1 * k4.mean_nodes + 0.4  # rows are linear, so the average step costs what the average draft does
    assert k4.tokens_per_second == pytest.approx(k4.mean_acceptance_length / step, rel=0.02)
    assert k4.tokens_per_second > 1.5 * k0.tokens_per_second


def test_the_policy_sees_the_costs_not_the_clock() -> None:
    seen = []

    class Watching(FixedPolicy):
        def observe(self, cost: Any, outcomes: Any) -> None:
            seen.append(cost)

    priced_run(setting(), Watching(4), "", [PROMPT], [PARAMS])
    verified = [cost for cost in seen if cost.num_prompt_rows == 0]
    assert all(cost.time_target == pytest.approx(1 + 0.1 * cost.num_rows, rel=0.05) for cost in verified)
    assert all(cost.time_draft == pytest.approx(0.4, rel=0.01) for cost in verified)


def test_a_drafter_that_is_not_asked_still_costs_its_upkeep() -> None:
    idle = priced_run(setting(idle=0.4), FixedPolicy(0), "K=0", [PROMPT], [PARAMS])
    assert idle.tokens_per_second == pytest.approx(1 / 1.5)


def test_a_hybrid_is_priced_by_what_its_sources_cost_and_chooses_by_it() -> None:
    """Two runs agree to the last bit, although wall-clock times differ; a dear source is left to the copies."""
    assert sources_of("hybrid:sources=suffix+prompt-lookup,mode=first") == ["suffix", "prompt-lookup"]
    assert sources_of("suffix") == ["suffix"]
    reached = {}
    for draft in (0.01, 9.0):
        costs = setting(draft=draft).costs

        def make(costs: CostModel = costs) -> Drafter:
            hybrid = Hybrid([PromptLookup(), Scripted(guess)], names=["copies", "guesses"])
            hybrid.use_costs({"guesses": costs})
            return hybrid

        made = Setting(llm(), make, costs)
        policies = [TrimmingPolicy(CostModel.restored(costs.state())) for _ in range(2)]
        runs = [priced_run(made, policy, "auto", [PROMPT] * 3, [PARAMS] * 3) for policy in policies]
        assert runs[0] == runs[1]
        reached[draft] = runs[0].tokens_per_second / made.plain_speed
    assert reached[0.01] > 0.85 * reached[9.0] > 1  # until the guesses are known to be worse


def guess(sequence: Sequence, most: int) -> Draft:
    """Repeat what stood three tokens before."""
    return Draft.chain((sequence.token_ids[-3:] * most)[:most])


def test_auto_is_near_the_best_and_never_below_plain() -> None:
    good = replay_counts(setting(), "good", [PROMPT] * 4, [PARAMS] * 4, [1, 2, 4, 8])
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

    bad = replay_counts(setting(wrong, 0.5), "bad", [PROMPT] * 4, [PARAMS] * 4, [1, 4])
    assert bad.best.name == "plain"
    assert bad.auto_over_plain > 0.97


def test_costs_are_measured() -> None:
    plain = llm()
    target = target_costs(plain.target, context=8, rounds=3, rows=(1, 4))
    assert target.counts == [1, 4]
    assert min(target.seconds) > 0
    measured = replayed_costs(plain.target, PromptLookup(), target)
    assert measured.largest_draft == 4
    assert measured.draft(1, 4)[4] > 0
    rows = measured.target("greedy", 1, 0)
    assert rows is not None and rows[1] > target(1)


@pytest.mark.parametrize("params", [PARAMS, SamplingParams(temperature=1.2, seed=3, max_tokens=50)])
def test_an_echo_gives_the_verdicts_of_the_target(params: SamplingParams) -> None:
    prompts = [PROMPT, PROMPT[:3], [7, 7, 7]]
    real = replay_counts(setting(), "real", prompts, [params] * 3, [1, 4, 9])
    echo = replay_counts(setting(echo=True), "echo", prompts, [params] * 3, [1, 4, 9])
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
