"""The draft model is fed exactly what it owes, whatever became of its drafts."""

import random
from typing import Any

import pytest
import torch

from doubles import FakeModel, MarkovModel
from forerun import LLM, DraftModel, SamplingParams
from forerun.drafters import Binding
from forerun.drafters.models.base import MAX_LAG
from forerun.drafters.models.draft_model import DRAFT_FOLLOWS
from forerun.drafters.models.prefill_policy import DRAFTER_MEMORY
from forerun.errors import DrafterError
from forerun.sampling import LogitsPipeline, LogitsRow, NoiseKey, keyed_gumbel
from forerun.types import Draft, Sequence, Step, Verdict

GREEDY = SamplingParams(temperature=0)
K = 4


def bound(draft: FakeModel, target: FakeModel | None = None) -> DraftModel:
    drafter = DraftModel(draft)
    drafter.bind(Binding(target or FakeModel(), seed=1))
    return drafter


def sequence(tokens: list[int], params: SamplingParams = GREEDY, **options: Any) -> Sequence:
    return Sequence(options.pop("id", 0), list(tokens), len(tokens), params, **options)


def watch(fake: FakeModel) -> list[list[list[int]]]:
    """Record the tokens of every forward; check that caches hold what the rows continue."""
    fed: list[list[list[int]]] = []
    fake.before_forward = lambda batch: fed.append([list(rows.token_ids) for rows in batch])
    return fed


def settle(drafter: DraftModel, each: Sequence, draft: Draft, accepted: int, bonus: int) -> None:
    """Update the sequence and the drafter as the engine does after verification."""
    each.token_ids += [*draft.ids[:accepted], bonus]
    drafter.commit([Step(each, draft, Verdict(list(range(accepted)), bonus), len(each.token_ids) - 1)])


def test_full_acceptance_owes_two_tokens() -> None:
    fake = FakeModel()
    drafter, each = bound(fake), sequence([1, 2, 3])
    fed = watch(fake)
    drafter.start(each)
    (draft,) = drafter.draft([each], [K])
    expected = fake.greedy([1, 2, 3], K)
    assert draft.ids == expected and draft.probs is None
    assert fed == [[[1, 2, 3]], *([[token]] for token in expected[:-1])]
    fed.clear()
    settle(drafter, each, draft, K, 7)
    assert fed == []
    drafter.draft([each], [1])
    assert fed == [[[expected[-1], 7]]]


def test_nothing_is_fed_ahead_where_nobody_drafts() -> None:
    fake = FakeModel()
    drafter, old = bound(fake), sequence([1, 2, 3])
    fed = watch(fake)
    drafter.start(old)
    for _ in range(2 * DRAFTER_MEMORY):
        settle(drafter, old, Draft.empty(), 0, 5)
    assert fed == []
    new = sequence([1, 2, 3] * MAX_LAG, id=1)
    drafter.start(new)
    fed.clear()
    drafter.commit([Step(new, None, None, len(new.token_ids) - 1)])
    assert fed == []
    (draft,) = drafter.draft([new], [K])
    assert draft.ids == fake.greedy(new.token_ids[:], K)
    assert fed[0] == [new.token_ids]
    for _ in range(DRAFTER_MEMORY):
        (draft,) = drafter.draft([new], [1])
        settle(drafter, new, draft, 1, 5)
    another = sequence([4, 5] * MAX_LAG, id=2)
    drafter.start(another)
    fed.clear()
    drafter.commit([Step(another, None, None, len(another.token_ids) - 1)])
    assert fed == []  # to draft is usual now, but its first draft must repay its own prompt


def test_a_probe_now_and_then_does_not_have_prompts_followed() -> None:
    fake = FakeModel()
    drafter = bound(fake)
    fed = watch(fake)
    for number in range(20):
        each = sequence([number % 11] * 3 * MAX_LAG, id=number)
        drafter.start(each)
        fed.clear()
        drafter.commit([Step(each, None, None, len(each.token_ids) - 1)])
        assert fed == [], number
        for step in range(48):
            (draft,) = drafter.draft([each], [int(step in (20, 21))])
            settle(drafter, each, draft, len(draft), 5)
        drafter.stop(each)


