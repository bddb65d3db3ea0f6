"""Heads that draft with a row for each token but the last, which reads the target's fused states."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence as Seq
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from forerun.drafters.models.base import DraftingModel, DraftModelSource
from forerun.drafters.models.heads.layers import HeadModel
from forerun.drafters.models.state import DraftState
from forerun.errors import OutOfPagesError
from forerun.models import Forward, Rows
from forerun.types import Sequence, Step

_log = logging.getLogger(__name__)

HEAD_FOLLOWS = 64  # twice MAX_HELD_STATES
"""`Traits.follows` of heads: a head prefills only as far as it holds the target's states."""
MAX_HELD_STATES = 32
"""States held of a sequence that is not prefilled; up to twice as many before older ones are freed."""
MAX_PROMPT_STATES = 256
"""The same until it could first draft."""


@dataclass(slots=True, eq=False)
class HeadState(DraftState):
    """A head's state for one sequence: beside its cache, the target's states that its next rows read.

    The row at position p of the cache holds the token at p + shift and the target's state of the token before it. Only
    such rows are committed. Rows of a draft, which read the head's own outputs, are dropped, and accepted tokens are
    fed again when the target's states of them are known.

    Where the target reuses a cached prefix, its states are not computed. The head then adopts its own rows of that
    prefix; missing rows are skipped, and from then on `shift` is above 1.

    Attributes:
        pieces: [each, layers, H] the target's states of the positions from `states_start` on, step by step: those that
            have not been fed, and the last one that has.
        states_start: position of the first of these states.
        num_states: states in all pieces.
        last_fused: the position of the last state that a row has read, and that state fused, [S]; None where none has.
        outputs: [1 + scratch rows, S], the states that the last committed row and each row of the scratch give.
    """

    FIRST_SHIFT = 1

    shift: int = 1
    pieces: list[Tensor] = field(default_factory=list)
    states_start: int = 0
    num_states: int = 0
    last_fused: tuple[int, Tensor] | None = None
    outputs: Tensor | None = None

    @property
    def target_states(self) -> Tensor | None:
        """Return the pieces as one, [m, layers, H]; None where none has come."""
        if len(self.pieces) > 1:
            self.pieces = [torch.cat(self.pieces)]
        return self.pieces[0] if self.pieces else None

    @property
    def states_end(self) -> int:
        """Return the position up to which the target's states have been received."""
        return self.states_start + self.num_states

    @property
    def next_token(self) -> int:
        """Index in the sequence of the token that the next committed row holds."""
        return self.cache.length + self.shift

    @property
    def is_ready(self) -> bool:
        """Return whether the row of the last committed token can be fed: otherwise nothing can be drafted."""
        return self.states_start < len(self.sequence.token_ids) - 1 <= self.states_end

    def add_states(self, end: int, states: Tensor) -> None:
        """Store the target's states of the positions up to `end`. states: [n, layers, H]."""
        count = len(states)
        start = end - count
        if start != self.states_end:
            if self.states_start <= start < self.states_end:
                self._forget_from(start)
            else:
                self.pieces = []
                self.states_start = start
                self.num_states = 0
        self.pieces.append(states)
        self.num_states += count
        read = self.next_token - 2
        if read > self.states_start:
            self._forget_before(min(read, start))

    def _forget_from(self, position: int) -> None:
        """Drop the states from a position on."""
        states = self.target_states
        self.num_states = max(0, position - self.states_start)
        self.pieces = [] if states is None else [states[: self.num_states]]

    def _forget_before(self, position: int) -> None:
        """Drop the states before a position. What stays of a large piece is copied, so that the piece is freed."""
        while self.states_start < position:
            first = self.pieces[0]
            count = len(first)
            drop = position - self.states_start
            if drop < count:
                self.pieces[0] = first[drop:].clone() if count > MAX_HELD_STATES else first[drop:]
            else:
                drop = len(self.pieces.pop(0))
            self.states_start += drop
            self.num_states -= drop

    def settle(self, end: int = -1) -> None:
        """Drop the rows of the draft."""
        if len(self.scratch):
            self.drop()

    def skip_prefill(self) -> None:
        """Drop unread states except the last ones, with which a draft begins, behind a gap. Most of what came before is
        contained in the target's states themselves."""
        if self.num_states <= 2 * MAX_HELD_STATES:
            return
        most = MAX_HELD_STATES if self.sequence.num_output > 1 else MAX_PROMPT_STATES
        if self.states_end - max(self.next_token - 1, self.states_start) > 2 * most:
            self._forget_before(self.states_end - most)

    def unfed(self) -> list[int]:
        """Return the committed tokens to be fed whose rows have a state to read."""
        if self.states_start > self.next_token - 1:
            self.settle()
            self.shift += self.states_start - (self.next_token - 1)
        tokens = DraftState.unfed(self)
        return tokens[: max(0, self.states_end - (self.next_token - 1))]

    def rewind(self, length: int) -> None:
        DraftState.rewind(self, length)
        self.last_fused = None
        self._forget_from(min(length, self.states_end))

    def states_for(self, count: int) -> Tensor | None:
        """Return [count, layers, H] the target's states that the next rows read, before they are fused; None for rows
        of a draft, which read `outputs_for`."""
        if self.next_token >= len(self.sequence.token_ids):
            return None
        states = self.target_states
        first = self.next_token - 1 - self.states_start
        assert states is not None
        return states[first : first + count]

    def keep_fused(self, fused: Tensor) -> None:
        """Store the fused states, [n, S], of the rows that are fed now."""
        self.last_fused = self.next_token - 2 + len(fused), fused[-1]

    def before_last(self, fuse: Callable[[Tensor], Tensor]) -> Tensor:
        """Return [S] the fused state of the token before the last committed one. fuse: `HeadModel.fuse`."""
        position = len(self.sequence.token_ids) - 2
        if self.last_fused is None or self.last_fused[0] != position:
            states = self.target_states
            first = position - self.states_start
            assert states is not None
            self.last_fused = position, fuse(states[first : first + 1])[0]
        return self.last_fused[1]

    def outputs_for(self, rows: Rows) -> Tensor:
        """Return [n, S] what rows of a draft read: the output of the row that each follows."""
        assert self.outputs is not None
        if rows.parents is None:
            return self.outputs[-1:].expand(len(rows.token_ids), -1)
        return self.outputs[[parent + 1 for parent in rows.parents]]

    def keep_outputs(self, outputs: Tensor) -> None:
        """Store the outputs that following rows read. outputs: [n, S] of the last n rows."""
        if self.next_token < len(self.sequence.token_ids):
            self.outputs = outputs[-1:]
        else:
            assert self.outputs is not None
            self.outputs = torch.cat([self.outputs, outputs])


