"""One chain while it grows: its tokens, what they were picked by, and where it ends."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from enum import Enum
from math import sqrt

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from forerun.drafters.growth.ranked_tree import RankedTree
from forerun.drafters.models.state import DraftState
from forerun.sampling import NoiseKey, keyed_gumbel
from forerun.speculation import Rates, bin_centres, bin_of
from forerun.types import Draft, Sequence


class Picking(Enum):
    """The ways of picking a request's tokens."""

    GREEDY = "greedy"
    SEEDED = "with the noise that the target adds too"
    DRAWN = "drawn from the draft model's distributions"


def picking_of(sequence: Sequence) -> Picking:
    """Return how a request's tokens are picked."""
    params = sequence.params
    if params.greedy:
        return Picking.GREEDY
    return Picking.DRAWN if params.seed is None else Picking.SEEDED


_BINS = 12
"""Bins of a draft model's probabilities; they are equally wide in the probability's square root."""
_RANKS = 3
"""Ranks of a token among its siblings that are measured apart; later ones count as the last."""
ROW_SHARE = 0.5
"""Of what a further token costs, the target's row; the rest, the draft model's forward, is paid when a chain looks at
the token, so that the last one is kept unless it is worth less than a row."""
_DECAY = 0.995
"""Weight that earlier trials of a level keep at each new one."""


class Confidence:
    """Turns the probability that a draft model gives a token into the probability that it is accepted.

    Probabilities fall into bins that are narrower towards 0, apart for each rank among the token's siblings. Of each
    bin it is measured how often its tokens were accepted; inside a bin the probability grows with the probability, so
    that the order of tokens stays. The prior is the probability itself.

    Attributes:
        rates: where the trials are counted, by level.
    """

    __slots__ = ("_typical", "rates")

    def __init__(self) -> None:
        self._typical = [centre**2 for centre in bin_centres(_BINS)]
        self.rates = Rates(self._typical * _RANKS, decay=_DECAY)

    def level(self, probability: float, rank: int = 0) -> int:
        """Return the level that a token is counted in. rank: 0 for the most probable of its siblings."""
        bin_index = bin_of(sqrt(min(max(probability, 0.0), 1.0)), _BINS)
        return min(rank, _RANKS - 1) * _BINS + bin_index

    def factors(self) -> list[float]:
        """Return the factor of every level, from probability to acceptance probability, as measured now."""
        return [self._factor(level) for level in range(len(self.rates))]

    def accept_prob(self, probability: float, level: int) -> float:
        """Return the probability, at most 1, that a token of this level is accepted if its parent is."""
        return min(probability * self._factor(level), 1.0)

    def _factor(self, level: int) -> float:
        """Return the factor from the draft model's probability to the acceptance probability at this level."""
        return self.rates.rate(level) / self._typical[level % _BINS]


_NOISE_AT_ONCE = 2**16
"""Noise values made at once: one call for several positions costs less than one each."""