@pytest.mark.parametrize("accepted", range(K))
def test_a_rejection_owes_one_token_and_rolls_back(accepted: int) -> None:
    fake = FakeModel()
    drafter, each = bound(fake), sequence([1, 2, 3])
    drafter.start(each)
    (draft,) = drafter.draft([each], [K])
    recovered = (int(draft.token_ids[accepted]) + 1) % 11
    settle(drafter, each, draft, accepted, recovered)
    fed = watch(fake)
    (draft,) = drafter.draft([each], [K])
    assert fed[0] == [[recovered]]
    assert draft.ids == fake.greedy(each.token_ids, K)


def test_any_history_gives_the_greedy_chain() -> None:
    """Check random verdicts, draft lengths, retried drafts and batches; the cache always holds a prefix."""
    rng = random.Random(0)
    fake = FakeModel()
    drafter = bound(fake)
    sequences = [sequence([rng.randrange(11) for _ in range(rng.randint(1, 9))], id=i) for i in range(5)]
    for each in sequences:
        drafter.start(each)
    for _ in range(200):
        some = rng.sample(sequences, rng.randint(1, 5))
        budgets = [rng.choice([0, 0, 1, 2, 6]) for _ in some]
        if rng.random() < 0.2:
            drafter.draft(some, [K] * len(some))  # a step that failed, and is tried again
        for each, budget, draft in zip(some, budgets, drafter.draft(some, budgets)):
            assert draft.ids == fake.greedy(each.token_ids, budget)
            settle(drafter, each, draft, rng.randint(0, len(draft)), rng.randrange(11))
    for each in sequences:
        drafter.stop(each)
        drafter.stop(each)
    assert all(cache.freed for cache in fake.caches)


def test_long_prompts_are_computed_in_chunks_with_the_target() -> None:
    fake = FakeModel()
    drafter = bound(fake)
    prompt = [i % 11 for i in range(700)]
    each = sequence(prompt)
    fed = watch(fake)
    drafter.start(each)
    drafter.drafting_model._prefill_policy._shares[each] = 1.0  # it drafted before it was preempted
    for computed in (256, 512):
        drafter.commit([Step(each, None, None, computed)])
    each.token_ids.append(5)
    drafter.commit([Step(each, Draft.empty(), Verdict([], 5), 700)])
    assert [len(rows[0]) for rows in fed] == [256, 256, 188]
    fed.clear()
    drafter.draft([each], [1])
    assert fed == [[[5]]]


def test_a_drafter_that_was_never_told_catches_up_in_chunks() -> None:
    fake = FakeModel()
    drafter, each = bound(fake), sequence([i % 11 for i in range(700)])
    fed = watch(fake)
    drafter.start(each)
    (draft,) = drafter.draft([each], [2])
    assert max(len(rows[0]) for rows in fed) <= 256
    assert draft.ids == fake.greedy(each.token_ids, 2)


def test_budget_zero_computes_nothing() -> None:
    fake = FakeModel()
    drafter, each = bound(fake), sequence([1, 2, 3])
    drafter.start(each)
    forwards = fake.num_forwards
    for i in range(320):
        (draft,) = drafter.draft([each], [0])
        assert len(draft) == 0
        settle(drafter, each, draft, 0, i % 11)
    assert fake.num_forwards == forwards
    (draft,) = drafter.draft([each], [3])
    assert draft.ids == fake.greedy(each.token_ids, 3)


@pytest.mark.parametrize("context", [4, 6, 8])
def test_a_draft_model_with_the_shorter_context_falls_silent(context: int) -> None:
    target, draft = FakeModel(), FakeModel(context_length=context)

    def check(batch: Any) -> None:
        assert all(rows.cache.length + len(rows.token_ids) <= context for rows in batch)

    draft.before_forward = check
    llm = LLM(target, DraftModel(draft))
    for prompt in ([1, 2, 3], [1] * 60):
        result = llm.generate(prompt, SamplingParams(temperature=0, max_tokens=40))
        assert result.token_ids == target.greedy(prompt, 40)


