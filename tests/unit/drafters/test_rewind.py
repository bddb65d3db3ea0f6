"""A text that is rewritten: what a draft model computed of the old one is forgotten, and nothing else."""

from __future__ import annotations

from typing import Any

import pytest

from doubles import FakeModel, parents_of, tokens_of
from forerun import SamplingParams
from forerun.drafters import Binding, DraftModel, DraftTree, Staged
from forerun.types import Draft, Sequence

GREEDY = SamplingParams(temperature=0)
DRAFTERS: dict[str, Any] = {
    "chain": lambda fake: DraftModel(fake),
    "dynamic tree": lambda fake: DraftTree(fake, min_gain=0.0),
    "static tree": lambda fake: DraftTree(fake, shape="static"),
    "staged": lambda fake: Staged(fake, "prompt-lookup:min_ngram=1"),
}
TEXT = [1, 2, 3, 4, 5, 6, 7, 8, 1, 2, 3, 4]


def bound(name: str) -> tuple[FakeModel, Any]:
    fake: Any = FakeModel(order=20)  # whatever stands in the cache shows in the logits
    target: Any = FakeModel()
    drafter = DRAFTERS[name](fake)
    drafter.bind(Binding(target, seed=1))
    return fake, drafter


def fresh(name: str, tokens: list[int]) -> Draft:
    _, drafter = bound(name)
    sequence = Sequence(0, list(tokens), 3, GREEDY)
    drafter.start(sequence)
    (draft,) = drafter.draft([sequence], [6])
    return draft


@pytest.mark.parametrize("name", DRAFTERS)
@pytest.mark.parametrize("kept", [1, 5, 11])
@pytest.mark.parametrize("added", [[9, 9], [10], [9, 8, 7, 9, 8, 7, 9, 8, 7, 0, 0, 0]])
def test_drafts_after_a_rewind_are_those_of_the_new_text(name: str, kept: int, added: list[int]) -> None:
    fake, drafter = bound(name)
    sequence = Sequence(0, list(TEXT), 3, GREEDY)
    drafter.start(sequence)
    drafter.draft([sequence], [6])  # leaves guesses beyond the text in the cache, too
    sequence.token_ids = [*TEXT[:kept], *added]
    drafter.rewind(sequence, kept)
    assert fake.caches[0].tokens == TEXT[: fake.caches[0].length]
    assert fake.caches[0].length <= kept
    (draft,) = drafter.draft([sequence], [6])
    expected = fresh(name, sequence.token_ids)
    assert len(draft) > 0
    assert (tokens_of(draft), parents_of(draft)) == (tokens_of(expected), parents_of(expected))
    drafter.stop(sequence)


@pytest.mark.parametrize("name", DRAFTERS)
def test_what_stands_is_not_computed_again(name: str) -> None:
    fake, drafter = bound(name)
    sequence = Sequence(0, list(TEXT), 3, GREEDY)
    drafter.start(sequence)
    drafter.draft([sequence], [6])
    fed: list[list[int]] = []
    fake.before_forward = lambda batch: fed.extend(list(rows.token_ids) for rows in batch)
    sequence.token_ids = [*TEXT[:9], 10, 10]
    drafter.rewind(sequence, 9)
    drafter.draft([sequence], [1])
    assert fed[0][:2] == [10, 10]


@pytest.mark.parametrize("filters", [{"top_k": 1}, {"top_p": 0.01}, {"min_p": 0.9}])
@pytest.mark.parametrize("edit", [{"presence_penalty": 0.7}, {"logit_bias": {3: 1.0}}])
def test_a_greedy_requests_distribution_is_the_whole_of_it(filters: dict[str, Any], edit: dict[str, Any]) -> None:
    """Filters mean nothing at temperature 0: the draft model ranks by its whole distribution at temperature 1."""
    drafts = []
    for options in (edit, {**edit, **filters}):
        _, drafter = bound("dynamic tree")
        sequence = Sequence(0, list(TEXT), 3, SamplingParams(temperature=0, **options))
        drafter.start(sequence)
        drafts += drafter.draft([sequence], [12])
    assert tokens_of(drafts[0]) == tokens_of(drafts[1]) and parents_of(drafts[0]) == parents_of(drafts[1])
    assert len(set(parents_of(drafts[0]))) < len(drafts[0])  # it branches


def test_a_greedy_request_with_a_penalty_is_ranked_at_temperature_one() -> None:
    """Check that its argmax is followed by the next most probable tokens of the edited logits."""
    fake, drafter = bound("dynamic tree")
    sequence = Sequence(0, list(TEXT), 3, SamplingParams(temperature=0, logit_bias={0: 50.0}))
    drafter.start(sequence)
    (draft,) = drafter.draft([sequence], [12])
    logits = fake.logits_after(TEXT).clone()
    roots = [token for token, parent in zip(tokens_of(draft), parents_of(draft)) if parent < 0]
    assert roots[0] == 0
    logits[0] += 50.0
    assert roots == logits.topk(len(roots)).indices.tolist()
