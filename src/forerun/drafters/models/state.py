"""A draft model's state of one sequence: its cache, and which rows of it stay after a rejection."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import ClassVar

from forerun.drafters.growth.ranked_tree import RankedTree
from forerun.kernels.cpu.page_layout import PAGE
from forerun.models import Rows
from forerun.sampling import LogitsRow
from forerun.speculation import Rates
from forerun.types import Cache, Sequence
from forerun.utils.tree import Tree


@dataclass(slots=True, eq=False)
class DraftState:
    """The draft model's state for one sequence.

    Attributes:
        sequence: whose state it is.
        cache: of the draft model.
        view: the sequence as the sampling pipeline sees it: a greedy one at temperature 1, so that its tokens have
            probabilities.
        scratch: tokens of the rows fed since the cache's last commit.
        drafted: the last draft, and the rates that its trials are counted in; None if they are not counted.
        drafted_at: length of the sequence when it was made.
        num_published: positions of the cache that have been offered for adoption.
        shift: the token at position p of the cache is the sequence's at p + shift. `FIRST_SHIFT`, or more where tokens
            were skipped.
        num_seen: tokens of the sequence that `unseen_tokens` has returned.
    """

    FIRST_SHIFT: ClassVar[int] = 0

    sequence: Sequence
    cache: Cache
    view: Sequence
    scratch: Tree = field(default_factory=Tree)
    drafted: tuple[RankedTree, Rates] | None = None
    drafted_at: int = 0
    num_published: int = 0
    shift: int = 0
    num_seen: int = 0

    def add(self, rows: Rows) -> None:
        """Record rows that the model has been fed and that may be rejected."""
        first = len(self.scratch)
        parents = range(first - 1, first + len(rows.token_ids) - 1) if rows.parents is None else rows.parents
        for token_id, parent in zip(rows.token_ids, parents, strict=True):
            self.scratch.add(token_id, parent)

    def settle(self, end: int = -1) -> None:
        """Commit the rows whose tokens have been committed since, up to `end`, and drop the others."""
        if len(self.scratch):
            first = self.cache.length + self.shift
            self.cache.commit(self.scratch.follow(self.sequence.token_ids[first:end]))
            self.scratch = Tree()

    def skip_to(self, position: int) -> None:
        """Begin anew with the token at this position, as if the sequence began there."""
        self.settle()
        self.cache.truncate(0)
        self.shift = position
        self.num_published = 0

    def skip_prefill(self) -> None:
        """Prepare for tokens that are not computed until a draft is requested; nothing is needed but the tokens."""

    def unfed(self) -> list[int]:
        """Return the committed tokens that the model must be fed before it drafts, at least the last one.

        After a draft that was accepted to its end they are two, since its last token was not fed.
        """
        tokens = self.sequence.token_ids
        self.settle()
        if self.cache.length + self.shift >= len(tokens):
            self.cache.truncate(len(tokens) - self.shift - 1)
        return tokens[self.cache.length + self.shift :]

    def logits_row(self, path: Seq[int]) -> LogitsRow:
        """Return the position of a row for the pipeline, after these drafted tokens."""
        self.view.token_ids = self.sequence.token_ids
        return LogitsRow(self.view, path)

    def unseen_tokens(self) -> list[int]:
        """Return the tokens committed since the last call; in the first also those that the request's options name."""
        params = self.sequence.params
        seen = self.num_seen
        named = [*params.logit_bias, *params.stop_token_ids, *(params.allowed_token_ids or ())] if not seen else []
        self.num_seen = len(self.sequence.token_ids)
        return [*self.sequence.token_ids[seen:], *named]

    def may_publish(self) -> bool:
        """Return whether the cache holds another whole final page. The last committed token may be fed again; rows
        behind a gap cannot be adopted."""
        if self.shift != self.FIRST_SHIFT:
            return False
        most = len(self.sequence.token_ids) - self.shift - 1
        return min(self.cache.length, most) - self.num_published >= PAGE

    def publish(self, token_ids: list[int], owner: str | None) -> None:
        """Publish for adoption by others of the same owner what has been computed of committed tokens. token_ids: what
        the model was fed for them."""
        self.num_published = min(self.cache.length, len(token_ids) - 1) // PAGE * PAGE
        self.cache.publish(token_ids[: self.num_published], owner)

    def drop(self, keep: int = 0) -> None:
        """Drop the rows fed since the last commit, but for the first `keep` of them."""
        self.cache.drop(keep)
        self.scratch = self.scratch.part(range(keep))

    def rewind(self, length: int) -> None:
        """Forget what was computed of the tokens from `length` on, which have been replaced."""
        self.drafted = None
        self.num_seen = min(self.num_seen, length)
        self.settle(length)
        if length <= self.shift:  # nothing is left
            self.shift = self.FIRST_SHIFT
            self.cache.truncate(0)
        end = max(0, length - self.shift)
        self.cache.truncate(min(end, self.cache.length))
        self.num_published = min(self.num_published, end // PAGE * PAGE)

    def remember(self, drafted: tuple[RankedTree, Rates] | None) -> None:
        """Store the draft whose trials `count_trials` counts; None: none are counted."""
        self.drafted, self.drafted_at = drafted, len(self.sequence.token_ids)

    def count_trials(self) -> None:
        """Count what became of the last draft, by the tokens that were committed.

        Not by the step's verdict: what was verified may be another draft, of which this one was a part.
        """
        if self.drafted is not None:
            tree, rates = self.drafted
            self.drafted = None
            tree.observe_tokens(rates, self.sequence.token_ids[self.drafted_at :])
