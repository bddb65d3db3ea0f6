"""Distributions that are equal but for an ulp, chances near zero, and what lossy rules prefer."""

from __future__ import annotations

import random

import pytest
import torch

from doubles import parents_of, tokens_of, tree_draft
from forerun.types import Draft, PackedDrafts
from forerun.verification import VERIFIERS

VOCAB = 7


def uniforms(count: int, seed: int) -> list[float]:
    return torch.rand(count, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("length", [1, 3])
@pytest.mark.parametrize("name", ["token", "block"])
def test_where_no_excess_is_left_the_next_token_is_the_targets(
    name: str, length: int, dtype: torch.dtype, given_noise
) -> None:
    """The draft's chance of its own token is an ulp above the target's: that token is refused by rounding alone, and
    nothing of the target's distribution lies above the draft's."""
    almost_one = 1 - 2**-53
    refused = 0
    for seed in range(80):
        generator = torch.Generator().manual_seed(seed)
        logprobs = torch.randn(length + 1, VOCAB, generator=generator, dtype=dtype).log_softmax(-1)
        target = logprobs.exp()
        tokens = target[:length].argmax(-1).tolist()
        probs = target.clone()
        for row, token in enumerate(tokens):
            probs[row, token] = torch.nextafter(target[row, token], torch.tensor(2.0, dtype=dtype))
        last = uniforms(1, seed)[0]
        noise = given_noise([*[almost_one] * length, last])
        (verdict,) = VERIFIERS[name].verify(PackedDrafts.of([Draft.chain(tokens, probs)]), logprobs, noise)
        row = len(verdict.path)
        assert 0 <= verdict.next_token < VOCAB
        cumulative = target[row].double().cumsum(0)
        assert verdict.next_token == int(torch.searchsorted(cumulative, last * cumulative[-1], right=True))
        refused += row < length
    assert refused > 60, refused  # otherwise the bonus token was looked at, and nothing else


@pytest.mark.parametrize("name", ["token", "block"])
def test_a_row_without_excess_beside_rows_with_some(name: str, given_noise) -> None:
    """Only the row that needs it falls back on the target's distribution."""
    logprobs = torch.tensor([[0.5, 0.25, 0.25, 0.0]] * 4, dtype=torch.float64).log()
    target = logprobs.exp()
    equal = target[:2].clone()
    equal[0, 0] = torch.nextafter(target[0, 0], torch.tensor(2.0, dtype=torch.float64))
    other = torch.tensor([[0.0, 0.0, 0.75, 0.25]] * 2, dtype=torch.float64)
    packed = PackedDrafts.of([Draft.chain([0], equal), Draft.chain([2], other)])
    for last, expected in ((0.1, 0), (0.6, 1), (0.9, 2)):
        almost_one = 1 - 2**-53
        verdicts = VERIFIERS[name].verify(packed, logprobs, given_noise([almost_one, last, almost_one, last]))
        assert [verdict.path for verdict in verdicts] == [[], []]
        # beside it the excess is [0.5, 0.25, 0, 0]
        assert [verdict.next_token for verdict in verdicts] == [expected, int(last * 0.75 >= 0.5)]


@pytest.mark.parametrize("name", ["token", "block", "multi-step", "traversal"])
@pytest.mark.parametrize("accept_prob", [1e-3, 1e-9, 1e-20, 1e-30, 1e-200, 1e-290])
def test_a_small_chance_of_the_draft_is_taken_at_its_word(name: str, accept_prob: float, given_noise) -> None:
    """A token that the draft drew with a tiny chance is accepted with the ratio of both chances, not always."""
    target = torch.tensor([[accept_prob / 4, 1.0, 0.0], [0.0, 0.0, 1.0]], dtype=torch.float64)
    probs = torch.tensor([[accept_prob, 0.0, 1.0], [0.0, 0.0, 0.0]], dtype=torch.float64)
    packed = PackedDrafts.of([tree_draft([0], [-1], probs=probs)])
    for uniform, path, token in ((0.2499, [0], 2), (0.2501, [], 1), (0.9, [], 1)):
        (verdict,) = VERIFIERS[name].verify(packed, target.log(), given_noise([uniform, 0.5]))
        assert (verdict.path, verdict.next_token) == (path, token)


def best_path(draft: Draft, good: list[bool], scores: list[float]) -> list[int]:
    """The definition: of all paths whose every node is good the longest, of equally long ones the most probable."""
    parents = parents_of(draft)
    paths: list[list[int]] = [[]]
    for node in range(len(parents)):
        path, above = [node], parents[node]
        while above >= 0:
            path.insert(0, above)
            above = parents[above]
        if all(good[each] for each in path):
            paths.append(path)
    return max(paths, key=lambda path: (len(path), sum(scores[node] for node in path)))


def test_lossy_rules_take_the_longest_path_and_of_equal_ones_the_most_probable(given_noise) -> None:
    """Random trees of all shapes, whose nodes come in no order of probability."""
    rng = random.Random(0)
    shorter_and_likelier = ties = 0
    for seed in range(300):
        count = rng.randint(3, 12)
        parents = [rng.randrange(-1, node) if node else -1 for node in range(count)]
        tokens = [rng.randrange(VOCAB) for _ in range(count)]
        draft = tree_draft(tokens, parents)
        generator = torch.Generator().manual_seed(seed)
        logprobs = (2 * torch.randn(count + 1, VOCAB, generator=generator, dtype=torch.float64)).log_softmax(-1)
        rows = [parent + 1 for parent in parents]
        above = [sorted(logprobs[row].tolist(), reverse=True) for row in rows]
        good = [above[node].index(float(logprobs[row, tokens[node]])) < 3 for node, row in enumerate(rows)]
        scores = [float(logprobs[row, tokens[node]]) for node, row in enumerate(rows)]
        path = best_path(draft, good, scores)
        (verdict,) = VERIFIERS["top-k"].verify(PackedDrafts.of([draft]), logprobs, given_noise([0.5]))
        assert verdict.path == path
        total = sum(scores[node] for node in path)
        shorter_and_likelier += any(good[node] and parents[node] < 0 and scores[node] > total for node in range(count))
        ends = [node for node in range(count) if len(best_path(draft, [*good[: node + 1]] + [False] * count, scores))]
        ties += len(ends) > 1
        assert tokens_of(draft) == tokens
    assert shorter_and_likelier > 50 and ties > 50
