"""How the rows of an EAGLE head get the states that they read; what drafts with it knows nothing of them."""

from __future__ import annotations

import logging
from collections.abc import Sequence as Seq
from dataclasses import replace
from pathlib import Path

import torch

from forerun.drafters.base import Binding, NamedModel
from forerun.drafters.model.head_state import HeadState
from forerun.drafters.model.model_drafter import ModelDrafter
from forerun.errors import (
    ConfigError,
    DrafterError,
    IncompatibleDrafterError,
    OutOfPagesError,
    UnsupportedModelError,
)
from forerun.heads import StoredHead, load_head
from forerun.heads.fingerprint import check_target
from forerun.heads.shipped import shipped_head
from forerun.models import Forward, LanguageModel, Model, Rows, number_format
from forerun.models.eagle import EagleModel
from forerun.types import Needs, Sequence, Step

_log = logging.getLogger(__name__)


class HeadFeeding(ModelDrafter):
    """The base of drafters that run an EAGLE head (Li et al., 2401.15077; EAGLE-3: 2503.01840).

    Args:
        model: folder of a head, or a head that was read; None takes the one that comes with forerun for the target.
    """

    _states: dict[Sequence, HeadState]  # type: ignore[assignment]

    def _read_head(self, model: str | Path | StoredHead | None) -> None:
        """Keep what was given as the head, whose folder is read in `bind`."""
        self._head: StoredHead | None = model if isinstance(model, StoredHead) else None
        self._folder = Path(model) if isinstance(model, (str, Path)) else None
        self._eagle: EagleModel | None = None

    @property
    def needs(self) -> Needs:
        """The states that the head fuses, of every position; complete after `bind`."""
        return Needs() if self._eagle is None else Needs(layers=self._eagle.config.layers, states=True)

    def models_to_load(self, target_name: str) -> tuple[NamedModel, ...]:
        """None: a head is no language model by itself."""
        return ()

    def bind(self, binding: Binding) -> None:
        """Read the head and fit it to the target.

        Raises:
            DrafterError: no head was given, and none is shipped for the target.
            ModelLoadError: it cannot be read.
            IncompatibleDrafterError: it is the head of another target, or the target has no such states.
        """
        target = binding.target
        if self._head is None:
            self._folder = self._folder or shipped_head(target)
            if self._folder is None:
                raise DrafterError(
                    f"forerun ships no head for {target.name}. Give the folder of one that was trained for it: "
                    "drafter='eagle:model=path/to/head'."
                )
            self._head = load_head(self._folder, target.num_layers if isinstance(target, Model) else None)
        name = "a head" if self._folder is None else str(self._folder)
        check_target(self._head.fingerprint, target, name)
        self._eagle = EagleModel(self._head, target, name)
        _check_states(self._head, target, name)
        _say_formats(self._head, target, name)
        self._serve(self._eagle, binding)

    def commit(self, steps: Seq[Step]) -> None:
        told = [step for step in steps if step.states is not None]
        if told and self._eagle is not None:
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


def _check_states(head: StoredHead, target: LanguageModel, name: str) -> None:
    """Compute one row, and look whether the target has the states that the head was trained on."""
    layers = head.config.layers
    cache = target.new_cache()
    try:
        taps = target.forward([Rows(cache, [0], num_logits=0, num_taps=1)], layers).taps
    except (ConfigError, UnsupportedModelError) as error:
        raise IncompatibleDrafterError(f"The head {name} does not fit {target.name}: {error}") from error
    finally:
        cache.free()
    if taps is None or taps.shape[1:] != (len(layers), head.config.target_hidden_size):
        raise IncompatibleDrafterError(f"{target.name} does not hand out the states that the head {name} reads.")


def _say_formats(head: StoredHead, target: LanguageModel, name: str) -> None:
    """Log where the head saw states of weights that were kept in something else."""
    served = number_format(target)
    if head.number_format and head.number_format != served:
        _log.info(
            "%s was trained on states of %s in %s, which is served in %s: a little less may be accepted.",
            name,
            target.name,
            head.number_format,
            served,
        )
