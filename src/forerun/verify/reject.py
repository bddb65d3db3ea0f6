"""Rejection sampling of chains drawn from known laws: the tensor code around `core`."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from forerun.sampling import draw_tokens
from forerun.types import Draft, Noise, PackedDrafts, Verdict
from forerun.verify.core import ChainRule, Numbers, excess

_CERTAIN = 1e300
"""Ratio of a token that the draft's law gives no chance: finite, so that 0 times it is 0."""


class Rejection:
    """Accepts a prefix of each drawn chain by a rule of `core`, then draws one token from what is left."""

    lossless = True

    def __init__(self, rule: ChainRule) -> None:
        self.rule = rule

    def verify(self, drafts: PackedDrafts, target_logprobs: Tensor, noise: Noise) -> list[Verdict]:
        target = target_logprobs.exp()
        chances, left = self.weigh(drafts, target)
        num_chains, longest = chances.shape
        uniforms = noise.uniform(num_chains * (longest + 1)).reshape(num_chains, longest + 1)
        accepted = self.rule.length(uniforms[:, :longest].cpu().numpy() < chances)

        rows = torch.from_numpy(np.array(drafts.offsets[:-1]) + accepted).to(target.device)
        weights = left[rows]
        # Where both laws are equal to rounding there is no excess, and no rejection but by rounding.
        weights = torch.where(weights.sum(-1, keepdim=True) > 0, weights, target[rows])
        tokens = draw_tokens(weights, uniforms[:, longest]).tolist()
        return [Verdict(list(range(n)), token) for n, token in zip(accepted.tolist(), tokens, strict=True)]

    def weigh(self, drafts: PackedDrafts, target: Tensor) -> tuple[Numbers, Tensor]:
        """What the decision depends on, beside chance. target: [rows, V] probabilities.

        Returns:
            [B, longest] float64, the chance that the comparison at each drafted token succeeds, 0 beyond a
            chain's end; and [rows, V], the weights of the token that follows when the walk ends at the row.
        """
        lengths = np.array([draft.num_candidates for draft in drafts.drafts])
        starts = np.array(drafts.offsets[:-1])
        draft_laws = _laws(drafts.drafts, starts, lengths, target)
        ratios = _ratios(drafts.drafts, starts, lengths, target, draft_laws)
        carries = self.rule.carry(ratios)
        left = excess(_by_row(carries, starts, lengths, len(target)).to(target), target, draft_laws)
        masses = _by_place(left.sum(-1), starts, lengths)
        return self.rule.acceptance(ratios, carries, masses, lengths), left


def _laws(drafts: Seq[Draft], starts: NDArray[np.int64], lengths: NDArray[np.int64], like: Tensor) -> Tensor:
    """[rows, V] the draft's laws in packed order; zero at the chain's end and beyond, where nothing was drawn.

    Zero there makes the excess of the last row the target's own law, which the bonus token is drawn from.
    """
    vocab_size = like.shape[-1]
    laws = []
    for draft in drafts:
        if draft.laws is None and len(draft):
            raise ValueError("rejection needs the laws that the draft was drawn from; walk serves chosen drafts")
        law = like.new_zeros(1, vocab_size) if draft.laws is None else draft.laws.to(like)
        if law.shape != (len(draft) + 1, vocab_size):
            raise ValueError(f"laws have shape {tuple(law.shape)}, not {(len(draft) + 1, vocab_size)}")
        laws.append(law)
    packed = torch.cat(laws)
    for draft, start, length in zip(drafts, starts, lengths, strict=True):
        packed[start + length : start + len(draft) + 1] = 0
    return packed


def _ratios(
    drafts: Seq[Draft], starts: NDArray[np.int64], lengths: NDArray[np.int64], target: Tensor, draft_laws: Tensor
) -> Numbers:
    """[B, longest] float64 target / draft at each drafted token; 0 beyond a chain's end."""
    inside = np.arange(lengths.max(initial=0)) < lengths[:, None]
    ratios = np.zeros(inside.shape)
    if not inside.any():
        return ratios
    rows = torch.from_numpy((starts[:, None] + np.arange(inside.shape[1]))[inside])
    tokens = torch.cat([draft.token_ids[:length] for draft, length in zip(drafts, lengths, strict=True)])
    index = (rows.to(target.device), tokens.to(target.device))
    p, q = target[index].double().cpu().numpy(), draft_laws[index].double().cpu().numpy()
    ratios[inside] = np.where(q > 0, p / np.where(q > 0, q, 1), np.where(p > 0, _CERTAIN, 0)).clip(max=_CERTAIN)
    return ratios


def _by_row(carries: Numbers, starts: NDArray[np.int64], lengths: NDArray[np.int64], num_rows: int) -> Tensor:
    """[B, longest + 1] carries -> [rows, 1] in packed order; 1 at the chain's end and beyond."""
    by_row = np.ones((num_rows, 1))
    inside = np.arange(carries.shape[1]) < lengths[:, None]
    rows = starts[:, None] + np.arange(carries.shape[1])
    by_row[rows[inside], 0] = carries[inside]
    return torch.from_numpy(by_row)


def _by_place(by_row: Tensor, starts: NDArray[np.int64], lengths: NDArray[np.int64]) -> Numbers:
    """[rows] -> [B, longest + 1] float64; what lies beyond a chain's end is not meant to be read."""
    rows = starts[:, None] + np.arange(lengths.max(initial=0) + 1)
    by_place: Numbers = by_row.double().cpu().numpy()[rows.clip(max=len(by_row) - 1)]
    return by_place