class FusingHead(DraftingModel[HeadState]):
    """A head with a row for each token but the last, which reads the target's fused states (`HeadModel.fuse`).
    The states of each step are kept until the rows that read them are fed."""

    reads_states = True
    follows = HEAD_FOLLOWS

    def __init__(self, source: DraftModelSource, draft_vocab: int | None = 0) -> None:
        super().__init__(source, HeadState, draft_vocab)

    def commit(self, steps: Seq[Step]) -> None:
        for step in steps:
            if step.states is not None:
                self.states[step.sequence].add_states(step.num_computed, step.states)
        super().commit(steps)

    def adopt_prefix(self, state: HeadState) -> None:
        """Share rows with another choice of the same request, or adopt published pages."""
        sequence = state.sequence
        for other in self.states.values() if sequence.choice and not sequence.num_output else ():
            if _are_choices(other.sequence, sequence) and _fork(state, other):
                return
        super().adopt_prefix(state)

    def max_depth(self, sequence: Sequence, max_nodes: int) -> int:
        return super().max_depth(sequence, max_nodes) if self.states[sequence].is_ready else 0

    def forward(self, rows: Seq[Rows], states: Seq[HeadState]) -> Forward:
        target_states = [state.states_for(len(each.token_ids)) for each, state in zip(rows, states, strict=True)]
        fused = self.fused([part for part in target_states if part is not None])
        batch = []
        for each, state, part in zip(rows, states, target_states, strict=True):
            read = state.outputs_for(each) if part is None else next(fused)
            if part is not None:
                state.keep_fused(read)
            batch.append(replace(each, states=read))
        return self.model.forward(batch)

    def fused(self, states: Seq[Tensor]) -> Iterator[Tensor]:
        """Return the fused states, part by part."""
        if not states:
            return iter(())
        model = self.model
        assert isinstance(model, HeadModel)
        return iter(torch.split(model.fuse(torch.cat(list(states))), [len(part) for part in states]))


class ChainLimit:
    """Limits the tokens of a chain to those that a head can draft, and logs once that more were requested.

    Args:
        message: with %(name)s of the head, %(most)d and %(max_nodes)d.
    """

    def __init__(self, message: str) -> None:
        self._message = message
        self._has_limited = False

    def of(self, max_nodes: int, most: int, name: str) -> int:
        """Return the limited number of tokens. name: of the head."""
        if max_nodes > most and not self._has_limited:
            self._has_limited = True
            _log.info(self._message, {"name": name, "most": most, "max_nodes": max_nodes})
        return min(max_nodes, most)


def pair_ids(tokens: Seq[int], vocab_size: int) -> list[int]:
    """Return what identifies the rows of a head that reads a token and the state before it, one number a row: the
    tokens, the first row's combined with the first token."""
    return [tokens[0] * vocab_size + tokens[1], *tokens[2:]] if len(tokens) > 1 else []


def _are_choices(one: Sequence, other: Sequence) -> bool:
    """Return whether two sequences have the tenant and prompt of one request."""
    count = other.num_prompt
    return (
        one is not other
        and one.params.tenant == other.params.tenant
        and one.num_prompt == count
        and one.token_ids[:count] == other.token_ids[:count]
    )


def _fork(state: HeadState, other: HeadState) -> bool:
    """Share another state's rows of the prompt, and return whether there were pages for them."""
    if other.shift != state.shift:
        return False
    try:
        state.cache.fork(other.cache, min(other.cache.length, state.sequence.num_prompt - 1))
    except OutOfPagesError:
        return False
    state.pieces = [*other.pieces]
    state.states_start = other.states_start
    state.num_states = other.num_states
    return True
