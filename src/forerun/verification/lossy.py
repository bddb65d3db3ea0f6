"""Acceptance by threshold: faster, and not the target's distribution. Used only if named.

A node is accepted if its parent is and its token passes the threshold under the target. The longest accepted path is
taken (of equal ones the most probable), and the next token is drawn from the target's distribution at its end.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from forerun.sampling import draw_tokens
from forerun.types import Draft, Noise, PackedDrafts, Verdict

TYPICAL_EPSILON = 0.09
"""Typical acceptance: a token this probable is accepted at any entropy (Medusa, 2401.10774)."""
TYPICAL_DELTA = 0.3
"""Typical acceptance: the threshold is at most this times exp(-entropy); the square root of epsilon."""
ACCEPT_TOP_K = 3
"""Top-k acceptance: a token is accepted among this many most probable ones."""
ACCEPT_TOP_P = 0.8
"""Top-p acceptance: a token is accepted in the smallest set of most probable ones with this mass."""

GoodEnough = Callable[[Tensor, Tensor], Tensor]
"""(target probabilities [N, V], tokens [N]) -> [N] bool."""


def typical(target: Tensor, tokens: Tensor) -> Tensor:
    """Return p(token) > min(epsilon, delta * exp(-entropy)) (Medusa, 2401.10774, equation in its section 2.3)."""
    entropy = torch.special.entr(target).sum(-1)
    return _accept_prob(target, tokens) > (TYPICAL_DELTA * torch.exp(-entropy)).clamp(max=TYPICAL_EPSILON)


def in_top_k(target: Tensor, tokens: Tensor) -> Tensor:
    """Return whether fewer than ACCEPT_TOP_K tokens are more probable."""
    accept_prob = _accept_prob(target, tokens)
    return ((target > accept_prob[:, None]).sum(-1) < ACCEPT_TOP_K) & (accept_prob > 0)


def in_top_p(target: Tensor, tokens: Tensor) -> Tensor:
    """Return whether more probable tokens have less than ACCEPT_TOP_P of the mass."""
    accept_prob = _accept_prob(target, tokens)
    above = torch.where(target > accept_prob[:, None], target, 0).sum(-1)
    return (above < ACCEPT_TOP_P) & (accept_prob > 0)


class Threshold:
    """A lossy rule that accepts tokens by a threshold."""

    lossless = False

    def __init__(self, good_enough: GoodEnough) -> None:
        self.good_enough = good_enough

    def verify(self, drafts: PackedDrafts, target_logprobs: Tensor, noise: Noise) -> list[Verdict]:
        target = target_logprobs.exp()
        parent_rows = [
            parent + offset + 1
            for draft, offset in zip(drafts.drafts, drafts.offsets, strict=False)
            for parent in draft.parents
        ]
        rows = torch.tensor(parent_rows, dtype=torch.int64, device=target.device)
        ids = [token_id for draft in drafts.drafts for token_id in draft.ids]
        tokens = torch.tensor(ids, dtype=torch.int64, device=target.device)
        good = self.good_enough(target[rows], tokens).tolist()
        scores = target_logprobs[rows, tokens].tolist()
        paths, start = [], 0
        for draft in drafts.drafts:
            end = start + len(draft)
            paths.append(_longest_path(draft, good[start:end], scores[start:end]))
            start = end
        ends = [offset + (path[-1] + 1 if path else 0) for path, offset in zip(paths, drafts.offsets, strict=False)]
        next_tokens = draw_tokens(target[ends], noise.uniform(len(ends))).tolist()
        return [Verdict(path, token) for path, token in zip(paths, next_tokens, strict=True)]


def _longest_path(draft: Draft, good: list[bool], scores: list[float]) -> list[int]:
    parents = draft.parents
    best: tuple[int, float] = (0, 0.0)
    best_node = -1
    reached: dict[int, tuple[int, float]] = {-1: (0, 0.0)}  # node -> depth and log-probability of its path
    for node in range(draft.num_candidates):
        if good[node] and parents[node] in reached:
            depth, score = reached[parents[node]]
            reached[node] = (depth + 1, score + scores[node])
            if reached[node] > best:
                best, best_node = reached[node], node
    return draft.path_to(best_node)


def _accept_prob(target: Tensor, tokens: Tensor) -> Tensor:
    return target.gather(-1, tokens[:, None])[:, 0]
