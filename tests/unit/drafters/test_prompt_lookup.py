"""Prompt lookup against its definition: search the whole sequence anew."""

import random

import pytest

from forerun.config import SamplingParams
from forerun.drafters import PromptLookup
from forerun.drafters.lookup.copy_drafter import COPY_RATES
from forerun.errors import ConfigError
from forerun.types import Sequence, Step, Verdict

PARAMS = SamplingParams()


def naive(tokens: list[int], budget: int, low: int, high: int) -> list[int]:
    for size in range(high, low - 1, -1):
        for start in range(len(tokens) - size - 1, -1, -1):
            if tokens[start : start + size] == tokens[len(tokens) - size :]:
                copied = list(tokens)
                for i in range(budget):
                    copied.append(copied[start + size + i])
                return copied[len(tokens) :]
    return []


@pytest.mark.parametrize(("low", "high"), [(2, 4), (1, 1), (1, 3), (3, 6)])
def test_against_the_definition(low: int, high: int) -> None:
    rng = random.Random(low)
    for trial in range(60):
        drafter = PromptLookup(min_ngram=low, max_ngram=high)
        sequence = Sequence(trial, [rng.randrange(3) for _ in range(rng.randint(1, 12))], 1, PARAMS)
        drafter.start(sequence)
        if trial % 2:
            drafter.commit([Step(sequence, None, None, len(sequence.token_ids) // 2)])
        for _ in range(12):
            budget = rng.randint(0, 6)
            (draft,) = drafter.draft([sequence], [budget])
            expected = naive(sequence.token_ids, budget, low, high) if budget else []
            assert draft.ids == expected
            assert draft.is_chain and draft.probs is None
            sequence.token_ids += [rng.randrange(3) for _ in range(rng.randint(1, 4))]
        drafter.stop(sequence)
        drafter.stop(sequence)
    assert not drafter._indices


class Read(list[int]):
    """Counts how often it is read."""

    reads = 0

    def __getitem__(self, index: object) -> object:  # type: ignore[override]
        self.reads += 1
        return super().__getitem__(index)  # type: ignore[index]


def test_a_token_costs_the_same_in_a_long_sequence() -> None:
    rng = random.Random(0)
    reads = []
    for length in (100, 8000):
        drafter = PromptLookup()
        tokens = Read(rng.randrange(500) for _ in range(length))
        sequence = Sequence(0, tokens, length, PARAMS)
        drafter.start(sequence)
        drafter.draft([sequence], [4])
        tokens.reads = 0
        for _ in range(100):
            tokens.append(rng.randrange(500))
            drafter.draft([sequence], [4])
        reads.append(tokens.reads)
    assert 0 < max(reads) < 10 * 100


def test_a_token_must_be_worth_its_price() -> None:
    drafter = PromptLookup()
    sequence = Sequence(0, [1, 2, 3, 4, 5, 6, 7, 8, 1, 2], 10, PARAMS)
    drafter.start(sequence)
    accept_probs = [COPY_RATES[2]]  # a match of two tokens, then of three and more
    for length in (3, 4, 5, 6):
        accept_probs.append(accept_probs[-1] * COPY_RATES[length.bit_length()])
    for min_acceptance_prob, count in (
        (0.0, 5),
        (accept_probs[2], 2),
        (accept_probs[0], 0),
        (0.99 * accept_probs[0], 1),
    ):
        (draft,) = drafter.draft([sequence], [5], min_acceptance_prob)
        assert draft.ids == [3, 4, 5, 6, 7][:count]


def test_the_price_is_held_against_what_was_accepted() -> None:
    drafter = PromptLookup()
    for _ in range(40):  # matches of two tokens are always wrong, and it learns so from drafts too dear to be made
        sequence = Sequence(0, [1, 2, 3, 4, 5, 6, 7, 8, 1, 2], 10, PARAMS)
        drafter.start(sequence)
        (draft,) = drafter.draft([sequence], [4], 0.9)
        assert len(draft) == 0
        sequence.token_ids.append(9)
        drafter.commit([Step(sequence, draft, Verdict([], 9), 10)])
        drafter.stop(sequence)
    assert not drafter._copied
    for tokens, count in (([1, 2, 3, 4, 1, 2], 0), ([1, 2, 3, 4, 5, 1, 2, 3, 4], 2)):
        sequence = Sequence(0, tokens, len(tokens), PARAMS)
        drafter.start(sequence)
        assert len(drafter.draft([sequence], [2], 0.3)[0]) == count


def test_impossible_lengths_are_refused() -> None:
    with pytest.raises(ConfigError, match="min_ngram is 3"):
        PromptLookup(min_ngram=3, max_ngram=2)
