"""A small model of the same vocabulary drafts a chain (Leviathan et al., 2211.17192; Chen et al., 2302.01318).

What it draws with its distributions is judged by rejection; what it picks greedily, or with the noise that a seeded
request shares with the target (Daliri et al., 2408.07978), counts as chosen.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from forerun.config import PREFILL_CHUNK
from forerun.drafters.model.confidence import Confidence
from forerun.drafters.model.draft_cache import DraftState
from forerun.drafters.model.model_drafter import ModelDrafter
from forerun.drafters.model.picking import Picking, picking_of
from forerun.drafters.ranked_tree import RankedTree
from forerun.models import LanguageModel, Rows
from forerun.sampling import NoiseKey, draw_tokens, keyed_gumbel, row_argmax
from forerun.types import Draft, Sequence

_NOISE_AT_ONCE = 2**16
"""Noise values made at once: one call for several positions costs less than one each."""


@dataclass(slots=True, eq=False)
class GrowingChain:
    """One chain while it grows.

    Attributes:
        state: state of its sequence.
        picking: how its tokens are picked.
        budget: tokens at most.
        price: it ends where the chance that all of it is accepted is no more than this.
        confidence: turns the draft model's probabilities into chances of acceptance.
        tree: its tokens so far, with their levels if there is a price.
        unfed: tokens to be fed first.
        proposed: what may follow them; the model is fed these too, and keeps those it would have picked itself.
        probs: [V] each, of the tokens so far, if they are drawn.
        chance: that all tokens so far are accepted.
        uniforms: [budget] for draws.
        estimates: [num_rows] of the chances that the next tokens are accepted, where the model tells them beside its
            probabilities.
    """

    state: DraftState
    picking: Picking
    budget: int
    price: float
    confidence: Confidence
    tree: RankedTree = field(default_factory=RankedTree)
    unfed: list[int] = field(default_factory=list)
    proposed: list[int] = field(default_factory=list)
    probs: list[Tensor] = field(default_factory=list)
    chance: float = 1.0
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
        """Rows of the next forward whose logits are wanted."""
        return len(self.proposed) + 1

    def extend(self, picked: Seq[int], probabilities: Seq[float] | None, probs: Tensor | None) -> int:
        """Take what was picked at each row, as far as the rows before it were fed what was picked there.

        Args:
            picked: [num_rows] tokens.
            probabilities: [num_rows] the draft model's probabilities of them; None without a price.
            probs: [num_rows, V] that they were drawn from; None if they were chosen.

        Returns:
            How many of the proposed tokens are kept.
        """
        for i, token_id in enumerate(picked):
            probability = None if probabilities is None else probabilities[i]
            self._take(token_id, probability, None if probs is None else probs[i])
            if self.ended or i == len(self.proposed) or token_id != self.proposed[i]:
                return i
        raise AssertionError("one row more than proposed tokens")

    def _take(self, token_id: int, probability: float | None, distribution: Tensor | None) -> None:
        level = 0
        if probability is not None:
            level = self.confidence.level(probability)
            self.chance *= self.confidence.chance(probability, level)
            self.ended = self.chance <= self.price
            if self.ended and distribution is None:
                return
        # A drawn token that was looked at stays: to drop it would bias what is accepted.
        tree = self.tree
        tree.add(token_id, len(tree) - 1, level, self.chance)
        if distribution is not None:
            self.probs.append(distribution)
        self.ended = self.ended or len(tree) == self.budget

    def noise(self, vocab_size: int) -> Tensor:
        """[num_rows, V] the noise that the target adds at the next positions."""
        first, wanted = len(self.tree), self.num_rows
        if self._noise is None or first + wanted > self._noise_from + len(self._noise):
            params, length = self.sequence.params, len(self.sequence.token_ids)
            assert params.seed is not None
            end = min(self.budget, first + max(wanted, _NOISE_AT_ONCE // vocab_size))
            keys = [NoiseKey(params.seed, self.sequence.choice, length + i) for i in range(first, end)]
            self._noise, self._noise_from = keyed_gumbel(keys, vocab_size), first
        at = first - self._noise_from
        return self._noise[at : at + wanted]

    def draft(self) -> Draft:
        if not self.probs:
            return Draft.chain(self.tree.ids)
        unread = torch.zeros_like(self.probs[0])  # the row after the last node, whose children nobody drew
        return Draft.chain(self.tree.ids, torch.stack([*self.probs, unread]))


class DraftModel(ModelDrafter):
    """Drafts chains with a causal language model that shares the target's vocabulary.

    Given a price, a chain ends where the chance that all of it is accepted, as measured for the draft model's
    probabilities, no longer exceeds the price.

    Args:
        model: "bundled-draft", a folder, a hub id, or a loaded model; None means the bundled draft, which belongs to
            the bundled target, and for other targets, with `quantize`, the target itself.
        dtype: of its weights; None takes the target's, or float32 where that is float64 and the draft
            is quantised.
        quantize: "int8" or "int4", what its weights are kept in; None: as its files are.

    The model is loaded when an LLM takes the drafter (`bind`).
    """

    def __init__(
        self,
        model: str | Path | LanguageModel | None = None,
        *,
        dtype: str | None = None,
        quantize: str | None = None,
    ) -> None:
        super().__init__(model, dtype, quantize)
        self._confidence: dict[Picking, Confidence] = {picking: Confidence() for picking in Picking}

    def draft(self, sequences: Seq[Sequence], budgets: Seq[int], price: float = 0.0) -> list[Draft]:
        chains = []
        rooms = [self._room(sequence, budget) for sequence, budget in zip(sequences, budgets, strict=True)]
        for sequence, room in zip(sequences, self._affordable(sequences, rooms, rooms), strict=True):
            picking = picking_of(sequence)
            chains.append(GrowingChain(self._states[sequence], picking, room, price, self._confidence[picking]))
        growing = [chain for chain in chains if chain.budget > 0]
        self._prepare(growing)
        self._grow(growing, price)
        for chain in chains:
            counted = price > 0 and len(chain.tree) > 0
            chain.state.remember((chain.tree, chain.confidence.rates) if counted else None)
        return [chain.draft() for chain in chains]

    def _grow(self, growing: list[GrowingChain], price: float) -> None:
        """Let the chains grow to their ends."""
        while growing:
            rows = [
                Rows(chain.state.cache, [*chain.unfed, *self._within_vocabulary(chain.proposed)], None, chain.num_rows)
                for chain in growing
            ]
            result = self._feed(rows, [chain.state for chain in growing])
            logits, bad = result.logits, self._non_finite_rows(result.logits)
            if bad:
                growing, logits = without(growing, logits, bad)
            if growing:
                self._extend(growing, logits, price > 0)
            growing = [chain for chain in growing if not chain.ended]

    def _prepare(self, chains: list[GrowingChain]) -> None:
        """What each chain is fed first, and its random numbers."""
        self._catch_up([chain.state for chain in chains], PREFILL_CHUNK)
        drawn = []
        for chain in chains:
            chain.unfed = self._unfed(chain.state)
            if chain.picking is Picking.DRAWN:
                drawn.append(chain)
        if drawn:
            sizes = [chain.budget for chain in drawn]
            uniforms = torch.rand(sum(sizes), dtype=torch.float64, generator=self._generator)
            for chain, part in zip(drawn, torch.split(uniforms, sizes), strict=True):
                chain.uniforms = part

    def _extend(self, chains: list[GrowingChain], logits: Tensor, priced: bool) -> None:
        """Extend each chain by what was picked at its rows.

        logits: [rows of all chains, draft vocabulary].
        """
        groups: dict[Picking, list[GrowingChain]] = {}
        for chain in chains:
            groups.setdefault(chain.picking, []).append(chain)
        rows: dict[Picking, list[int]] = {}
        if len(groups) > 1:
            at = 0
            for chain in chains:
                rows.setdefault(chain.picking, []).extend(range(at, at + chain.num_rows))
                at += chain.num_rows
        for picking, members in groups.items():
            values, picked = self._pick(picking, members, logits[rows[picking]] if rows else logits)
            tokens = picked.tolist()
            probs = values if picking is Picking.DRAWN else None
            probabilities = self._chances(members, values, picked, picking) if priced else None
            start = 0
            for chain in members:
                part = slice(start, start + chain.num_rows)
                start = part.stop
                chances = None if probabilities is None else probabilities[part]
                self._keep(chain, chain.extend(tokens[part], chances, None if probs is None else probs[part]))

    def _pick(self, picking: Picking, chains: list[GrowingChain], logits: Tensor) -> tuple[Tensor, Tensor]:
        """What each row's token is picked by, and the token.

        Greedy chains take the argmax, seeded ones with the target's noise added; the others draw.

        Returns:
            [R, V] logits up to a constant, or distributions if drawn; [R] tokens. Where the argmax is enough, the
            logits are those of the draft vocabulary.
        """
        if picking is Picking.GREEDY and all(self._pipeline.is_identity(chain.sequence.params) for chain in chains):
            values = logits[:, : self._vocab_size]
            return values, self._named(row_argmax(values))
        places = []
        for chain in chains:
            path = chain.tree.ids
            places.append((chain.state, path[:]))
            places.extend((chain.state, [*path, *chain.proposed[:i]]) for i in range(1, chain.num_rows))
        if picking is Picking.DRAWN:
            probs = self._probs(logits, places)
            at = [(len(chain.tree), chain) for chain in chains]
            parts = [chain.uniforms[i : i + chain.num_rows] for i, chain in at if chain.uniforms is not None]
            return probs, draw_tokens(probs, parts[0] if len(parts) == 1 else torch.cat(parts))
        values = self._logprobs(logits, places)
        if picking is Picking.GREEDY:
            return values, row_argmax(values)
        noise = [chain.noise(self._vocab_size) for chain in chains]
        values = torch.add(noise[0] if len(noise) == 1 else torch.cat(noise), values)
        return values, row_argmax(values)

    def _chances(self, chains: list[GrowingChain], values: Tensor, picked: Tensor, picking: Picking) -> list[float]:
        """[R] what the chances of the picked tokens are judged by: the draft model's probabilities of them.

        values: as `_pick` returns them.
        """
        if picking is Picking.GREEDY:  # the most probable token is the one that was picked
            highest: list[float] = values.softmax(-1).amax(-1).tolist()
            return highest
        probs = values if picking is Picking.DRAWN else values.softmax(-1)
        probabilities: list[float] = probs.gather(-1, picked[:, None])[:, 0].tolist()
        return probabilities

    def _keep(self, chain: GrowingChain, num_proposed: int) -> None:
        """Drop the rows that the draft model would not have been fed: those after so many of the proposed tokens."""
        rejected = len(chain.proposed) - num_proposed
        if rejected:
            chain.state.drop(len(chain.state.scratch) - rejected)
        chain.unfed, chain.proposed = self._within_vocabulary(chain.tree.ids[-1:]), []


def without(chains: list[GrowingChain], logits: Tensor, bad: frozenset[int]) -> tuple[list[GrowingChain], Tensor]:
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
