"""Samples through the real engine follow the target's distribution; a biased verifier is found out.

The model is a Markov chain over five tokens, so that everything a run writes is data: given the token before
them, each two tokens are an independent draw from a joint distribution that is known exactly. A G-test compares the
counts with it, whichever positions the drafts happened to cover.
"""

import random
from collections.abc import Sequence as Seq
from typing import Any

import pytest
import torch
from torch import Tensor

from doubles import MarkovModel, Scripted
from forerun import LLM, DraftModel, PromptLookup, SamplingParams, verification
from forerun.lab.audit.statistics import LEAST_EXPECTED, NOTHING, g_test
from forerun.types import Draft, Noise, PackedDrafts, Sequence, Step, Verdict
from forerun.verification.tree_rejection import TreeRejection, TreeRule
from forerun.verification.tree_rejection_math import Accept, DrawnTree, multi_step, traversal

VOCAB = 5
WINDOW = 2
BATCH = 256
SIGNIFICANCE = 1e-3
NUM_SAMPLES = 4_000
"""With these, every bias that is planted below gets p < 1e-15."""

TARGET = torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(1)) * 1.2
DRAFT = TARGET + torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(2))


def sample(num_samples: int, drafter: Any, acceptance: str | None = None, seeded: bool = False, k: int = 4) -> Tensor:
    """[num_samples or a few more, 1 + WINDOW] windows, each after the token before it."""
    length = -(-num_samples * WINDOW // BATCH) // WINDOW * WINDOW + WINDOW
    target: Any = MarkovModel(TARGET)
    llm: Any = LLM(target, drafter, num_draft_tokens=k, acceptance=acceptance, max_batch=BATCH, seed=20)
    params = [SamplingParams(max_tokens=length, seed=i if seeded else None) for i in range(BATCH)]
    results = llm.generate([[i % VOCAB] for i in range(BATCH)], params)
    tokens = torch.tensor([[i % VOCAB, *result.token_ids] for i, result in enumerate(results)])
    if drafter is not None:
        assert sum(result.stats.num_accepted_tokens for result in results) > num_samples / 10
    return tokens.unfold(1, 1 + WINDOW, WINDOW).reshape(-1, 1 + WINDOW)


def p_value(windows: Tensor, table: Tensor = TARGET) -> float:
    """Of the G-test against the joint distribution given the first column."""
    distribution = table.double().softmax(-1)
    joint = torch.einsum("sa,ab->sab", distribution, distribution).reshape(VOCAB, -1)
    cells = windows[:, 0] * VOCAB**2 + windows[:, 1] * VOCAB + windows[:, 2]
    outcome = NOTHING
    for observed, probabilities in zip(torch.bincount(cells, minlength=VOCAB**3).reshape(VOCAB, -1), joint):
        outcome += g_test(observed.numpy(), probabilities.numpy(), LEAST_EXPECTED)
    return outcome.p_value


def tree(sequence: Sequence, budget: int) -> Draft:
    """The two most probable tokens, and the two most probable after the first of them."""
    if budget < 4:
        return Draft.empty()
    first, second = DRAFT[sequence.token_ids[-1]].topk(2).indices.tolist()
    third, fourth = DRAFT[first].topk(2).indices.tolist()
    return Draft([first, second, third, fourth], [-1, -1, 0, 0])


class Forgetful(Scripted):
    """Keeps no record: that of a million trees would take gigabytes."""

    def commit(self, steps: Seq[Step]) -> None:
        super().commit(steps)
        self.steps.clear()


def drawn_tree(replacement: bool, claimed: bool | None = None, sharpness: float = 1.0) -> Scripted:
    """Trees of random shape, drawn from the draft's distributions.

    claimed: what the draft says of its replacement. sharpness: by which the logits are multiplied.
    """
    rng = random.Random(3)
    probs = (sharpness * DRAFT).softmax(-1)
    weights: list[list[float]] = probs.tolist()

    def propose(sequence: Sequence, budget: int) -> Draft:
        parents: list[int] = []
        tokens = [sequence.token_ids[-1]]  # of each row
        left = {-1: list(weights[tokens[0]])}
        for node in range(rng.randint(budget // 2, budget)):
            parent = rng.choice((-1, rng.randint(-1, node - 1)))
            if not any(left[parent]):
                break  # every token has been drawn
            token = rng.choices(range(VOCAB), left[parent])[0]
            if not replacement:
                left[parent][token] = 0.0
            parents.append(parent)
            tokens.append(token)
            left[node] = list(weights[token])
        told = replacement if claimed is None else claimed
        return Draft([int(t) for t in tokens[1:]], [int(p) for p in parents], probs[tokens], told)

    return Forgetful(propose)


def _int64(values: Seq[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int64)


METHODS: dict[str, tuple[Any, dict[str, Any]]] = {
    "plain": (lambda: None, {}),
    "block": (lambda: DraftModel(MarkovModel(DRAFT)), {}),
    "token": (lambda: DraftModel(MarkovModel(DRAFT)), {"acceptance": "token"}),
    "walk on drawn chains": (lambda: DraftModel(MarkovModel(DRAFT)), {"acceptance": "walk"}),
    "coupled": (lambda: DraftModel(MarkovModel(DRAFT)), {"seeded": True}),
    "prompt lookup": (lambda: PromptLookup(min_ngram=1), {}),
    "tree": (lambda: Scripted(tree), {}),
    "long chains": (lambda: DraftModel(MarkovModel(DRAFT)), {"k": 8}),
    "traversal, with replacement": (lambda: drawn_tree(True), {"k": 6}),
    "traversal, without": (lambda: drawn_tree(False), {"k": 6}),
    "multi-step, with replacement": (lambda: drawn_tree(True), {"k": 6, "acceptance": "multi-step"}),
    "multi-step, without": (lambda: drawn_tree(False), {"k": 6, "acceptance": "multi-step"}),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("method", METHODS)
def test_the_distribution_is_the_targets(method: str) -> None:
    """As many samples as find out what is planted below; the slow test takes a million."""
    drafter, options = METHODS[method]
    windows = sample(NUM_SAMPLES, drafter(), **options)
    assert p_value(windows) > SIGNIFICANCE


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_a_million_samples(method: str) -> None:
    drafter, options = METHODS[method]
    windows = sample(1_000_000, drafter(), **options)
    assert len(windows) >= 1_000_000
    p = p_value(windows)
    print(f"{method}: p = {p:.3f}")
    assert p > SIGNIFICANCE


def wrong_residual(packed: PackedDrafts, logprobs: Tensor, rules: Seq[str], noise: Noise) -> list[Verdict]:
    """Token-level rejection that draws the recovered token from the target's distribution instead of the excess."""
    verdicts = []
    for draft, start in zip(packed.drafts, packed.offsets):
        path: list[int] = []
        for i, token in enumerate(draft.ids):
            assert draft.probs is not None
            if float(noise.uniform(1)) * draft.probs[i, token] >= logprobs[start + i, token].exp():
                break
            path.append(i)
        distribution = logprobs[start + len(path)].double().exp().cumsum(0)
        token = int(torch.searchsorted(distribution, float(noise.uniform(1)) * distribution[-1], right=True))
        verdicts.append(Verdict(path, token))
    return verdicts


def test_a_biased_verifier_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verification, "verify_step", wrong_residual)
    assert p_value(sample(NUM_SAMPLES, DraftModel(MarkovModel(DRAFT)))) < 1e-6


def test_distribution_of_another_temperature_are_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    """The drafter claims other distributions than it drew from."""
    honest = Draft.chain

    def lie(token_ids: Any, probs: Tensor | None = None) -> Draft:
        return honest(
            token_ids, None if probs is None else (probs**2) / (probs**2).sum(-1, keepdim=True).clamp(min=1e-9)
        )

    monkeypatch.setattr(Draft, "chain", staticmethod(lie))
    assert p_value(sample(NUM_SAMPLES, DraftModel(MarkovModel(DRAFT)))) < 1e-6


@pytest.mark.parametrize("rule", [traversal, multi_step])
def test_a_biased_verifier_of_trees_is_rejected(rule: TreeRule, monkeypatch: pytest.MonkeyPatch) -> None:
    """The recovered token is drawn from the target's distribution instead of what is left of it."""

    def biased(packed: PackedDrafts, logprobs: Tensor, rules: Seq[str], noise: Noise) -> list[Verdict]:
        def wrong_residual(tree: DrawnTree[Any], accept: Accept) -> tuple[int, Any]:
            row, _ = rule(tree, accept)
            return row, tree.target(row)

        return TreeRejection(wrong_residual).verify(packed, logprobs, noise)

    monkeypatch.setattr(verification, "verify_step", biased)
    assert p_value(sample(NUM_SAMPLES, drawn_tree(True), k=6)) < 1e-6


@pytest.mark.parametrize("acceptance", ["traversal", "multi-step"])
def test_trees_that_lie_about_replacement_are_rejected(acceptance: str) -> None:
    """Most where the draft is sure of a token, which its siblings then cannot be."""
    assert p_value(sample(NUM_SAMPLES, drawn_tree(False, claimed=True, sharpness=2.0), acceptance, k=6)) < 1e-6
