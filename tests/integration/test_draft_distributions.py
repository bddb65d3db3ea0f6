"""Drafts of a draft model, stopped by a price or grown into trees, leave the target's distribution as it is.

As in test_distribution: a Markov chain over few tokens, so that all a run writes is data for one G-test.
"""

from collections.abc import Sequence as Seq
from typing import Any

import pytest
import torch
from scipy.stats import chi2

from doubles import MarkovModel
from forerun import LLM, SamplingParams
from forerun.drafters import DraftModel, DraftTree, Staged
from forerun.types import Draft, Sequence

VOCAB, BATCH, SIGNIFICANCE = 4, 256, 1e-3
TARGET = torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(1)) * 1.5
DRAFT = TARGET + torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(2))


def p_value(drafter: Any, num_samples: int = 15_000, acceptance: str | None = None) -> float:
    """Of the G-test of all pairs of tokens, given the token before them."""
    length = -(-num_samples * 2 // BATCH) // 2 * 2
    target: Any = MarkovModel(TARGET)
    llm = LLM(target, drafter, num_draft_tokens=6, acceptance=acceptance, max_batch=BATCH, seed=20)
    results = llm.generate([[i % VOCAB] for i in range(BATCH)], SamplingParams(max_tokens=length))
    assert sum(result.stats.num_accepted_tokens for result in results) > num_samples / 5
    tokens = torch.tensor([[i % VOCAB, *result.token_ids] for i, result in enumerate(results)])
    windows = tokens.unfold(1, 3, 2).reshape(-1, 3)
    distribution = TARGET.double().softmax(-1)
    counts = torch.bincount((windows * torch.tensor([16, 4, 1])).sum(-1), minlength=64).double().reshape(4, 16)
    expected = torch.einsum("sa,ab->sab", distribution, distribution).reshape(4, 16) * counts.sum(-1, keepdim=True)
    assert expected.min() > 4  # a biased drafter visits some states less
    statistic = 2 * torch.special.xlogy(counts, counts / expected).sum()
    return float(chi2.sf(float(statistic), 4 * 15))


class Priced(DraftModel):
    """Always asked at this price."""

    price = 0.3

    def draft(self, sequences: Seq[Sequence], budgets: Seq[int], price: float = 0.0) -> list[Draft]:
        return super().draft(sequences, budgets, self.price)


class PricedTree(DraftTree):
    """Always asked at this price."""

    def draft(self, sequences: Seq[Sequence], budgets: Seq[int], price: float = 0.0) -> list[Draft]:
        return super().draft(sequences, budgets, 0.05)


class Dropping(Priced):
    """Leaves out the drawn token at which it stopped."""

    def draft(self, sequences: Seq[Sequence], budgets: Seq[int], price: float = 0.0) -> list[Draft]:
        drafts = []
        for draft, budget in zip(super().draft(sequences, budgets), budgets):
            kept = draft.token_ids[:-1] if len(draft) < budget else draft.token_ids
            drafts.append(Draft.chain(kept, None if draft.probs is None else draft.probs[: len(kept) + 1]))
        return drafts


METHODS: dict[str, Any] = {
    "priced chain": (lambda: Priced(MarkovModel(DRAFT)), None),  # type: ignore[arg-type]
    "priced chain, token by token": (lambda: Priced(MarkovModel(DRAFT)), "token"),  # type: ignore[arg-type]
    "drawn tree": (lambda: DraftTree(MarkovModel(DRAFT)), None),  # type: ignore[arg-type]
    "drawn tree, multi-step": (lambda: DraftTree(MarkovModel(DRAFT)), "multi-step"),  # type: ignore[arg-type]
    "priced drawn tree": (lambda: PricedTree(MarkovModel(DRAFT)), None),  # type: ignore[arg-type]
    "chosen tree": (lambda: DraftTree(MarkovModel(DRAFT), drawn=False), None),  # type: ignore[arg-type]
    "chosen static tree": (lambda: DraftTree(MarkovModel(DRAFT), shape="static", drawn=False), None),  # type: ignore[arg-type]
    "staged": (lambda: Staged(MarkovModel(DRAFT), "prompt-lookup:min_ngram=1"), None),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("method", METHODS)
def test_the_distribution_is_the_targets(method: str) -> None:
    drafter, acceptance = METHODS[method]
    assert p_value(drafter(), acceptance=acceptance) > SIGNIFICANCE


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_a_million_samples(method: str) -> None:
    drafter, acceptance = METHODS[method]
    assert p_value(drafter(), 1_000_000, acceptance) > SIGNIFICANCE


def test_dropping_the_token_that_was_looked_at_is_found_out() -> None:
    assert p_value(Dropping(MarkovModel(DRAFT))) < 1e-6  # type: ignore[arg-type]
