"""Which rows of a batch are restricted to a part of the vocabulary."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from doubles import FakeModel
from forerun.drafters.cross_vocab import RestrictedModel
from forerun.models import Rows

ALLOWED = [0, 2, 5, 9]
TOKENS = [[1, 2, 3], [4], [5, 6, 7, 8], [9, 10]]


def alone(tokens: list[int], wanted: int | None) -> torch.Tensor:
    fake: Any = FakeModel()
    logits: torch.Tensor = fake.forward([Rows(fake.new_cache(), tokens, num_logits=wanted)]).logits
    return logits


@pytest.mark.parametrize(
    "wanted", [[None] * 4, [1, 1, 1, 1], [2, 0, 3, 1], [0, None, 0, None], [None, 0, 2, None], [3, 1, 0, 0]]
)
@pytest.mark.parametrize(
    "restricted",
    [[True] * 4, [False] * 4, [True, False, True, False], [False, True, False, True], [False] * 3 + [True]],
)
def test_rows_of_restricted_sequences_alone_are_masked(wanted: list[int | None], restricted: list[bool]) -> None:
    """Check rows at any position of the batch, however many have logits."""
    fake: Any = FakeModel()
    model: Any = RestrictedModel(fake, ALLOWED)
    caches = []
    for each in restricted:
        model.restrict = each
        caches.append(model.new_cache())
    logits = model.forward([Rows(*each) for each in zip(caches, TOKENS, [None] * 4, wanted)]).logits
    at = 0
    for tokens, count, masked in zip(TOKENS, wanted, restricted):
        expected = alone(tokens, count)
        if masked:
            hidden = [token for token in range(11) if token not in ALLOWED]
            expected[:, hidden] = -torch.inf
        assert torch.equal(logits[at : at + len(expected)], expected)
        at += len(expected)
    assert at == len(logits)


def test_what_is_not_about_distribution_is_the_models_own() -> None:
    fake: Any = FakeModel(eos_token_ids=[3])
    model: Any = RestrictedModel(fake, ALLOWED)
    assert (model.vocab_size, model.context_length, model.eos_token_ids) == (11, 4096, frozenset([3]))
    assert torch.equal(fake.table, FakeModel().table)