@dataclass(slots=True, eq=False)
class GrowingChain:
    """One chain while it grows.

    Attributes:
        state: state of its sequence.
        picking: how its tokens are picked.
        max_nodes: tokens at most.
        min_acceptance_prob: it ends where the probability that all of it is accepted is no more than this.
        confidence: turns the draft model's probabilities into probabilities of acceptance.
        tree: its tokens so far, with their levels if there is a minimum probability.
        unfed: tokens to be fed first.
        proposed: what may follow them; the model is fed these too, and keeps those it would have picked itself.
        probs: [V] each, of the tokens so far, if they are drawn.
        accept_prob: that all tokens so far are accepted.
        uniforms: [max_nodes] for draws.
        estimates: [num_rows] of the probabilities that the next tokens are accepted, where the model gives them beside
            its probabilities.
    """

    state: DraftState
    picking: Picking
    max_nodes: int
    min_acceptance_prob: float
    confidence: Confidence
    tree: RankedTree = field(default_factory=RankedTree)
    unfed: list[int] = field(default_factory=list)
    proposed: list[int] = field(default_factory=list)
    probs: list[Tensor] = field(default_factory=list)
    accept_prob: float = 1.0
    uniforms: Tensor | None = None
    ended: bool = False
    estimates: list[float] = field(default_factory=list)
    _noise: Tensor | None = None
    _noise_from: int = 0

    @property
    def sequence(self) -> Sequence:
        return self.state.sequence

    @property
    def num_rows(self) -> int:
        """Return the number of rows of the next forward that have logits."""
        return len(self.proposed) + 1

    def give(self, path: Draft, vocab_size: int) -> None:
        """Begin with tokens that were not picked from the model's logits; before anything else."""
        token_ids = path.ids[: self.max_nodes]
        for token_id, accept_prob in zip(token_ids, path.accept_probs, strict=False):
            self.tree.add(token_id, len(self.tree) - 1, -1, accept_prob)
            self.accept_prob = accept_prob
        if self.picking is Picking.DRAWN:  # of a token that no draw decides, the distribution is certain
            self.probs.extend(one_hot(torch.tensor(token_ids), vocab_size).float())
        self.ended = len(self.tree) == self.max_nodes

    def extend(self, picked: Seq[int], probabilities: Seq[float] | None, probs: Tensor | None) -> int:
        """Take what was picked at each row, as far as the rows before it were fed what was picked there.

        Args:
            picked: [num_rows] tokens; -1 ends the chain.
            probabilities: [num_rows] the draft model's probabilities of them; None without a minimum probability.
            probs: [num_rows, V] that they were drawn from; None if they were chosen.

        Returns:
            How many of the proposed tokens are kept.
        """
        for i, token_id in enumerate(picked):
            if token_id < 0:
                self.ended = True
                return i
            probability = None if probabilities is None else probabilities[i]
            self._take(token_id, probability, None if probs is None else probs[i])
            if self.ended or i == len(self.proposed) or token_id != self.proposed[i]:
                return i
        raise AssertionError("one row more than proposed tokens")

    def _take(self, token_id: int, probability: float | None, distribution: Tensor | None) -> None:
        level = 0
        if probability is not None:
            level = self.confidence.level(probability)
            self.accept_prob *= self.confidence.accept_prob(probability, level)
            self.ended = self.accept_prob <= self.min_acceptance_prob
            if self.accept_prob <= ROW_SHARE * self.min_acceptance_prob and distribution is None:
                return
        # A drawn token that was looked at stays: to drop it would bias what is accepted.
        tree = self.tree
        tree.add(token_id, len(tree) - 1, level, self.accept_prob)
        if distribution is not None:
            self.probs.append(distribution)
        self.ended = self.ended or len(tree) == self.max_nodes

    def noise(self, vocab_size: int) -> Tensor:
        """Return [num_rows, V] the noise that the target adds at the next positions."""
        first = len(self.tree)
        wanted = self.num_rows
        if self._noise is None or first + wanted > self._noise_from + len(self._noise):
            params = self.sequence.params
            length = len(self.sequence.token_ids)
            assert params.seed is not None
            end = min(self.max_nodes, first + max(wanted, _NOISE_AT_ONCE // vocab_size))
            keys = [NoiseKey(params.seed, self.sequence.choice, length + i) for i in range(first, end)]
            self._noise = keyed_gumbel(keys, vocab_size)
            self._noise_from = first
        at = first - self._noise_from
        return self._noise[at : at + wanted]

    def draft(self) -> Draft:
        if not self.probs:
            return Draft.chain(self.tree.ids)
        unread = torch.zeros_like(self.probs[-1])  # the row after the last node, whose children were not drawn
        return Draft.chain(self.tree.ids, torch.stack([*(row.to(unread) for row in self.probs), unread]))


def end_chains(chains: list[GrowingChain], logits: Tensor, bad: frozenset[int]) -> tuple[list[GrowingChain], Tensor]:
    """End the chains that have a row of `bad`; what they hold stays, since drawn tokens must not be dropped.

    Returns:
        The other chains, and their rows of the logits.
    """
    others: list[GrowingChain] = []
    rows: list[int] = []
    start = 0
    for chain in chains:
        part = range(start, start + chain.num_rows)
        start = part.stop
        if bad.isdisjoint(part):
            others.append(chain)
            rows.extend(part)
        else:
            chain.ended = True
    return others, logits[rows]
