"""Chains: each token follows the one before it (Leviathan et al., 2211.17192; Chen et al., 2302.01318).

What is drawn with its distributions is judged by rejection; what is picked greedily, or with the noise that a seeded
request shares with the target (Daliri et al., 2408.07978), counts as chosen.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence as Seq
from typing import Any

import torch
from torch import Tensor

from forerun.config import PREFILL_CHUNK
from forerun.drafters.growth.base import Growth
from forerun.drafters.growth.growing_chain import Confidence, GrowingChain, Picking, end_chains, picking_of
from forerun.drafters.models.base import DraftingModel
from forerun.models import Rows
from forerun.models.draft_session import DraftSession, Pick
from forerun.sampling import DeadRows, draw_tokens, row_argmax
from forerun.types import Draft, Sequence

Begin = Callable[[Seq[GrowingChain]], Seq[list[int]]]
"""Returns for each chain the tokens of a path that somebody else gave. The model checks them in one forward, and keeps
those that it would have picked itself; the chain goes on from there."""


class ChainGrowth(Growth):
    """Grows chains.

    Given a minimum acceptance probability, a chain ends where the probability that all of it is accepted, as measured
    for the model's probabilities, no longer exceeds it.

    Args:
        begin: where chains begin; None: at the last committed token.
    """

    continues = True

    def __init__(self, model: DraftingModel[Any], begin: Begin | None = None) -> None:
        super().__init__(model)
        self._begin = begin
        self._given: Mapping[Sequence, Draft] = {}
        self._confidence: dict[Picking, Confidence] = {picking: Confidence() for picking in Picking}

    def begin_with(self, paths: Mapping[Sequence, Draft]) -> None:
        self._given = paths

    def draft(
        self, sequences: Seq[Sequence], num_draft_tokens: Seq[int], min_acceptance_prob: float = 0.0
    ) -> list[Draft]:
        given = self._given
        self._given = {}
        chains = []
        rooms = [
            self._model.max_depth(sequence, self._model.longest_chain(max_nodes))
            for sequence, max_nodes in zip(sequences, num_draft_tokens, strict=True)
        ]
        for sequence, room in zip(sequences, self._model.affordable(sequences, rooms, rooms), strict=True):
            picking = picking_of(sequence)
            chains.append(
                GrowingChain(
                    self._model.states[sequence], picking, room, min_acceptance_prob, self._confidence[picking]
                )
            )
        growing = [chain for chain in chains if chain.max_nodes > 0]
        self._prepare(growing, given)
        self._grow([chain for chain in growing if not chain.ended], min_acceptance_prob)
        for chain in chains:
            counted = min_acceptance_prob > 0 and len(chain.tree) > 0
            chain.state.remember((chain.tree, chain.confidence.rates) if counted else None)
        return [chain.draft() for chain in chains]

    def _grow(self, growing: list[GrowingChain], min_acceptance_prob: float) -> None:
        """Grow the chains to their ends."""
        takes_largest = all(self._model.takes_largest(chain.sequence) for chain in growing)
        chains = self._draft_session(growing, min_acceptance_prob > 0, takes_largest)
        if chains is not None:
            self._grow_in_session(chains, growing, min_acceptance_prob > 0, takes_largest)
            return
        while growing:
            rows = [
                Rows(
                    chain.state.cache,
                    [*chain.unfed, *self._model.columns.readable(chain.proposed)],
                    None,
                    chain.num_rows,
                )
                for chain in growing
            ]
            result = self._model.feed(rows, [chain.state for chain in growing])
            self._extend_finite(growing, result.logits, min_acceptance_prob > 0)
            growing = [chain for chain in growing if not chain.ended]

    def _draft_session(
        self, growing: list[GrowingChain], with_probabilities: bool, takes_largest: bool
    ) -> DraftSession | None:
        """Return a session that computes these chains row by row; None for one forward over all rows."""
        if not growing or any(chain.proposed for chain in growing):
            return None
        num_ahead = min(chain.max_nodes - len(chain.tree) for chain in growing) if takes_largest else 1
        pick = Pick(self._model.columns.num_columns, with_probabilities, num_ahead)
        return self._model.draft_session([chain.state for chain in growing], pick)

    def _grow_in_session(
        self, chains: DraftSession, growing: list[GrowingChain], with_probabilities: bool, takes_largest: bool
    ) -> None:
        """Grow chains without proposed tokens to their ends."""
        while growing:
            found = self._model.advance(chains, [chain.unfed for chain in growing], [chain.state for chain in growing])
            if takes_largest and min(found.columns) >= 0:
                tokens = self._model.columns.names(found.columns)
                for i, chain in enumerate(growing):
                    accept_probs = None if found.probabilities is None else found.probabilities[i : i + 1]
                    self._keep(chain, chain.extend(tokens[i : i + 1], accept_probs, None))
            else:
                self._extend_finite(growing, found.logits, with_probabilities)
            kept = [position for position, chain in enumerate(growing) if not chain.ended]
            if kept and len(kept) < len(growing):
                chains.keep(kept)
            growing = [growing[position] for position in kept]

    def _prepare(self, chains: list[GrowingChain], paths: Mapping[Sequence, Draft]) -> None:
        """Set what each chain is fed first, its random numbers, and the path that it begins with. paths: those that are
        given."""
        self._model.prefill([chain.state for chain in chains], PREFILL_CHUNK)
        drawn = []
        for chain in chains:
            chain.unfed = self._model.unfed(chain.state)
            if (given := paths.get(chain.sequence)) is not None:
                chain.give(given, self._model.vocab_size)
                chain.unfed = [*chain.unfed, *self._model.columns.readable(chain.tree.ids)]
            if chain.picking is Picking.DRAWN:
                drawn.append(chain)
        if drawn:
            sizes = [chain.max_nodes for chain in drawn]
            uniforms = torch.rand(sum(sizes), dtype=torch.float64, generator=self._generator)
            for chain, part in zip(drawn, torch.split(uniforms, sizes), strict=True):
                chain.uniforms = part
        whole = [chain for chain in chains if not len(chain.tree)]
        if self._begin is not None and whole:
            for chain, path in zip(whole, self._begin(whole), strict=True):
                chain.proposed = path

    def _extend_finite(self, chains: list[GrowingChain], logits: Tensor, with_probabilities: bool) -> None:
        """Extend the chains as `_extend` does; chains that have a row with logits that are not finite end."""
        bad = self._model.non_finite_rows(logits)
        if bad:
            chains, logits = end_chains(chains, logits, bad)
        if chains:
            self._extend(chains, logits, with_probabilities)

    def _extend(self, chains: list[GrowingChain], logits: Tensor, with_probabilities: bool) -> None:
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
            probabilities = self._accept_probs(members, values, picked, picking) if with_probabilities else None
            start = 0
            for chain in members:
                part = slice(start, start + chain.num_rows)
                start = part.stop
                accept_probs = None if probabilities is None else probabilities[part]
                self._keep(chain, chain.extend(tokens[part], accept_probs, None if probs is None else probs[part]))

    def _pick(self, picking: Picking, chains: list[GrowingChain], logits: Tensor) -> tuple[Tensor, Tensor]:
        """Return what each row's token is picked by, and the token.

        Greedy chains take the argmax, seeded ones with the target's noise added; the others draw.

        Returns:
            [R, V] logits up to a constant, or distributions if drawn; [R] tokens, -1 where the model can propose none.
            Where the argmax is enough, the logits are those of the draft vocabulary.
        """
        if picking is Picking.GREEDY and all(
            self._model.pipeline.is_identity(chain.sequence.params) for chain in chains
        ):
            values = logits[:, : self._model.columns.num_columns]
            return values, self._model.columns.named(row_argmax(values))
        dead: DeadRows = {}
        positions = []
        for chain in chains:
            path = chain.tree.ids
            positions.append((chain.state, path[:]))
            positions.extend((chain.state, [*path, *chain.proposed[:i]]) for i in range(1, chain.num_rows))
        if picking is Picking.DRAWN:
            values = self._model.probs(logits, positions, dead)
            at = [(len(chain.tree), chain) for chain in chains]
            parts = [chain.uniforms[i : i + chain.num_rows] for i, chain in at if chain.uniforms is not None]
            picked = draw_tokens(values, parts[0] if len(parts) == 1 else torch.cat(parts))
        else:
            values = self._model.logprobs(logits, positions, dead)
            if picking is Picking.SEEDED:
                noise = [chain.noise(self._model.vocab_size) for chain in chains]
                values = torch.add(noise[0] if len(noise) == 1 else torch.cat(noise), values)
            picked = row_argmax(values)
        picked[list(dead)] = -1
        return values, picked

    def _accept_probs(
        self, chains: list[GrowingChain], values: Tensor, picked: Tensor, picking: Picking
    ) -> list[float]:
        """Return [R] the draft model's probabilities of the picked tokens.

        values: as `_pick` returns them.
        """
        if picking is Picking.GREEDY:  # the most probable token is the one that was picked
            highest: list[float] = values.softmax(-1).amax(-1).tolist()
            return highest
        probs = values if picking is Picking.DRAWN else values.softmax(-1)
        probabilities: list[float] = probs.gather(-1, picked.clamp(min=0)[:, None])[:, 0].tolist()
        return probabilities

    def _keep(self, chain: GrowingChain, num_proposed: int) -> None:
        """Drop the rows that the draft model would not have been fed: those after so many of the proposed tokens."""
        rejected = len(chain.proposed) - num_proposed
        if rejected:
            chain.state.drop(len(chain.state.scratch) - rejected)
        chain.unfed = self._model.columns.readable(chain.tree.ids[-1:])
        chain.proposed = []
