"""The table of filters is all that pipeline and drafters know of them; and what makes them fast changes no bit."""

from __future__ import annotations

import math
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from doubles import FakeModel
from forerun import DraftModel, SamplingParams
from forerun.drafters import Binding
from forerun.drafters.cross_vocab import _shadow_params
from forerun.sampling import LogitsPipeline, LogitsRow, filters, filters_only, unfiltered
from forerun.sampling.filters import FILTERS, Filter
from forerun.types import Sequence

VOCAB = 11
ON = {"top_k": 3, "top_p": 0.5, "min_p": 0.2}
"""A value of each option that drops tokens."""


@dataclass(frozen=True, slots=True)
class MoreParams(SamplingParams):
    """A made-up option: of all tokens but the most probable one, the ids that are multiples of it stay."""

    every: int = 1


def keep_every(logits: Tensor, every: Seq[float]) -> Tensor:
    ids = torch.arange(logits.shape[-1])
    kept = torch.stack([ids % int(value) == 0 for value in every])
    return logits.masked_fill(~kept & (logits < 0), -math.inf)


@pytest.fixture
def made_up(monkeypatch: pytest.MonkeyPatch) -> MoreParams:
    monkeypatch.setattr(filters, "FILTERS", (*FILTERS, Filter("every", 1, keep_every)))
    return MoreParams(temperature=0.7, every=4, frequency_penalty=0.1, max_tokens=7)


def allowed(logits: Tensor) -> set[int]:
    return {*range(0, VOCAB, 4), int(logits.argmax())}


def support(probabilities: Tensor) -> set[int]:
    return set(probabilities.nonzero()[:, 0].tolist())


def test_every_filter_is_off_by_default_and_tried_here() -> None:
    assert {each.field for each in FILTERS} == ON.keys()
    assert not filters.filters_in_use(SamplingParams(temperature=0.5, repetition_penalty=1.2, logit_bias={1: 1.0}))
    for each in FILTERS:
        assert getattr(SamplingParams(), each.field) == each.neutral
        assert filters.filters_in_use(SamplingParams(**{each.field: ON[each.field]}))


@pytest.mark.parametrize("field", ON)
def test_a_filter_drops_tokens_but_never_the_most_probable_one(field: str) -> None:
    logits = torch.randn(5, 50, generator=torch.Generator().manual_seed(1))
    params = SamplingParams(**{field: ON[field]})
    kept = filters.apply(filters.scale(logits, [1.0] * 5), [params] * 5) > -math.inf
    assert (kept.sum(-1) < 50).all()
    assert kept[torch.arange(5), logits.argmax(-1)].all()


def test_the_pipeline_applies_what_the_table_holds(made_up: MoreParams) -> None:
    logits = torch.randn(2, VOCAB, generator=torch.Generator().manual_seed(2))
    rows = [
        LogitsRow(Sequence(0, [1], 1, params)) for params in (replace(made_up, frequency_penalty=0.0), MoreParams())
    ]
    pipeline = LogitsPipeline(VOCAB)
    processed = pipeline.process(logits, rows).exp()
    assert support(processed[0]) == allowed(logits[0])
    assert support(processed[1]) == set(range(VOCAB))
    assert support(pipeline.probabilities(logits[:1], rows[:1])[0]) == allowed(logits[0])


def test_a_draft_model_draws_through_what_the_table_holds(made_up: MoreParams) -> None:
    fake = FakeModel(VOCAB)
    drafter = DraftModel(fake)
    drafter.bind(Binding(fake, seed=1))
    sequence = Sequence(0, [1, 2], 2, made_up)
    drafter.start(sequence)
    (draft,) = drafter.draft([sequence], [3])
    assert draft.probs is not None
    for depth in range(3):
        logits = fake.logits_after([1, 2, *draft.ids[:depth]])
        assert support(draft.probs[depth]) <= allowed(logits)


def test_a_greedy_draft_sees_the_penalties_and_no_filter(made_up: MoreParams) -> None:
    fake = FakeModel(VOCAB)
    drafter = DraftModel(fake)
    drafter.bind(Binding(fake, seed=1))
    options = {**ON, "top_k": 1}
    sequence = Sequence(0, [1, 2], 2, replace(made_up, temperature=0, **options))
    drafter.start(sequence)
    state = drafter.drafting_model.states[sequence]
    assert state.view.params == MoreParams(temperature=1.0, frequency_penalty=0.1, max_tokens=7)
    logprobs = drafter.drafting_model.logprobs(torch.randn(1, VOCAB), [(state, [])])
    assert logprobs.isfinite().all()