@pytest.mark.parametrize("widths", [(11, 16), (16, 11)])
@pytest.mark.parametrize("options", [{"temperature": 0}, {"seed": 3}, {"temperature": 0.7}])
def test_padding_of_either_vocabulary(widths: tuple[int, int], options: dict[str, Any]) -> None:
    target, draft = FakeModel(vocab_size=widths[0]), FakeModel(vocab_size=widths[1], seed=1)
    drafter = DraftModel(draft)
    words = type("Words", (), {"get_vocab": lambda self: {"a": 0, "b": 1}, "decode": lambda self, *_, **__: ""})()
    llm = LLM(target, drafter, tokenizer=words, num_draft_tokens=4)
    params = SamplingParams(max_tokens=60, **options)
    result = llm.generate([1, 2], params)
    assert result.stats.num_draft_tokens > 60
    if options != {"temperature": 0.7}:
        assert result.token_ids == LLM(target, None).generate([1, 2], params).token_ids


def test_drawn_chains_carry_the_processed_distribution_they_were_drawn_from() -> None:
    fake = FakeModel(vocab_size=7)
    drafter = bound(fake, FakeModel(vocab_size=7))
    params = SamplingParams(temperature=0.8, top_k=4, presence_penalty=0.5)
    each = sequence([1, 2, 3], params)
    drafter.start(each)
    (draft,) = drafter.draft([each], [3])
    assert draft.probs is not None and draft.probs.shape == (4, 7)
    pipeline, path = LogitsPipeline(7), draft.ids
    for row in range(3):
        logits = fake.logits_after([1, 2, 3, *path[:row]])[None]
        distribution = pipeline.process(logits, [LogitsRow(each, path[:row])])[0].exp()
        assert torch.allclose(draft.probs[row], distribution)
        assert draft.probs[row, path[row]] > 0


def test_draws_follow_their_distribution() -> None:
    table = torch.tensor([[0.0, 1.0, 2.0]] * 3)
    drafter = bound(MarkovModel(table), FakeModel(vocab_size=3))
    sequences = [sequence([0], SamplingParams(), id=i) for i in range(500)]
    for each in sequences:
        drafter.start(each)
    counts = torch.zeros(3)
    for _ in range(10):
        for draft in drafter.draft(sequences, [4] * 500):
            counts += torch.bincount(torch.tensor(draft.ids), minlength=3)
    expected = 20000 * table[0].softmax(0)
    statistic = float(((counts - expected) ** 2 / expected).sum())
    assert statistic < 13.8  # chi-squared, 2 degrees of freedom, p = 0.001


def test_seeded_chains_use_the_targets_noise() -> None:
    fake = FakeModel()
    drafter, each = bound(fake), sequence([1, 2, 3], SamplingParams(seed=9), choice=2)
    drafter.start(each)
    (draft,) = drafter.draft([each], [3])
    assert draft.probs is None
    path: list[int] = []
    for i in range(3):
        noise = keyed_gumbel([NoiseKey(9, 2, 3 + i)], 11)[0]
        path.append(int((torch.log_softmax(fake.logits_after([1, 2, 3, *path]), 0) + noise).argmax()))
    assert draft.ids == path


def test_an_identical_draft_model_is_always_right() -> None:
    fake = FakeModel()
    for params in (GREEDY, SamplingParams(seed=1), SamplingParams(), SamplingParams(temperature=0.5, top_p=0.9)):
        result = LLM(fake, DraftModel(FakeModel()), num_draft_tokens=4).generate([1, 2], params)
        assert result.stats.acceptance_rate == 1


def test_unbound_is_said() -> None:
    drafter = DraftModel("folder")
    with pytest.raises(DrafterError, match="not bound"):
        _ = drafter.model


@pytest.mark.parametrize("temperature", [1.0, 0.7, 3.0, 1e-4])
def test_distribution_of_the_temperature_alone(temperature: float) -> None:
    """Check that distributions that skip the pipeline are the same."""
    fake = FakeModel(vocab_size=7)
    drafter = bound(fake, FakeModel(vocab_size=7))
    each = sequence([1, 2, 3], SamplingParams(temperature=temperature))
    drafter.start(each)
    (draft,) = drafter.draft([each], [3])
    assert draft.probs is not None
    for row in range(3):
        path = draft.ids[:row]
        logits = fake.logits_after([1, 2, 3, *path])[None]
        distribution = LogitsPipeline(7).process(logits, [LogitsRow(each, path)])[0].exp()
        assert torch.allclose(draft.probs[row], distribution, atol=1e-6)


