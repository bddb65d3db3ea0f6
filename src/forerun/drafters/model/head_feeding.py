"""How the rows of an EAGLE head get the states that they read; what drafts with it knows nothing of them."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import replace

import torch

from forerun.drafters.model.head_drafter import HeadDrafter
from forerun.drafters.model.head_state import HeadState
from forerun.errors import OutOfPagesError
from forerun.heads import EagleConfig, HeadConfig, StoredHead
from forerun.models import Forward, LanguageModel, Rows
from forerun.models.eagle import EagleModel
from forerun.types import Sequence, Step


class HeadFeeding(HeadDrafter):
    """The base of drafters that run an EAGLE head (Li et al., 2401.15077; EAGLE-3: 2503.01840)."""

    _states: dict[Sequence, HeadState]  # type: ignore[assignment]

    @property
    def _eagle(self) -> EagleModel:
        assert isinstance(self._model, EagleModel)
        return self._model

    def _of_head(self, head: StoredHead[HeadConfig], target: LanguageModel, name: str) -> EagleModel:
        return EagleModel(head.of(EagleConfig, name, "eagle"), target, name)

    def commit(self, steps: Seq[Step]) -> None:
        told = [step for step in steps if step.states is not None]
        if told:
            states = [step.states for step in told if step.states is not None]
            fused = self._eagle.fuse(torch.cat(states))
            for step, part in zip(told, torch.split(fused, [len(each) for each in states]), strict=True):
                self._states[step.sequence].tell(step.num_computed, part)
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

    def _fed(self, sequence: Sequence) -> list[int]:
        """One number a row; the first row depends on the first token too."""
        tokens = self._within_vocabulary(sequence.token_ids)
        return [tokens[0] * self._vocab_size + tokens[1], *tokens[2:]] if len(tokens) > 1 else []

    def _room(self, sequence: Sequence, budget: int) -> int:
        return super()._room(sequence, budget) if self._states[sequence].is_level else 0

    def _feed(self, rows: Seq[Rows], states: Seq[HeadState], final: bool = False) -> Forward:  # type: ignore[override]
        """As `ModelDrafter._feed`; rows of committed tokens, which read the target's states, are final at once."""
        return super()._feed(rows, states, final or states[0].next_token < len(states[0].sequence.token_ids))

    def _forward(self, rows: Seq[Rows], states: Seq[HeadState]) -> Forward:  # type: ignore[override]
        batch = [replace(each, states=state.with_states(each)) for each, state in zip(rows, states, strict=True)]
        result = self.model.forward(batch)
        assert result.taps is not None
        parts = torch.split(result.taps[:, 0], [each.num_tapped for each in rows])
        for state, part in zip(states, parts, strict=True):
            state.keep_outputs(part)
        return result


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
