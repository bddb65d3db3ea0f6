"""What hybrids, staged drafts and drafts of another vocabulary leave of the target's distribution: all of it.

Requests without a seed, through the real engine; one G-test each, as in test_draft_distributions.
"""

from __future__ import annotations

import random
from collections.abc import Sequence as Seq
from typing import Any

import pytest
import torch

from doubles import MarkovModel, Scripted, tree_draft
from forerun.drafters import DraftModel, DraftTree, Hybrid, Staged
from forerun.drafters.cross_vocab import CrossVocab
from forerun.types import Draft, Sequence
from gtest import DRAFT, SIGNIFICANCE, TARGET, VOCAB, Clock, Timed, p_value

NUM_SAMPLES = 2_000
MORE_SAMPLES = 4_000  # where a drawn draft that is dropped for how it came out must show


class Priced(DraftModel):
    """Draws chains whose length depends on what was drawn."""

    def draft(
        self, sequences: Seq[Sequence], num_draft_tokens: Seq[int], min_acceptance_prob: float = 0.0
    ) -> list[Draft]:
        return super().draft(sequences, num_draft_tokens, 0.3)


class PricedStaged(Staged):
    """The same, staged."""

    def draft(
        self, sequences: Seq[Sequence], num_draft_tokens: Seq[int], min_acceptance_prob: float = 0.0
    ) -> list[Draft]:
        return super().draft(sequences, num_draft_tokens, 0.3)


class Grafted(DraftModel):
    """Draws chains below two copied tokens, of which the second is rejected more often than not."""

    def draft(
        self, sequences: Seq[Sequence], num_draft_tokens: Seq[int], min_acceptance_prob: float = 0.0
    ) -> list[Draft]:
        ranked = TARGET.argsort(-1, descending=True).tolist()
        paths = {}
        for sequence in sequences:
            first = ranked[sequence.token_ids[-1]][0]
            path = Draft.chain([first, ranked[first][1]])
            path.accept_probs = [0.9, 0.8]
            paths[sequence] = path
        self.begin_with(paths)
        return super().draft(sequences, num_draft_tokens, min_acceptance_prob)


def likeliest(count: int) -> Scripted:
    """Proposes so many of the target's most probable tokens: chosen, not drawn."""
    table = TARGET.argmax(-1).tolist()

    def propose(sequence: Sequence, budget: int) -> list[int]:
        tokens = [sequence.token_ids[-1]]
        for _ in range(min(count, budget)):
            tokens.append(table[tokens[-1]])
        return tokens[1:]

    return Scripted(propose)


def several() -> Scripted:
    """The target's three most probable tokens beside each other: better than one drawn token, not than four."""
    table = TARGET.topk(3).indices.tolist()
    return Scripted(lambda sequence, budget: tree_draft(table[sequence.token_ids[-1]][:budget], [-1, -1, -1][:budget]))


def drawn(least: int = 1) -> Scripted:
    """Chains drawn near the target's distribution that end at once where token 1 is drawn first, and are long else.

    least: shorter ones are not given at all, which no drafter may do.
    """
    rng = random.Random(3)
    probs = (TARGET + 0.3 * (DRAFT - TARGET)).softmax(-1)
    weights = probs.tolist()

    def propose(sequence: Sequence, budget: int) -> Draft:
        tokens = [sequence.token_ids[-1]]
        while len(tokens) <= min(budget, 4) and tokens[1:] != [1]:
            tokens += rng.choices(range(VOCAB), weights[tokens[-1]])
        return Draft.chain(tokens[1:], probs[tokens]) if len(tokens) > least else Draft.empty()

    return Scripted(propose)


def draft_model(table: torch.Tensor = DRAFT) -> Any:
    return MarkovModel(table)


class Letters:
    """A tokenizer of single letters and a few longer tokens, which it prefers."""

    all_special_ids = ()
    chat_template = None

    def __init__(self, *tokens: str) -> None:
        self.tokens = tokens

    def get_vocab(self) -> dict[str, int]:
        return {token: i for i, token in enumerate(self.tokens)}

    def __call__(self, text: str, **_: object) -> dict[str, list[int]]:
        ids, at = [], 0
        longest_first = sorted(range(len(self.tokens)), key=lambda i: -len(self.tokens[i]))
        while at < len(text):
            found = next(i for i in longest_first if text.startswith(self.tokens[i], at))
            ids.append(found)
            at += len(self.tokens[found])
        return {"input_ids": ids}

    def decode(self, ids: Seq[int], **_: object) -> str:
        return "".join(self.tokens[i] for i in ids)