def test_far_more_tokens_than_a_draft_is_worth_are_skipped() -> None:
    fake = FakeModel()
    drafter, each = bound(fake), sequence([i % 11 for i in range(DRAFT_FOLLOWS + 200)])
    fed = watch(fake)
    drafter.start(each)
    state = drafter.drafting_model.states[each]
    (draft,) = drafter.draft([each], [2])
    rows = [token for forward in fed for token in forward[0]]
    assert rows[:-1] == each.token_ids[199:]  # the last one is the draft's own
    assert draft.ids == fake.greedy(each.token_ids[199:], 2)
    assert state.shift == 199 and not state.may_publish()  # nobody can adopt what begins in the middle
    settle(drafter, each, draft, 2, 7)
    drafter.rewind(each, 150)
    del each.token_ids[150:]
    (draft,) = drafter.draft([each], [2])
    assert draft.ids == fake.greedy(each.token_ids, 2) and state.shift == 0


@pytest.mark.parametrize("params", [GREEDY, SamplingParams(), SamplingParams(seed=1)])
def test_a_chain_goes_on_below_the_tokens_that_it_is_given(params: SamplingParams) -> None:
    fake = FakeModel()
    drafter, each = bound(fake), sequence([1, 2, 3], params)
    fed = watch(fake)
    drafter.start(each)
    path = Draft.chain([9, 4])
    path.accept_probs = [0.9, 0.8]
    drafter.begin_with({each: path})
    (draft,) = drafter.draft([each], [5])
    assert len(draft) == 5 and draft.ids[:2] == [9, 4]
    assert fed[0] == [[1, 2, 3, 9, 4]]
    if params.greedy:
        assert draft.ids == [9, 4, *fake.greedy([1, 2, 3, 9, 4], 3)]
    assert (draft.probs is None) == (params.greedy or params.seed is not None)
    if draft.probs is not None:
        assert draft.probs[0].argmax() == 9 and draft.probs[0].max() == draft.probs[0].sum() == 1
        assert draft.probs[1].argmax() == 4 and draft.probs[1].max() == 1
    settle(drafter, each, draft, 1, 5)  # the second of them is rejected
    (draft,) = drafter.draft([each], [2])
    assert fed[-2] == [[5]]
    if params.greedy:
        assert draft.ids == fake.greedy(each.token_ids, 2)


def test_a_draft_may_be_no_more_than_what_it_is_given() -> None:
    fake = FakeModel()
    drafter, each = bound(fake), sequence([1, 2, 3])
    drafter.start(each)
    fed = watch(fake)
    path = Draft.chain([9, 4, 2])
    path.accept_probs = [0.9, 0.8, 0.7]
    drafter.begin_with({each: path})
    (draft,) = drafter.draft([each], [2])
    assert draft.ids == [9, 4] and fed == []


def test_a_price_ends_a_chosen_chain_before_the_token_and_a_drawn_one_after_it() -> None:
    for params in (GREEDY, SamplingParams(), SamplingParams(seed=1)):
        fake = FakeModel()
        drafter = bound(fake)
        sequences = [sequence([1, 2, i], params, id=i) for i in range(10)]
        for each in sequences:
            drafter.start(each)
        whole = drafter.draft(sequences, [8] * 10)
        lengths = [len(draft) for draft in drafter.draft(sequences, [8] * 10, 0.3)]
        assert all(len(draft) == 8 for draft in whole)
        assert min(lengths) < 8
        # what is worth its row is kept, since the draft model's forward is over
        kept = 1 if params.seed is None and not params.greedy else 0
        assert all(len(draft) in (kept, 1) for draft in drafter.draft(sequences, [8] * 10, 0.9999))


def test_a_price_makes_it_learn_what_its_confidence_is_worth() -> None:
    """Check that a confidently wrong draft model stops drafting; without a minimum probability nothing is counted."""
    drafter, each = bound(FakeModel(scale=30.0)), sequence([1, 2, 3])
    drafter.start(each)
    for min_acceptance_prob, silent in ((0.0, False), (0.2, True)):
        for _ in range(60):
            (draft,) = drafter.draft([each], [4], min_acceptance_prob)
            wrong = (int(draft.token_ids[0]) + 1) % 11 if len(draft) else 5
            settle(drafter, each, draft, 0, wrong)
        assert (len(draft) == 0) == silent
