"""How heads get the target's states: told after each step, kept until the rows that read them are fed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence as Seq
from dataclasses import replace

import torch
from torch import Tensor

from forerun.drafters.model.head_drafter import HeadDrafter
from forerun.drafters.model.head_state import HeadState
from forerun.errors import OutOfPagesError
from forerun.models import Forward, Rows
from forerun.models.heads import FusingHeadModel
from forerun.types import Sequence, Step


class HeadFeeding(HeadDrafter):
    """The base of drafters that run a head with a row for each token but the last, which reads what
    `FusingHeadModel.fuse` makes of the target's states."""

    _states: dict[Sequence, HeadState]  # type: ignore[assignment]

    def commit(self, steps: Seq[Step]) -> None:
        for step in steps:
            if step.states is not None:
                self._states[step.sequence].tell(step.num_computed, step.states)
        super().commit(steps)

    def _new_state(self, sequence: Sequence, view: Sequence) -> HeadState:
        return HeadState(sequence, self._cache_for(sequence), view)

    def _take_over(self, state: HeadState) -> None:  # type: ignore[override]
        """From another choice of the same request, else what is published."""
        sequence = state.sequence
        for other in self._states.values() if sequence.choice and not sequence.num_output else ():
            if _are_choices(other.sequence, sequence) and _fork(state, other):
                return
        super()._take_over(state)

    def _room(self, sequence: Sequence, budget: int) -> int:
        return super()._room(sequence, budget) if self._states[sequence].is_level else 0

    def _forward(self, rows: Seq[Rows], states: Seq[HeadState]) -> Forward:  # type: ignore[override]
        told = [state.told_for(len(each.token_ids)) for each, state in zip(rows, states, strict=True)]
        fused = self._fused([part for part in told if part is not None])
        batch = []
        for each, state, part in zip(rows, states, told, strict=True):
            read = state.outputs_for(each) if part is None else next(fused)
            if part is not None:
                state.keep_read(read)
            batch.append(replace(each, states=read))
        return self.model.forward(batch)

    def _fused(self, states: Seq[Tensor]) -> Iterator[Tensor]:
        """What rows read of the target's states, part by part."""
        if not states:
            return iter(())
        model = self._model
        assert isinstance(model, FusingHeadModel)
        return iter(torch.split(model.fuse(torch.cat(list(states))), [len(part) for part in states]))


def fed_of_pairs(tokens: Seq[int], vocab_size: int) -> list[int]:
    """What decides the rows of a head whose rows hold a token and the state before it, one number a row: their tokens,
    and for the first row the first token too."""
    return [tokens[0] * vocab_size + tokens[1], *tokens[2:]] if len(tokens) > 1 else []


def _are_choices(one: Sequence, other: Sequence) -> bool:
    """Whether two sequences are of one request, as far as their tokens tell."""
    count = other.num_prompt
    return (
        one is not other
        and one.params.tenant == other.params.tenant
        and one.num_prompt == count
        and one.token_ids[:count] == other.token_ids[:count]
    )


def _fork(state: HeadState, other: HeadState) -> bool:
    """Hold another state's rows of the prompt; whether there was room for them."""
    if other.shift != state.shift:
        return False
    try:
        state.cache.fork(other.cache, min(other.cache.length, state.sequence.num_prompt - 1))
    except OutOfPagesError:
        return False
    state.told, state.told_from = other.told, other.told_from
    return True
