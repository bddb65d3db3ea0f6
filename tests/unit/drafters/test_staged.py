"""A staged chain is the draft model's own chain, in fewer forwards."""

from typing import Any

import pytest
import torch

from doubles import FakeModel, Scripted, adversaries
from forerun import LLM, SamplingParams
from forerun.drafters import Binding, DraftModel, PromptLookup, Staged, Traits
from forerun.drafters.early_exit import EarlyExit
from forerun.drafters.staged import _proposed_tokens
from forerun.errors import DrafterError
from forerun.types import Draft, Needs, Sequence, Step, Verdict

OPTIONS = [
    {"temperature": 0},
    {"temperature": 0, "presence_penalty": 0.7},
    {"seed": 3, "temperature": 0.4},
    {"temperature": 0.4},
    {"temperature": 0.6, "top_k": 3, "frequency_penalty": 0.2},
]


def near(**options: Any) -> FakeModel:
    fake = FakeModel(num_contexts=40, **options)
    fake.table = fake.table + torch.randn(fake.table.shape, generator=torch.Generator().manual_seed(5)) * 1.5
    return fake


def chains(drafter: DraftModel, params: SamplingParams, min_acceptance_prob: float) -> list[tuple[list[int], Any]]:
    """Return what is drafted along a text that never agrees for long."""
    drafter.bind(Binding(FakeModel(), seed=7))  # type: ignore[arg-type]
    sequences = [Sequence(i, [1, 2, 3 + i] * 4, 12, params) for i in range(2)]
    for each in sequences:
        drafter.start(each)
    drafted = []
    for turn in range(25):
        steps = []
        for each, draft in zip(sequences, drafter.draft(sequences, [6, 1 + turn % 9], min_acceptance_prob)):
            drafted.append((draft.ids, draft.probs))
            accepted = turn % (len(draft) + 1)
            bonus = FakeModel(num_contexts=40).greedy(each.token_ids, 1)[0]
            each.token_ids += [*draft.ids[:accepted], bonus]
            steps.append(Step(each, draft, Verdict(list(range(accepted)), bonus), len(each.token_ids) - 1))
        drafter.commit(steps)
    for each in sequences:
        drafter.stop(each)
        drafter.stop(each)
    return drafted


def inner(right: bool) -> Scripted:
    """Proposes the draft model's own greedy tokens, all of them or with every third one wrong."""
    fake = near()

    def propose(sequence: Sequence, budget: int) -> list[int]:
        tokens = fake.greedy(sequence.token_ids, budget)
        return tokens if right else [(t + (i % 3 == 2)) % 11 for i, t in enumerate(tokens)]

    return Scripted(propose)


@pytest.mark.sampled(10)
@pytest.mark.parametrize("min_acceptance_prob", [0.0, 0.3])
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("drafter", [PromptLookup(min_ngram=1), inner(True), inner(False), "suffix"])
def test_its_chains_are_the_draft_models_own(drafter: Any, options: dict[str, Any], min_acceptance_prob: float) -> None:
    params = SamplingParams(max_tokens=10**6, **options)
    staged, alone = near(), near()
    pairs = zip(
        chains(Staged(staged, drafter), params, min_acceptance_prob),
        chains(DraftModel(alone), params, min_acceptance_prob),
    )
    for (tokens, probs), (expected, expected_probs) in pairs:
        assert tokens == expected
        assert (probs is None) == (expected_probs is None)
        assert probs is None or torch.equal(probs, expected_probs)
    assert staged.num_forwards <= alone.num_forwards


def test_a_right_inner_drafter_saves_forwards() -> None:
    params = SamplingParams(temperature=0)
    staged, alone = near(), near()
    chains(Staged(staged, inner(True)), params, 0.0)
    chains(DraftModel(alone), params, 0.0)
    assert staged.num_forwards < alone.num_forwards / 3


@pytest.mark.parametrize("options", OPTIONS[:3])
def test_output_is_the_targets_whatever_the_inner_drafter(options: dict[str, Any]) -> None:
    target, params = FakeModel(num_contexts=40), SamplingParams(max_tokens=120, **options)
    prompts = [[1, 2, 3], [4, 5]]
    expected = [result.token_ids for result in LLM(target, None).generate(prompts, params)]
    references = {tuple(prompt): tokens for prompt, tokens in zip(prompts, expected)}
    for script in adversaries(references, 11).values():
        drafter = Staged(near(), script)  # type: ignore[arg-type]
        assert [r.token_ids for r in LLM(target, drafter).generate(prompts, params)] == expected
        assert not script.active


def test_the_inner_drafters_budget_leaves_room_for_the_models_own_token() -> None:
    asked: list[int] = []
    script = Scripted(lambda _, budget: asked.append(budget) or [])
    drafter = Staged(near(), script)  # type: ignore[arg-type]
    drafter.bind(Binding(FakeModel(), seed=7))  # type: ignore[arg-type]
    each = Sequence(0, [1, 2, 3], 3, SamplingParams(temperature=0))
    drafter.start(each)
    for budget in (5, 1, 0):
        assert len(drafter.draft([each], [budget])[0]) == budget
    assert asked == [4]


def test_it_wants_what_the_inner_drafter_wants() -> None:
    script: Any = Scripted(lambda *_: [])
    script.needs, script.traits, script.nbytes = Needs(top_tokens=3), Traits(("one",), reads_prediction=True), 1000
    drafter = Staged(near(), script)  # type: ignore[arg-type]
    assert (drafter.needs, drafter.traits.reads_prediction, drafter.nbytes) == (Needs(top_tokens=3), True, 1000)


def test_the_proposal_of_a_tree() -> None:
    tree = Draft([4, 5, 6, 7, 8], [-1, -1, 0, 1, 2])
    assert _proposed_tokens(tree) == [4, 6, 8]
    assert _proposed_tokens(Draft(tree.token_ids, tree.parents, num_candidates=3)) == [4, 6]
    assert _proposed_tokens(Draft.empty()) == []


def test_an_inner_drafter_that_does_not_exist() -> None:
    with pytest.raises(DrafterError):
        Staged(drafter="prompt-lookups")
    with pytest.raises(DrafterError, match="has no option"):
        Staged(drafter="prompt-lookup:colour=red")
    with pytest.raises(DrafterError, match="own layers or rows"):
        Staged(drafter="recycling")
    with pytest.raises(DrafterError, match="EarlyExit, computes in the target's own cache"):
        Staged(drafter=EarlyExit(1))
    with pytest.raises(DrafterError, match="Hybrid, computes in the target's own cache"):
        Staged(drafter="hybrid:sources=suffix+early-exit")
