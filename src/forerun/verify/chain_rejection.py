"""Rejection sampling of chains drawn from known distributions: the tensor code around `chain_rejection_math`."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from forerun.sampling import draw_tokens
from forerun.types import Draft, Noise, PackedDrafts, Verdict
from forerun.verify.chain_rejection_math import ChainRule, Numbers, excess

_SMALLEST = 1e-300
"""In place of a draft's zero: such a token could not be drawn, and is accepted if the target can draw it."""


class Rejection:
    """Accepts a prefix of each drawn chain by a `ChainRule`, then draws one token from what is left."""

    lossless = True

    def __init__(self, rule: ChainRule) -> None:
        self.rule = rule

    def verify(self, drafts: PackedDrafts, target_logprobs: Tensor, noise: Noise) -> list[Verdict]:
        target = target_logprobs.exp()
        chances, left, mass_left = self.weigh(drafts, target)
        num_chains, longest = chances.shape
        uniforms = noise.uniform(num_chains * (longest + 1)).reshape(num_chains, longest + 1)
        accepted = self.rule.length(uniforms[:, :longest].cpu().numpy() < chances)

        rows = np.array(drafts.offsets[:-1]) + accepted
        weights = left.index_select(0, torch.from_numpy(rows).to(target.device))
        # Where both distributions are equal to rounding there is no excess, and no rejection but by rounding.
        equal = mass_left[rows] <= 0
        if equal.any():
            weights[torch.from_numpy(equal)] = target[torch.from_numpy(rows[equal]).to(target.device)]
        tokens = draw_tokens(weights, uniforms[:, longest]).tolist()
        return [Verdict(list(range(n)), token) for n, token in zip(accepted.tolist(), tokens, strict=True)]

    def weigh(self, drafts: PackedDrafts, target: Tensor) -> tuple[Numbers, Tensor, Numbers]:
        """What the decision depends on, beside chance. target: [rows, V] probabilities.

        Returns:
            [B, longest] float64, the chance that the comparison at each drafted token succeeds, 0 beyond a
            chain's end; [rows, V], the weights of the token that follows when the walk ends at the row; and
            [rows] float64, their sums.
        """
        layout = _Layout.of(drafts)
        laws = [checked_laws(draft, target) for draft in drafts.drafts]
        draft_probs = laws[0] if len(laws) == 1 else torch.cat(laws)
        ratios = layout.ratios(drafts, target, draft_probs)
        carries = self.rule.carry(ratios)
        left = excess(layout.by_row(carries).to(target), target, draft_probs)
        # Where no candidate was drawn, nothing was meant for one: the bonus token is drawn from the target.
        ends = torch.from_numpy(layout.ends()).to(target.device)
        left.index_copy_(0, ends, target.index_select(0, ends))
        mass_left: Numbers = left.sum(-1).double().cpu().numpy()
        chances = self.rule.acceptance(ratios, carries, mass_left[layout.rows], layout.lengths)
        return chances, left, mass_left


@dataclass(frozen=True, slots=True)
class _Layout:
    """Where the chains of a step lie in the packed rows.

    Attributes:
        lengths: [B] candidates of each chain.
        rows: [B, longest + 1] the packed row after each number of tokens; what lies beyond a chain is another's.
        inside: [B, longest] bool, whether the chain has that many tokens.
        drawn_rows: packed rows that a candidate was drawn at, chain after chain.
        num_rows: packed rows in all.
    """

    lengths: NDArray[np.int64]
    rows: NDArray[np.int64]
    inside: NDArray[np.bool_]
    drawn_rows: NDArray[np.int64]
    num_rows: int

    @classmethod
    def of(cls, drafts: PackedDrafts) -> _Layout:
        lengths = np.array([draft.num_candidates for draft in drafts.drafts])
        places = np.arange(lengths.max(initial=0) + 1)
        rows = np.minimum(np.array(drafts.offsets[:-1])[:, None] + places, drafts.offsets[-1] - 1)
        inside = places[:-1] < lengths[:, None]
        return cls(lengths, rows, inside, rows[:, :-1][inside], drafts.offsets[-1])

    def ends(self) -> NDArray[np.int64]:
        """All other rows: a chain's end, and its probes beyond."""
        drawn = np.zeros(self.num_rows, dtype=bool)
        drawn[self.drawn_rows] = True
        return np.flatnonzero(~drawn)

    def ratios(self, drafts: PackedDrafts, target: Tensor, draft_probs: Tensor) -> Numbers:
        """[B, longest] float64 target / draft at each drafted token; 0 beyond a chain's end."""
        ratios = np.zeros(self.inside.shape)
        if ratios.size:
            tokens = np.array([i for draft in drafts.drafts for i in draft.ids[: draft.num_candidates]])
            places = torch.from_numpy(self.drawn_rows * target.shape[-1] + tokens).to(target.device)
            both = torch.stack([target.take(places), draft_probs.take(places)]).double().cpu().numpy()
            ratios[self.inside] = both[0] / np.maximum(both[1], _SMALLEST)
        return ratios

    def by_row(self, carries: Numbers) -> Tensor:
        """[B, longest + 1] carries -> [rows, 1]; 1 at a chain's end and beyond."""
        by_row = np.ones((self.num_rows, 1))
        by_row[self.drawn_rows, 0] = carries[:, :-1][self.inside]
        return torch.from_numpy(by_row)


def checked_laws(draft: Draft, like: Tensor) -> Tensor:
    """[n + 1, V] the draft's distributions, in the type and on the device of `like` [..., V]; a zero row for no draft.

    Raises:
        ValueError: the draft has no distributions, or distributions of another shape.
    """
    if draft.laws is None and len(draft):
        raise ValueError("rejection needs the laws that the draft was drawn from; walk serves chosen drafts")
    laws = like.new_zeros(1, like.shape[-1]) if draft.laws is None else draft.laws
    if laws.shape != (len(draft) + 1, like.shape[-1]):
        raise ValueError(f"laws have shape {tuple(laws.shape)}, not {(len(draft) + 1, like.shape[-1])}")
    return laws.to(like)
