"""Several drafters in one engine: each request has its own, and the text is the same with every one of them."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import replace
from typing import Any

import pytest

from doubles import FakeModel, Scripted, adversaries
from forerun import LLM, DrafterError, SamplingError, SamplingParams
from forerun.drafters.hybrid.by_request import ByRequest
from forerun.speculation import AutomaticPolicy, FixedPolicy, PolicyByRequest
from forerun.types import Draft, Needs, Sequence

VOCAB = 11
PROMPTS = [[i % VOCAB, (3 * i + 1) % VOCAB, i // VOCAB] for i in range(12)]


def pair(fake: FakeModel) -> dict[str, Scripted]:
    references = {tuple(prompt): fake.greedy(prompt, 40) for prompt in PROMPTS}
    drafters = adversaries(references, VOCAB)
    return {"right": drafters["right"], "wrong": drafters["wrong"], "random": drafters["random"]}


def asks() -> list[SamplingParams]:
    """Generate greedy and seeded requests that choose a drafter, none, or another K."""
    choices: list[dict[str, Any]] = [
        {},
        {"drafter": "wrong"},
        {"drafter": "random"},
        {"drafter": "none"},
        {"num_draft_tokens": 0},
        {"num_draft_tokens": 2, "drafter": "right"},
    ]
    return [
        SamplingParams(max_tokens=20, **(kind | choices[number % 6]))
        for number, kind in enumerate([{"temperature": 0}] * 6 + [{"seed": 4, "temperature": 0.9}] * 6)
    ]


def tokens(llm: LLM, params: Seq[SamplingParams]) -> list[list[int]]:
    return [generation.token_ids for generation in llm.generate(PROMPTS, params)]


@pytest.mark.parametrize("k", [3, "auto"])
def test_the_text_is_that_of_plain_decoding(k: Any) -> None:
    fake: Any = FakeModel()
    drafters = pair(fake)
    llm = LLM(fake, ByRequest(drafters), num_draft_tokens=k, max_batch=8)
    plain = LLM(FakeModel())  # type: ignore[arg-type]
    expected = tokens(plain, [replace(each, drafter=None, num_draft_tokens=None) for each in asks()])
    assert tokens(llm, asks()) == expected
    assert [llm.generate(prompt, each).token_ids for prompt, each in zip(PROMPTS, asks())] == expected
    assert all(not drafter.active for drafter in drafters.values())


def test_each_request_has_its_drafter() -> None:
    fake: Any = FakeModel()
    drafters = pair(fake)
    llm = LLM(fake, ByRequest(drafters), num_draft_tokens=3)
    for name in ("right", "wrong"):
        stats = llm.generate(PROMPTS[0], SamplingParams(temperature=0, max_tokens=20, drafter=name)).stats
        assert set(stats.sources) == {name} and stats.sources[name].num_draft_tokens == stats.num_draft_tokens > 9
        assert (stats.num_accepted_tokens > 9) == (name == "right")
    assert set(llm.generate(PROMPTS[0], SamplingParams(temperature=0)).stats.sources) == {"right"}
    for off in (SamplingParams(drafter="none"), SamplingParams(num_draft_tokens=0)):
        stats = llm.generate(PROMPTS[0], replace(off, temperature=0)).stats
        assert stats.num_draft_tokens == 0 and stats.decisions.keys() == {"off: request"}
    two = llm.generate(PROMPTS[0], SamplingParams(temperature=0, max_tokens=20, num_draft_tokens=2)).stats
    assert len(two.drafted_per_position) == 2 and two.num_accepted_tokens > 9


def test_a_request_without_speculation_is_told_to_nobody() -> None:
    fake: Any = FakeModel()
    drafters = pair(fake)
    LLM(fake, ByRequest(drafters), num_draft_tokens=3).generate(PROMPTS[0], SamplingParams(drafter="none"))
    assert all(not drafter.steps for drafter in drafters.values())


def test_one_drafter_alone_obeys_the_request_too() -> None:
    fake: Any = FakeModel()
    llm = LLM(fake, pair(fake)["right"], num_draft_tokens=3)
    assert llm.generate(PROMPTS[0], SamplingParams(temperature=0)).stats.num_draft_tokens > 0
    for off in (SamplingParams(drafter="none"), SamplingParams(num_draft_tokens=0)):
        assert llm.generate(PROMPTS[0], replace(off, temperature=0)).stats.num_draft_tokens == 0


def test_unknown_names_are_refused() -> None:
    fake: Any = FakeModel()
    llm = LLM(fake, ByRequest(pair(fake)), num_draft_tokens=3)
    with pytest.raises(SamplingError, match="right, wrong, random"):
        llm.generate(PROMPTS[0], SamplingParams(drafter="suffix"))
    with pytest.raises(SamplingError, match="none to choose from"):
        LLM(fake).generate(PROMPTS[0], SamplingParams(drafter="suffix"))


def test_a_list_of_texts() -> None:
    fake: Any = FakeModel()
    llm = LLM(fake, ["suffix:num_draft_tokens=5", "prediction"])
    assert llm.drafter is not None and set(llm.drafter.offers) == {"suffix", "prediction"}
    assert llm.drafter.offers["suffix"].num_draft_tokens == 5
    prediction = fake.greedy(PROMPTS[0], 30)
    predicted = llm.generate(PROMPTS[0], SamplingParams(temperature=0, max_tokens=30, prediction=prediction))
    assert predicted.token_ids == prediction and set(predicted.stats.sources) <= {"prediction"}
    with pytest.raises(SamplingError, match="does not use predictions"):
        llm.generate(PROMPTS[0], SamplingParams(prediction=prediction, drafter="suffix"))
    with pytest.raises(DrafterError, match="Two drafters are called 'suffix'"):
        LLM(fake, ["suffix", "suffix:min_match=2"])
    with pytest.raises(DrafterError, match="Two drafters are called 'suffix'"):
        LLM("a folder that is not looked for", ["auto", "suffix"])
    for none in ("none", None):
        with pytest.raises(DrafterError, match=r"any request may ask for none of them"):
            LLM(fake, ["suffix", none])  # type: ignore[list-item]
    with pytest.raises(DrafterError, match="at least one drafter"):
        LLM(fake, [])


def test_each_drafter_is_told_the_rows_that_it_needs() -> None:
    """Check that each drafter gets its part of what all of them need."""
    fake: Any = FakeModel()
    seen: dict[str, set[int]] = {"one": set(), "three": set()}
    drafters = {name: Scripted(lambda sequence, num_draft_tokens: [1] * num_draft_tokens) for name in seen}
    drafters["one"].needs, drafters["three"].needs = Needs(top_tokens=1), Needs(top_tokens=3, layers=(2,))
    llm = LLM(fake, ByRequest(drafters), num_draft_tokens=2)
    llm.generate(PROMPTS, [SamplingParams(max_tokens=5, seed=1, drafter=("one", "three")[i % 2]) for i in range(12)])
    for name, width in (("one", 1), ("three", 3)):
        steps = [step for step in drafters[name].steps if step.top_tokens is not None]
        assert steps and all(step.top_tokens.shape[1] == width for step in steps if step.top_tokens is not None)
        assert all((step.hidden_outputs is None) == (name == "one") for step in steps)


def test_a_failing_drafter_ends_its_requests_alone() -> None:
    fake: Any = FakeModel()

    def fail(sequence: Sequence, num_draft_tokens: int) -> list[int]:
        raise ValueError("no")

    drafters = {"right": pair(fake)["right"], "failing": Scripted(fail)}
    llm = LLM(fake, ByRequest(drafters), num_draft_tokens=3)
    assert llm.generate(PROMPTS[0], SamplingParams(temperature=0)).token_ids == fake.greedy(PROMPTS[0], 128)
    with pytest.raises(ValueError):
        llm.generate(PROMPTS[0], SamplingParams(temperature=0, drafter="failing"))
    assert llm.generate(PROMPTS[1], SamplingParams(temperature=0)).token_ids == fake.greedy(PROMPTS[1], 128)
    assert not drafters["right"].active


def test_each_budget_says_what_is_drafted_beside_prompts() -> None:
    sequences = [Sequence(number, [0] * 4, 1, SamplingParams(), max_length=50) for number in range(3)]
    names = {0: "fixed", 1: "auto", 2: None}
    policy = PolicyByRequest({"fixed": FixedPolicy(3), "auto": AutomaticPolicy()}, lambda each: names[each.id])
    plan = policy.beside_prompts(sequences)
    assert plan.num_draft_tokens == [3, 0, 0]
    assert [plan.reason_of(index) for index in range(3)] == ["fixed", "prompts", "request"]
    assert [policy.beside_prompts(sequences[::2]).reason_of(index) for index in range(2)] == ["fixed", "request"]
    plan = policy.trim(policy.plan(sequences), sequences, [Draft.chain([1]), Draft.empty(), Draft.empty()])
    assert [plan.reason_of(index) for index in range(3)] == ["fixed", "measuring", "request"]
    assert policy.beside_prompts(sequences[1:]).reason == "prompts"
