"""A head's state for one sequence: beside its cache, the target's states that its next rows read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from forerun.drafters.model.draft_cache import DraftState
from forerun.models import Rows
from forerun.tree import Tree

HELD = 32
"""States held of a sequence that is not computed with; up to twice as many before others are let go."""


@dataclass(slots=True, eq=False)
class HeadState(DraftState):
    """The row at position p of the cache holds the token at p + shift and the target's state of the token before it.

    Only such rows are ever committed. Those of a draft, whose states are the head's own outputs, are dropped, and what
    was accepted of it is fed again when the target's states of it are told.

    Where the target took over a prompt's keys and values, nobody tells its states. The head takes over its own rows of
    it; what they lack is skipped, and from then on `shift` is above 1.

    Attributes:
        told: [m, layers, H] the target's states of the positions from `told_from` on: those that have not been fed,
            and the last one that has.
        told_from: see `told`.
        read: the position of the last state that a row has read, and that state fused, [S]; None where none has.
        outputs: [1 + scratch rows, S], the states that the last committed row and each row of the scratch give.
    """

    shift: int = 1
    told: Tensor | None = None
    told_from: int = 0
    read: tuple[int, Tensor] | None = None
    outputs: Tensor | None = None

    @property
    def told_to(self) -> int:
        """Positions of the sequence whose states have been told, or need not be."""
        return 0 if self.told is None else self.told_from + len(self.told)

    @property
    def next_token(self) -> int:
        """Index in the sequence of the token that the next committed row holds."""
        return self.cache.length + self.shift

    @property
    def is_level(self) -> bool:
        """Whether the row of the last committed token can be fed: only then can anything be drafted."""
        return self.told_from < len(self.sequence.token_ids) - 1 <= self.told_to

    def tell(self, end: int, states: Tensor) -> None:
        """The target's states of the positions up to `end`. states: [n, layers, H]."""
        start = end - len(states)
        if self.told is None or not self.told_from <= start <= self.told_to:
            self.told, self.told_from = states, start
            return
        keep = max(self.told_from, min(self.next_token - 2, start))
        self.told = torch.cat([self.told[keep - self.told_from : start - self.told_from], states])
        self.told_from = keep

    def settle(self, end: int = -1) -> None:
        """Drop the rows of the draft."""
        if len(self.scratch):
            self.cache.drop()
            self.scratch = Tree()

    def fall_behind(self) -> None:
        """As `DraftState.fall_behind`. Of the states that no row has read, the last ones are held: a draft begins with
        these, behind a gap. Most of what came before stands in the target's states themselves."""
        if self.told is not None and self.told_to - max(self.next_token - 1, self.told_from) > 2 * HELD:
            self.told, self.told_from = self.told[-HELD:].clone(), self.told_to - HELD

    def unfed(self) -> list[int]:
        """As `DraftState.unfed`, of the tokens whose rows have a state to read."""
        if self.told_from > self.next_token - 1:
            self.settle()
            self.shift += self.told_from - (self.next_token - 1)
        tokens = DraftState.unfed(self)
        return tokens[: max(0, self.told_to - (self.next_token - 1))]

    def may_publish(self) -> bool:
        """As `DraftState.may_publish`; nobody could adopt rows behind a gap."""
        return self.shift == 1 and DraftState.may_publish(self)

    def rewind(self, length: int) -> None:
        """As `DraftState.rewind`."""
        DraftState.rewind(self, length)
        self.read = None
        if self.told is not None:
            self.told = self.told[: max(0, length - self.told_from)]

    def told_for(self, count: int) -> Tensor | None:
        """[count, layers, H] the target's states that the next rows read, before they are fused; None of rows of a
        draft, which read `outputs_for`."""
        if self.next_token >= len(self.sequence.token_ids):
            return None
        assert self.told is not None
        first = self.next_token - 1 - self.told_from
        return self.told[first : first + count]

    def keep_read(self, fused: Tensor) -> None:
        """The fused states, [n, S], of the rows that are fed now."""
        self.read = self.next_token - 2 + len(fused), fused[-1]

    def before_last(self, fuse: Callable[[Tensor], Tensor]) -> Tensor:
        """[S] the fused state of the token before the last committed one. fuse: as `FusingHeadModel.fuse`."""
        place = len(self.sequence.token_ids) - 2
        if self.read is None or self.read[0] != place:
            assert self.told is not None
            first = place - self.told_from
            self.read = place, fuse(self.told[first : first + 1])[0]
        return self.read[1]

    def outputs_for(self, rows: Rows) -> Tensor:
        """[n, S] what rows of a draft read: the output of the row that each follows."""
        assert self.outputs is not None
        if rows.parents is None:
            return self.outputs[-1:].expand(len(rows.token_ids), -1)
        return self.outputs[[parent + 1 for parent in rows.parents]]

    def keep_outputs(self, outputs: Tensor) -> None:
        """What the rows just fed give to those that follow them. outputs: [n, S] of the last n of them."""
        if self.next_token < len(self.sequence.token_ids):
            self.outputs = outputs[-1:]
        else:
            assert self.outputs is not None
            self.outputs = torch.cat([self.outputs, outputs])
