"""Prompt lookup against its definition: search the whole sequence anew."""

import random
import time

import pytest

from forerun.config import SamplingParams
from forerun.drafters import PromptLookup
from forerun.errors import ConfigError
from forerun.types import Sequence, Step

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
            assert draft.token_ids.tolist() == expected
            assert draft.is_chain and draft.laws is None
            sequence.token_ids += [rng.randrange(3) for _ in range(rng.randint(1, 4))]
        drafter.stop(sequence)
        drafter.stop(sequence)
    assert not drafter._indices


def test_a_token_costs_the_same_in_a_long_sequence() -> None:
    rng = random.Random(0)
    drafter = PromptLookup()
    sequence = Sequence(0, [rng.randrange(500) for _ in range(8000)], 8000, PARAMS)
    drafter.start(sequence)
    drafter.draft([sequence], [4])
    started = time.process_time()
    for _ in range(1000):
        sequence.token_ids.append(rng.randrange(500))
        drafter.draft([sequence], [4])
    assert time.process_time() - started < 0.2  # 8,000 tokens searched anew would take seconds


def test_impossible_lengths_are_refused() -> None:
    with pytest.raises(ConfigError, match="min_ngram is 3"):
        PromptLookup(min_ngram=3, max_ngram=2)
