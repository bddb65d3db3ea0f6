"""Drafts that cost nothing are made first, and cut by what rows cost."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from forerun import LLM, SamplingParams
from forerun.config import COST_CACHE_VARIABLE
from forerun.engine import step_times
from forerun.engine.step_times import CALIBRATION_ROWS, calibrate, check_costs
from forerun.kernels.cpu import native
from forerun.models import LanguageModel, identity, load_model
from forerun.sampling import row_top
from forerun.speculation import CostModel, DraftOutcome, StepCost, TrimmingPolicy
from forerun.speculation.cost_model import forward_costs
from forerun.speculation.trimming import MOST_REST, PATIENCE, VAIN
from forerun.types import Draft, Sequence, Verdict
from forerun.utils.home import HOME_VARIABLE


@pytest.fixture(scope="module")
def target() -> LanguageModel:
    return load_model("bundled")


def sequences(count: int) -> list[Sequence]:
    return [Sequence(i, [1, 2], 2, SamplingParams(temperature=0), max_length=2**20) for i in range(count)]


def chain(*accept_probs: float) -> Draft:
    draft = Draft.chain(list(range(len(accept_probs))))
    draft.accept_probs = accept_probs
    return draft


def policy(seconds: Seq[float], batch: int = 1) -> TrimmingPolicy:
    """Return a policy that knows what so many rows cost, from `batch` on."""
    made = TrimmingPolicy()
    outcome = [DraftOutcome(each, 0, Draft.empty(), Verdict([], 0)) for each in sequences(batch)]
    for _ in range(8):
        for rows, each in enumerate(seconds, batch):
            made.observe(StepCost(rows, 0, batch, 0.0, each, 0.0), outcome)
    return made


def kept(made: TrimmingPolicy, *drafts: Draft) -> tuple[list[int], str]:
    asked = sequences(len(drafts))
    plan = made.trim(made.plan(asked), asked, drafts)
    return plan.num_draft_tokens, plan.reason


def test_as_many_nodes_are_kept_as_give_the_most_tokens_per_second() -> None:
    made = policy([1.0, 1.0, 1.3, 1.6, 1.9])
    # 1, 1.6, 1.95 / 1.3, 2.1 / 1.6 tokens a second: the second row is free, the third costs more than it gives
    assert kept(made, chain(0.6, 0.35, 0.15)) == ([1], "gain")
    assert kept(made, chain(0.98, 0.96, 0.94, 0.92)) == ([4], "gain")
    assert kept(policy([1.0, 1.5, 2.0]), chain(0.4, 0.3)) == ([0], "no gain")


def test_the_rows_of_a_crowd_go_to_its_most_probable_nodes() -> None:
    made = policy([2.0, 2.4, 2.8, 3.4, 4.4], batch=2)
    assert kept(made, chain(0.9, 0.8, 0.7), chain(0.3, 0.2)) == ([2, 0], "gain")
    assert kept(made, chain(0.2), chain(0.1)) == ([0, 0], "no gain")


def test_every_sequence_has_its_own_reason() -> None:
    """One whose draft is kept, one whose is not, one without a draft, one without room; then one that is not asked."""
    made, asked = policy([4.0, 4.4, 4.8, 5.2, 6.0], batch=4), sequences(4)
    asked[3].max_length = 3
    drafts = [chain(0.9), chain(0.1), Draft.empty(), Draft.empty()]
    plan = made.trim(made.plan(asked), asked, drafts)
    assert plan.num_draft_tokens == [1, 0, 0, 0]
    assert [plan.reason_of(index) for index in range(4)] == ["gain", "no gain", "nothing found", "no room"]
    while made.plan(asked[2:3]).num_draft_tokens[0]:  # it comes to its end
        made.observe(StepCost(1, 0, 2, 10.0, 1.0, 0.0), [DraftOutcome(asked[2], 0, Draft.empty(), Verdict([], 0))])
    plan = made.plan([asked[2], asked[0]])
    assert plan.num_draft_tokens[0] == 0 < plan.num_draft_tokens[1]
    assert [plan.reason_of(index) for index in range(2)] == ["nothing found", "gain"]


def test_nothing_is_drafted_where_nothing_is_found_or_known() -> None:
    assert kept(policy([1.0, 1.0]), chain()) == ([0], "nothing found")
    assert kept(TrimmingPolicy(), chain(0.9)) == ([0], "measuring")


@pytest.mark.parametrize("learns", [False, True])
@pytest.mark.parametrize(("search", "rest"), [(1e-6, 1), (0.01, 4), (10.0, MOST_REST)])
def test_vain_searches_take_a_small_share_of_the_time(search: float, rest: int, learns: bool) -> None:
    made, (sequence,) = policy([1.0, 1.0]), sequences(1)
    made = TrimmingPolicy(made.costs, can_sleep=True, learns=learns)
    searched = []
    for step in range(4 * MOST_REST):
        plan = made.plan([sequence])
        if any(plan.num_draft_tokens):
            searched.append(step)
            plan = made.trim(plan, [sequence], [Draft.empty()])
        assert made.rests == (step not in searched)
        assert made.is_asleep == (made.rests and len(searched) >= VAIN * learns)
        if made.rests:
            made.rest(1.0)
        else:
            outcome = DraftOutcome(sequence, 0, Draft.empty(), Verdict([], 0))
            made.observe(StepCost(1, 0, 2, search, 1.0, 0.0), [outcome])
        assert not made.is_asleep and not made.rests  # where prompts follow, the drafter is told of them
    assert {after - before for before, after in pairwise(searched[int(PATIENCE) :])} == {rest}


def test_who_enters_is_searched_for_while_others_rest() -> None:
    made, (one, other) = TrimmingPolicy(policy([1.0, 1.0]).costs, can_sleep=True), sequences(2)

    while made.plan([one]).num_draft_tokens[0]:
        outcome = DraftOutcome(one, 0, Draft.empty(), Verdict([], 0))
        made.observe(StepCost(1, 0, 2, 10.0, 1.0, 0.0), [outcome])
    made.rest(1.0)
    asked = made.plan([one, other]).num_draft_tokens
    assert (asked[0], asked[1] > 0) == (0, True)
    made.stop(other)
    made.rest(1.0)
    (third,) = sequences(1)
    assert made.plan([third]).num_draft_tokens[0] > 0


def test_the_shape_of_timed_forwards_is_known_before_the_first_draft() -> None:
    forwards, made = CostModel(), TrimmingPolicy()
    for rows, seconds in ((1, 1.0), (2, 1.0), (3, 2.0), (5, 4.0)):
        forwards.add_target("greedy", 1, 16, rows, seconds, 5)
    made.costs.begin_with(forwards)
    made.observe(StepCost(1, 0, 2, 0.0, 2.0, 0.0), [DraftOutcome(*sequences(1), 0, Draft.empty(), Verdict([], 0))])
    assert kept(made, chain(0.9, 0.9, 0.9)) == ([1], "gain")


def test_forwards_are_timed_once(target: LanguageModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("forerun.speculation.cost_model._known", {})
    calibrate(target)
    costs = forward_costs(identity(target)).costs
    assert all(costs._target["greedy", 1].weight(rows) > 0 for rows in CALIBRATION_ROWS[:3])
    monkeypatch.setattr(type(target), "forward", None)
    calibrate(target)


@pytest.mark.parametrize("share", [1.0, 0.5])
def test_what_a_busy_machine_has_measured_is_measured_again(
    share: float, target: LanguageModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(COST_CACHE_VARIABLE, "1")
    monkeypatch.setenv(HOME_VARIABLE, str(tmp_path))

    def begin() -> None:
        monkeypatch.setattr("forerun.speculation.cost_model._known", {})

    begin()
    seconds = {1: [(1.0, 0), (9.0, 0)], 5: [(2.0, 0)]}
    monkeypatch.setattr(step_times, "_time_rows", lambda *_, **__: seconds)
    stored = forward_costs(identity(target))
    for rows, ((found, _), *_) in seconds.items():
        stored.costs.add_target("greedy", 1, 16, rows, 1 + share * (found - 1), 5)
    stored.save()
    check_costs(target)  # this process has measured them
    assert forward_costs(identity(target)).costs is stored.costs
    begin()
    check_costs(target)
    assert (forward_costs(identity(target)).costs.target("greedy", 1, 16) is None) is (share != 1)


def test_a_draft_cut_short_is_its_first_nodes() -> None:
    draft = Draft([5, 6, 7], [-1, 0, 0], torch.ones(4, 9), accept_probs=[0.9, 0.5, 0.2], sources=("a", "b", "a"))
    first = draft.first(2)
    assert (first.ids, list(first.parents), first.num_candidates) == ([5, 6], [-1, 0], 2)
    assert first.probs is not None and first.probs.shape == (3, 9)
    assert (list(first.accept_probs), first.sources) == ([0.9, 0.5], ("a", "b"))
    assert draft.first(3) is draft and len(draft.first(0)) == 0


@pytest.mark.parametrize("width", [256 * 40, 256 * 40 + 1, 300])
def test_the_largest_values_of_a_row(width: int) -> None:
    native()
    values = torch.randn(5, width, generator=torch.Generator().manual_seed(0))
    values[1], values[2] = values[1].sort().values, -torch.inf
    values[3, ::3] = torch.nan
    for count in (1, 3, 8):
        found = row_top(values, count)
        assert torch.equal(found[[0, 1, 4]], values[[0, 1, 4]].topk(count).indices)
        assert found.min() >= 0 and found.max() < width
        assert torch.equal(row_top(values.double(), count)[0], found[0])


def test_copies_are_exact_and_judged_though_they_are_cut(target: LanguageModel) -> None:
    plain, copying = LLM(target, None), LLM(target, "suffix")
    params = SamplingParams(temperature=0, max_tokens=48, ignore_eos=True)
    prompt = [list(range(40, 60)) * 4]
    assert copying.generate(prompt, params)[0].token_ids == plain.generate(prompt, params)[0].token_ids