OURS, THEIRS = Letters("a", "b", "c", "d"), Letters("d", "cb", "c", "b", "a")


def foreign_table() -> torch.Tensor:
    """The draft's distribution in the other vocabulary: "cb" is one token, "d" far likelier than it should be."""
    ours = [OURS.tokens.index(token[-1]) for token in THEIRS.tokens]
    table = DRAFT[ours][:, ours].clone()
    table[:, THEIRS.tokens.index("cb")] = 2.0  # masked where drafts are translated token by token
    table[:, THEIRS.tokens.index("d")] += 0.5
    return table


def crossed(mode: str, inner: Any = DraftModel) -> CrossVocab:
    return CrossVocab(draft_model(foreign_table()), inner, mode, tokenizer=THEIRS)


METHODS: dict[str, Any] = {
    "first, a chosen draft and one as long as it came out": lambda: Hybrid([several(), drawn()], "first"),
    "first, a chosen draft and one that was drawn in stages": lambda: Hybrid(
        [likeliest(2), PricedStaged(draft_model(), "prompt-lookup:min_ngram=1")], "first"
    ),
    "a copy's beginning above a drawn chain": lambda: Grafted(draft_model()),
    "merge": lambda: Hybrid([likeliest(2), drawn()], "merge"),
    "merge, of a tree": lambda: Hybrid([Priced(draft_model()), DraftTree(draft_model())], "merge"),
    "staged": lambda: PricedStaged(draft_model(), "suffix"),
    "cross-vocab by tokens": lambda: crossed("tokens", Priced),
    "cross-vocab by text": lambda: crossed("text"),
    "first, with cross-vocab": lambda: Hybrid([likeliest(2), crossed("auto", Priced)], "first"),
}


def tokenizer_of(method: str) -> Letters | None:
    return OURS if "cross-vocab" in method else None


@pytest.mark.sampled(3)
@pytest.mark.parametrize("method", METHODS)
def test_the_distribution_is_the_targets(method: str) -> None:
    count = MORE_SAMPLES if "as long as it came out" in method else NUM_SAMPLES
    assert p_value(METHODS[method](), count, tokenizer=tokenizer_of(method)) > SIGNIFICANCE


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_many_samples(method: str) -> None:
    assert p_value(METHODS[method](), 300_000, tokenizer=tokenizer_of(method)) > SIGNIFICANCE


AUTOMATIC: dict[str, Any] = {
    "first": lambda fast, slow: Hybrid([likeliest(2), DraftModel(slow)], "first"),
    "merge": lambda fast, slow: Hybrid([likeliest(2), DraftModel(slow)], "merge"),
    "staged": lambda fast, slow: Staged(slow, DraftModel(fast)),
}


def automatic(method: str, num_samples: int, monkeypatch: pytest.MonkeyPatch) -> float:
    clock = Clock()
    clock.install(monkeypatch)
    # names of their own: what engines of one name measured is shared
    target = Timed(TARGET, clock, 1.0, f"target of {method}, {num_samples} samples")
    fast, slow = (Timed(DRAFT, clock, seconds, f"draft of {seconds}") for seconds in (0.02, 0.1))
    return p_value(AUTOMATIC[method](fast, slow), num_samples, "auto", target=target, batch=8)


@pytest.mark.parametrize("method", AUTOMATIC)
def test_the_distribution_is_the_targets_where_k_and_price_are_automatic(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert automatic(method, NUM_SAMPLES, monkeypatch) > SIGNIFICANCE


@pytest.mark.slow
@pytest.mark.parametrize("method", AUTOMATIC)
def test_many_samples_where_k_and_price_are_automatic(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert automatic(method, 300_000, monkeypatch) > SIGNIFICANCE


def test_dropping_a_drawn_draft_for_how_it_came_out_is_found_out() -> None:
    """Every drafter and the hybrid alike: here the drafter itself keeps the short ones back."""
    assert p_value(Hybrid([several(), drawn(least=2)], "first"), MORE_SAMPLES) < 1e-6


def test_the_other_vocabulary_is_another() -> None:
    """Otherwise the tests above say nothing of translation."""
    ids = THEIRS("abcbd")["input_ids"]
    assert ids == [4, 3, 1, 0] and THEIRS.decode(ids) == OURS.decode(OURS("abcbd")["input_ids"])
    assert len(OURS.tokens) == VOCAB