def test_another_vocabulary_gets_temperature_and_filters_alone(made_up: MoreParams) -> None:
    asked = replace(made_up, **ON, logit_bias={3: 1.0}, seed=4)
    assert filters_only(asked) == _shadow_params(asked, drawn=True) == MoreParams(temperature=0.7, every=4, **ON)
    assert _shadow_params(asked, drawn=False) == SamplingParams(temperature=0)
    assert unfiltered(asked) == replace(made_up, every=1, logit_bias={3: 1.0}, seed=4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("vocab_size", [2**14, 2**14 + 31, 40_000])
def test_the_largest_are_found_by_blocks(vocab_size: int, ties: bool, dtype: torch.dtype) -> None:
    logits = torch.randn(3, vocab_size, generator=torch.Generator().manual_seed(3), dtype=dtype)
    logits[0, -3:] = 9.0  # beyond the last whole block
    logits[1, 100:200] = 9.0
    if ties:
        logits = (2 * logits).round()
    for count in (1, 50, vocab_size // 128, vocab_size // 64):
        values, ids = filters._largest(logits, count)
        assert torch.equal(values, logits.topk(count).values)
        assert torch.equal(values, logits.gather(-1, ids))
        assert all(len(set(row)) == count for row in ids.tolist())


def test_top_k_of_all_beside_top_k_of_some() -> None:
    logits = filters.scale(torch.randn(3, 20, generator=torch.Generator().manual_seed(4)), [1.0] * 3)
    logits[2, 5] = -math.inf
    kept = filters.keep_top_k(logits, [20, 3, 10**6])
    assert torch.equal(kept[0], logits[0]) and torch.equal(kept[2], logits[2])
    assert kept[1].isfinite().sum() == 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_temperature_1_without_options_gives_the_bits_of_scaling_by_it(dtype: torch.dtype) -> None:
    for vocab_size in (1, 7, 61, 4096, 50_000):
        logits = 9 * torch.randn(5, vocab_size, generator=torch.Generator().manual_seed(vocab_size), dtype=dtype)
        rows = [LogitsRow(Sequence(0, [1], 1, SamplingParams()))] * 5
        expected = filters.scale(logits, [1.0] * 5).log_softmax(-1)
        assert torch.equal(LogitsPipeline(vocab_size).process(logits, rows), expected)


FEW = [
    SamplingParams(top_k=7, top_p=0.8, temperature=0.9),
    SamplingParams(top_k=7),
    SamplingParams(top_k=1, temperature=2.0),
    SamplingParams(top_k=60, min_p=0.05, temperature=0.3),
    SamplingParams(top_p=0.6),
    SamplingParams(top_k=900),
]
"""Requests over a vocabulary of 1,000: top_k leaves few tokens, or many, or is not in use."""


@pytest.mark.parametrize("levels", [0, 40], ids=["distinct logits", "equal logits"])
def test_computing_the_kept_tokens_alone_is_no_difference(levels: int) -> None:
    """The same distributions as computed of all tokens, and in a batch the same bits as alone."""
    logits = torch.randn(4 * len(FEW), 1000, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    if levels:
        logits = (logits * levels).round() / levels
    logits[1, 5:] = -math.inf  # fewer tokens than top_k
    params = [FEW[row % len(FEW)] for row in range(len(logits))]
    temperatures = [each.temperature for each in params]
    found = filters.log_distributions(logits, temperatures, params)
    expected = filters.apply(filters.scale(logits, temperatures), params).log_softmax(-1)
    assert torch.equal(found > -math.inf, expected > -math.inf)
    torch.testing.assert_close(found.exp(), expected.exp(), atol=1e-14, rtol=0)
    for row, each in enumerate(params):
        alone = filters.log_distributions(logits[row : row + 1], [each.temperature], [each])
        assert torch.equal(alone[0], found[row])


def test_tokens_that_equal_the_last_one_stay() -> None:
    logits = torch.zeros(2, 1000)
    logits[:, 3] = 2.0
    logits[0, [8, 500]] = 1.0
    logits[1, [8, 500, 999]] = 1.0
    params = [SamplingParams(top_k=3)] * 2
    kept = filters.log_distributions(logits, [1.0, 1.0], params) > -math.inf
    assert kept[0].nonzero()[:, 0].tolist() == [3, 8, 500]
    assert kept[1].nonzero()[:, 0].tolist() == [3, 8, 500, 999]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_smallest_top_p_keeps_one_token(dtype: torch.dtype) -> None:
    logits = torch.tensor([[0.0, -1.0, -2.0], [-1.0, -1.0, 0.0]], dtype=dtype)
    kept = filters.keep_top_p(logits, [1e-46, 5e-324]) > -torch.inf
    assert kept.tolist() == [[True, False, False], [False, False, True]]
