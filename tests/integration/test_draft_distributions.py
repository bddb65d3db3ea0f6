"""Drafts of a draft model, stopped by a price or grown into trees, leave the target's distribution as it is.

As in test_distribution: a Markov chain over few tokens, so that all a run writes is data for one G-test.
"""

from collections.abc import Sequence as Seq
from typing import Any

import pytest
from torch import Tensor

from doubles import MarkovModel
from forerun.drafters import DraftModel, DraftTree, Staged
from forerun.types import Draft, Sequence
from gtest import DRAFT, SIGNIFICANCE, p_value

NUM_SAMPLES = 3_000
"""The planted bias below gets p < 1e-30 with these; the slow tests take a million."""


class Priced(DraftModel):
    """Always asked at this price."""

    min_acceptance_prob = 0.3

    def draft(
        self, sequences: Seq[Sequence], num_draft_tokens: Seq[int], min_acceptance_prob: float = 0.0
    ) -> list[Draft]:
        return super().draft(sequences, num_draft_tokens, self.min_acceptance_prob)


class PricedTree(DraftTree):
    """Always asked at this price."""

    def draft(
        self, sequences: Seq[Sequence], num_draft_tokens: Seq[int], min_acceptance_prob: float = 0.0
    ) -> list[Draft]:
        return super().draft(sequences, num_draft_tokens, 0.05)


class Dropping(Priced):
    """Leaves out the drawn token at which it stopped."""

    def draft(
        self, sequences: Seq[Sequence], num_draft_tokens: Seq[int], min_acceptance_prob: float = 0.0
    ) -> list[Draft]:
        drafts = []
        for draft, budget in zip(super().draft(sequences, num_draft_tokens), num_draft_tokens):
            kept = draft.token_ids[:-1] if len(draft) < budget else draft.token_ids
            drafts.append(Draft.chain(kept, None if draft.probs is None else draft.probs[: len(kept) + 1]))
        return drafts


def parallel(table: Tensor) -> Any:
    """A draft model that reads token 0 as its mask token, too."""
    model = MarkovModel(table)
    model.mask_token = 0
    return model


METHODS: dict[str, Any] = {
    "priced chain": (lambda: Priced(MarkovModel(DRAFT)), None),  # type: ignore[arg-type]
    "priced chain, token by token": (lambda: Priced(MarkovModel(DRAFT)), "token"),  # type: ignore[arg-type]
    "drawn tree": (lambda: DraftTree(MarkovModel(DRAFT)), None),  # type: ignore[arg-type]
    "drawn tree, multi-step": (lambda: DraftTree(MarkovModel(DRAFT)), "multi-step"),  # type: ignore[arg-type]
    "priced drawn tree": (lambda: PricedTree(MarkovModel(DRAFT)), None),  # type: ignore[arg-type]
    "chosen tree": (lambda: DraftTree(MarkovModel(DRAFT), drawn=False), None),  # type: ignore[arg-type]
    "chosen static tree": (lambda: DraftTree(MarkovModel(DRAFT), shape="static", drawn=False), None),  # type: ignore[arg-type]
    "parallel": (lambda: DraftModel(parallel(DRAFT)), None),
    "priced parallel": (lambda: Priced(parallel(DRAFT)), None),
    "parallel, token by token": (lambda: DraftModel(parallel(DRAFT)), "token"),
    "staged": (lambda: Staged(MarkovModel(DRAFT), "prompt-lookup:min_ngram=1"), None),  # type: ignore[arg-type]
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("method", METHODS)
def test_the_distribution_is_the_targets(method: str) -> None:
    drafter, acceptance = METHODS[method]
    assert p_value(drafter(), NUM_SAMPLES, acceptance=acceptance) > SIGNIFICANCE


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_a_million_samples(method: str) -> None:
    drafter, acceptance = METHODS[method]
    assert p_value(drafter(), 1_000_000, acceptance=acceptance) > SIGNIFICANCE


def test_dropping_the_token_that_was_looked_at_is_found_out() -> None:
    assert p_value(Dropping(MarkovModel(DRAFT)), NUM_SAMPLES) < 1e-6  # type: ignore[arg-type]
