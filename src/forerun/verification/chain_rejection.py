"""Rejection sampling of chains drawn from known distributions: the tensor code around `chain_rejection_math`."""

from __future__ import annotations

from itertools import islice

import torch
from torch import Tensor

from forerun.errors import UnsoundProbsError
from forerun.kernels.cpu import paced_threads
from forerun.sampling import draw_tokens
from forerun.types import Draft, Noise, PackedDrafts, Verdict
from forerun.verification.chain_rejection_math import ChainRule, excess


class Rejection:
    """Accepts a prefix of each drawn chain by a `ChainRule`, then draws one token from what is left."""

    lossless = True

    def __init__(self, rule: ChainRule) -> None:
        self.rule = rule

    def verify(self, drafts: PackedDrafts, target_logprobs: Tensor, noise: Noise) -> list[Verdict]:
        with paced_threads():
            target = target_logprobs.exp()
        accept_probs, left, masses = self.weigh(drafts, target)
        longest = max(map(len, accept_probs))
        uniforms = noise.uniform(len(accept_probs) * (longest + 1)).reshape(-1, longest + 1)
        accepted = [
            self.rule.length([number < accept_prob for number, accept_prob in zip(numbers, each, strict=False)])
            for numbers, each in zip(uniforms.tolist(), accept_probs, strict=True)
        ]
        rows = [start + length for start, length in zip(drafts.offsets, accepted, strict=False)]
        weights = left.index_select(0, torch.tensor(rows, device=left.device))
        # Where both distributions are equal to rounding there is no excess, and no rejection but by rounding.
        equal = [index for index, row in enumerate(rows) if masses[row] <= 0]
        if equal:
            weights[equal] = target[[rows[index] for index in equal]]
        tokens = draw_tokens(weights, uniforms[:, longest]).tolist()
        return [Verdict(list(range(length)), token) for length, token in zip(accepted, tokens, strict=True)]

    def weigh(self, drafts: PackedDrafts, target: Tensor) -> tuple[list[list[float]], Tensor, list[float]]:
        """Compute what the decision depends on besides random numbers. target: [rows, V] probabilities.

        Returns:
            For each chain, the probabilities that the comparisons at its drafted tokens succeed; [rows, V], the
            weights of the token that follows when the chain ends at the row; and [rows], their sums.
        """
        probs = [checked_probs(draft, target) for draft in drafts.drafts]
        draft_probs = probs[0] if len(probs) == 1 else torch.cat(probs)
        ratios = _ratios(drafts, target, draft_probs)
        carries = [self.rule.carry(each) for each in ratios]
        column: list[float] = []
        ends: list[int] = []
        for draft, start, carry in zip(drafts.drafts, drafts.offsets, carries, strict=False):
            num_ends = len(draft) + 1 - draft.num_candidates
            column += [*carry[:-1], *[1] * num_ends]
            ends += range(start + draft.num_candidates, start + len(draft) + 1)
        of_target = torch.tensor(column, dtype=target.dtype, device=target.device)[:, None]
        with paced_threads():
            left = excess(of_target, target, draft_probs)
        # Where no candidate was drawn, nothing was meant for one: the bonus token is drawn from the target.
        index = torch.tensor(ends, device=target.device)
        left.index_copy_(0, index, target.index_select(0, index))
        masses: list[float] = left.sum(-1).tolist()
        accept_probs = [
            self.rule.acceptance(ratio, carry, masses[start : start + len(carry)])
            for ratio, carry, start in zip(ratios, carries, drafts.offsets, strict=False)
        ]
        return accept_probs, left, masses


def _ratios(drafts: PackedDrafts, target: Tensor, draft_probs: Tensor) -> list[list[float]]:
    """Return target / draft at each drafted token of each chain. target, draft_probs: [rows, V] probabilities."""
    vocab_size = target.shape[-1]
    flat = [
        (start + node) * vocab_size + token_id
        for draft, start in zip(drafts.drafts, drafts.offsets, strict=False)
        for node, token_id in enumerate(draft.ids[: draft.num_candidates])
    ]
    index = torch.tensor(flat, dtype=torch.int64, device=target.device)
    theirs, drawn = torch.stack([target.take(index), draft_probs.take(index)]).tolist()
    if not all(each > 0 for each in drawn):  # NaN is not either
        raise UnsoundProbsError
    ratios = iter([ours / each for ours, each in zip(theirs, drawn, strict=True)])
    return [list(islice(ratios, draft.num_candidates)) for draft in drafts.drafts]


def checked_probs(draft: Draft, like: Tensor) -> Tensor:
    """Return the draft's distributions [n + 1, V], in the type and on the device of `like` [..., V]; a zero row for an
    empty draft.

    Raises:
        ValueError: the draft has no distributions, or distributions of another shape.
    """
    if draft.probs is None and len(draft):
        raise ValueError("rejection needs the distributions that the draft was drawn from; walk serves chosen drafts")
    probs = like.new_zeros(1, like.shape[-1]) if draft.probs is None else draft.probs
    if probs.shape != (len(draft) + 1, like.shape[-1]):
        raise ValueError(f"probs have shape {tuple(probs.shape)}, not {(len(draft) + 1, like.shape[-1])}")
    return probs.to(like)
