"""What one step does to one sequence, from its rows in the target's forward to the verdict."""

from __future__ import annotations

from collections.abc import Mapping, Sequence as Seq
from dataclasses import dataclass, field

import torch
from torch import Tensor

from forerun.engine.sequence import SequenceState
from forerun.models import Rows
from forerun.sampling import LogitsRow
from forerun.speculation import DraftOutcome, Reason
from forerun.types import Draft, Needs, Verdict


@dataclass(slots=True, eq=False, repr=False)
class Work:
    """One sequence's part of a step.

    Attributes:
        state: whose it is.
        num_scheduled_tokens: committed tokens that the target computes now, beginning at its cache's length.
        draft: what follows them; None while the prompt is not computed to its end.
        num_extra: rows of logits wanted before the one that follows the last committed token, for prompt
            log-probabilities.
        logits: [num_extra + 1 + nodes, V] this sequence's rows; only where log-probabilities are asked for.
        verdict: None if the draft is.
        top_tokens: [rows, k] of the same rows, where the drafter asked for them.
        hidden_outputs: [rows, layers, H] of this sequence's last rows, likewise: of all of them if it asked for all
        states.
        budget: nodes that the draft might have had; None where the budget was not asked.
        reason: why so many.
        bad_rows: of the rows that the verifier saw, those whose logits are NaN or infinite.
        dead_rows: of the same rows, those whose grammar leaves no token, and why.
        outcome, context: what the budget is told of it: the verdict before any cut, the cache's length before the step.
    """

    state: SequenceState
    num_scheduled_tokens: int
    draft: Draft | None
    num_extra: int = 0
    logits: Tensor | None = None
    verdict: Verdict | None = None
    top_tokens: Tensor | None = None
    hidden_outputs: Tensor | None = None
    budget: int | None = None
    reason: Reason = "fixed"
    outcome: DraftOutcome | None = None
    context: int = 0
    bad_rows: frozenset[int] = frozenset()
    dead_rows: Mapping[int, Exception] = field(default_factory=dict)

    @property
    def num_logits(self) -> int:
        """Rows of logits this sequence takes from the step's."""
        return self.num_extra + (0 if self.draft is None else len(self.draft) + 1)

    def rows(self, needs: Needs) -> Rows:
        """This sequence's rows in the target's forward. needs: of the drafter."""
        cache, token_ids, draft = self.state.cache, self.state.sequence.token_ids, self.draft
        assert cache is not None
        resumes = (
            draft is not None and draft.hidden is not None and draft.first_layer <= min(needs.layers, default=2**31)
        )
        if not resumes:
            cache.drop()  # what a drafter fed there for a draft that was not taken, or whose first layers are wanted
        start, owed = cache.length, self.num_scheduled_tokens
        wanted, tapped = self.num_logits, None
        if needs.states:
            tapped = owed + (0 if draft is None else len(draft))
        if draft is None or not len(draft):
            return Rows(cache, token_ids[start : start + owed], None, wanted, num_hidden_outputs=tapped)
        parents = None
        if not draft.is_chain:
            parents = [*range(-1, owed - 1), *(owed + parent for parent in draft.parents)]
        if isinstance(draft.token_ids, Tensor):
            tokens: Seq[int] | Tensor = torch.cat([draft.token_ids.new_tensor(token_ids[start:]), draft.token_ids])
        else:
            tokens = [*token_ids[start:], *draft.token_ids]
        if not resumes:
            return Rows(cache, tokens, parents, wanted, num_hidden_outputs=tapped)
        return Rows(cache, tokens, None, wanted, draft.hidden, draft.first_layer, tapped)

    def logits_rows(self) -> list[LogitsRow]:
        """Where each row that the verifier sees stands."""
        assert self.draft is not None
        paths: list[list[int]] = [[]]
        for token_id, parent in zip(self.draft.ids, self.draft.parents, strict=True):
            paths.append([*paths[parent + 1], token_id])
        return [LogitsRow(self.state.sequence, path) for path in paths]
