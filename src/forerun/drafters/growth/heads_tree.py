"""Trees of heads that do not read drafted tokens: all depths are known at once."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from torch import Tensor

from forerun.drafters.growth.growing_chain import Picking, picking_of
from forerun.drafters.growth.tree import GrowingTree, TreeGrowth
from forerun.drafters.models.medusa.drafting import MedusaHeads
from forerun.types import Draft, Sequence


class HeadsTreeGrowth(TreeGrowth):
    """Grows trees of which all depths are known at once, where the candidates at a depth are the same below every node
    of the depth before."""

    _model: MedusaHeads

    def draft(
        self, sequences: Seq[Sequence], num_draft_tokens: Seq[int], min_acceptance_prob: float = 0.0
    ) -> list[Draft]:
        drafts = [Draft.empty() for _ in sequences]
        simple = [self._is_simple(sequence) for sequence in sequences]
        for is_simple, make in ((True, self._grown_at_once), (False, super().draft)):
            indices = [index for index, each in enumerate(simple) if each is is_simple]
            if indices:
                made = make(
                    [sequences[index] for index in indices],
                    [num_draft_tokens[index] for index in indices],
                    min_acceptance_prob,
                )
                for index, draft in zip(indices, made, strict=True):
                    drafts[index] = draft
        return drafts

    def _is_simple(self, sequence: Sequence) -> bool:
        """Return whether the candidates at a depth are the same below every node of the depth before."""
        if self._model.heads.config.sequential or picking_of(sequence) is not Picking.GREEDY:
            return False
        return self._model.pipeline.is_identity(self._model.states[sequence].view.params)

    def _grown_at_once(
        self, sequences: Seq[Sequence], num_draft_tokens: Seq[int], min_acceptance_prob: float
    ) -> list[Draft]:
        """Grow the trees of such sequences: one pass of the heads, and no further products."""
        trees = [
            self._plant(each, max_nodes, min_acceptance_prob)
            for each, max_nodes in zip(sequences, num_draft_tokens, strict=True)
        ]
        growing = [tree for tree in trees if tree.expansion.frontier]
        if growing:
            states = [self._model.states[tree.state.sequence] for tree in growing]
            for state in states:
                state.unfed()
            ranked = self._ranked(self._model.look(states))
            at = 0
            for tree, state in zip(growing, states, strict=True):
                _grow(tree, ranked[at:])
                at += state.path_cache.num_heads
        self._count_draft()
        return [self._harvest(tree) for tree in trees]

    def _ranked(self, logits: Tensor) -> list[list[tuple[int, float]]]:
        """Return each row's first tokens with their probabilities, best first. logits: [rows, draft vocabulary]."""
        bad = self._model.non_finite_rows(logits)
        top = logits.topk(min(max(self._width, self._num_ranks), logits.shape[1]))
        tokens = self._model.heads.token_ids[top.indices].tolist()
        if self._shape == "static":  # by its rates alone
            accept_probs = [[1.0] * len(row) for row in tokens]
        else:
            accept_probs = (top.values - logits.logsumexp(-1, keepdim=True)).exp().tolist()
        rows = [list(zip(*each, strict=True)) for each in zip(tokens, accept_probs, strict=True)]
        return [[] if number in bad else row for number, row in enumerate(rows)]


def _grow(tree: GrowingTree, ranked: Seq[list[tuple[int, float]]]) -> None:
    """Grow a tree to its end. ranked: by depth, the candidates, best first."""
    while tree.expansion.frontier:
        children = ranked[tree.depth]
        tree.expansion.expand([children[: tree.expansion.wanted(node)] for node in tree.expansion.frontier])
        tree.depth += 1
