"""What one step does to one sequence, from its rows in the target's forward to the verdict."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from forerun.engine.state import SequenceState
from forerun.errors import DrafterError
from forerun.models import Rows
from forerun.policy import Outcome
from forerun.sampling import LogitsRow
from forerun.types import Draft, Verdict


@dataclass(slots=True, eq=False)
class Work:
    """One sequence's part of a step.

    Attributes:
        state: whose it is.
        num_owed: committed tokens that the target computes now, beginning at its cache's length.
        draft: what follows them; None while the prompt is not computed to its end.
        draft_ids, parents: the draft's nodes, as lists.
        num_extra: rows of logits wanted before the one that follows the last committed token, for prompt
            log-probabilities.
        logits: [num_extra + 1 + nodes, V] this sequence's rows; only where log-probabilities are asked for.
        verdict: None if the draft is.
        top_tokens: [rows, k] of this sequence's rows, where the drafter asked for them.
        budget: nodes that the draft might have had; None for a prompt chunk.
        outcome, context: what the budget is told of it: the verdict before any cut, the cache's length before the step.
    """

    state: SequenceState
    num_owed: int
    draft: Draft | None
    draft_ids: list[int]
    parents: list[int]
    num_extra: int = 0
    logits: Tensor | None = None
    verdict: Verdict | None = None
    top_tokens: Tensor | None = None
    budget: int | None = None
    outcome: Outcome | None = None
    context: int = 0

    @classmethod
    def prompt_chunk(cls, state: SequenceState, chunk: int, all_rows: bool = False) -> Work:
        """The next tokens of a prompt; with its last one, the first token of the output is drawn.

        all_rows: the drafter wants to know of every row.
        """
        assert state.cache is not None
        missing = len(state.sequence.token_ids) - state.cache.length
        owed = min(missing, chunk)
        last = owed == missing
        extra = owed - last if all_rows or state.prompt_logprobs is not None else 0
        return cls(state, owed, _EMPTY if last else None, [], [], extra)

    @classmethod
    def verification(cls, state: SequenceState, draft: Draft, budget: int, vocab_size: int) -> Work:
        """The last committed token and a draft. Raises DrafterError if the draft breaks its contract."""
        draft_ids: list[int] = draft.token_ids.tolist()
        parents: list[int] = draft.parents.tolist()
        if draft_ids:
            if len(draft_ids) > budget:
                raise DrafterError(f"The drafter gave {len(draft_ids)} tokens, but its budget was {budget}.")
            if min(draft_ids) < 0 or max(draft_ids) >= vocab_size:
                raise DrafterError(
                    f"The drafter gave token ids outside the vocabulary 0..{vocab_size - 1}: {draft_ids}."
                )
            if len(parents) != len(draft_ids) or any(not -1 <= parent < i for i, parent in enumerate(parents)):
                raise DrafterError(f"The drafter gave parents that are no rooted tree in order: {parents}.")
            if draft.num_candidates > len(draft_ids):
                raise DrafterError(f"The drafter gave {draft.num_candidates} candidates among {len(draft_ids)} tokens.")
            if draft.sources and len(draft.sources) != len(draft_ids):
                raise DrafterError(f"The drafter gave {len(draft.sources)} sources for {len(draft_ids)} tokens.")
            if draft.hidden is not None and (len(draft.hidden) != len(draft_ids) + 1 or not draft.is_chain):
                raise DrafterError(
                    f"The drafter gave {len(draft.hidden)} hidden states for {len(draft_ids)} nodes; only chains may "
                    "come with them, one for the last committed token and one for each node."
                )
            deepest, room = max(_depths(parents)) + 1, state.sequence.room
            if deepest > room:
                raise DrafterError(
                    f"The drafter gave a draft {deepest} tokens deep, but the output has room for {room}."
                )
        return cls(state, 1, draft, draft_ids, parents, budget=budget)

    @property
    def num_logits(self) -> int:
        """Rows of logits this sequence takes from the step's."""
        return self.num_extra + (0 if self.draft is None else len(self.draft_ids) + 1)

    def rows(self) -> Rows:
        """This sequence's rows in the target's forward."""
        cache, token_ids = self.state.cache, self.state.sequence.token_ids
        assert cache is not None
        start, owed = cache.length, self.num_owed
        if self.draft is None or not self.draft_ids:
            return Rows(cache, token_ids[start : start + owed], None, self.num_logits)
        parents = None
        if self.parents != list(range(-1, len(self.parents) - 1)):
            parents = [*range(-1, owed - 1), *(owed + parent for parent in self.parents)]
        draft = self.draft
        return Rows(
            cache, [*token_ids[start:], *self.draft_ids], parents, self.num_logits, draft.hidden, draft.first_layer
        )

    def logits_rows(self) -> list[LogitsRow]:
        """Where each row that the verifier sees stands."""
        paths: list[list[int]] = [[]]
        for token_id, parent in zip(self.draft_ids, self.parents, strict=True):
            paths.append([*paths[parent + 1], token_id])
        return [LogitsRow(self.state.sequence, path) for path in paths]

    def depths(self) -> list[int]:
        """Depth of each node that may be accepted; children of the last committed token have 0."""
        assert self.draft is not None
        return _depths(self.parents[: self.draft.num_candidates])


def _depths(parents: list[int]) -> list[int]:
    depths: list[int] = []
    for parent in parents:
        depths.append(depths[parent] + 1 if parent >= 0 else 0)
    return depths


_EMPTY = Draft.empty()
