"""What every drafter with a head that was trained for its target does: find the head, and fit it to the target."""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence as Seq
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from forerun.drafters.base import Binding, NamedModel
from forerun.drafters.draft_model.base import ModelDrafter
from forerun.drafters.draft_model.cache import DraftState
from forerun.drafters.heads.config import HeadConfig, StoredHead
from forerun.drafters.heads.fingerprint import check_target
from forerun.drafters.heads.folder import load_head, shipped_head
from forerun.drafters.heads.layers import FusingHeadModel, HeadModel
from forerun.drafters.registry import shipped_folder
from forerun.errors import ConfigError, DrafterError, IncompatibleDrafterError, OutOfPagesError, UnsupportedModelError
from forerun.models import Forward, LanguageModel, Model, Rows, number_format
from forerun.types import Needs, Sequence, Step

_log = logging.getLogger(__name__)


class HeadDrafter(ModelDrafter):
    """The base of drafters that run a head over the target's hidden states.

    Attributes:
        _example: the name of such a drafter, and of the folder of heads that come with forerun.
    """

    _example = "eagle"
    _prefills = False

    def __init__(self, model: str | Path | StoredHead[HeadConfig] | None = None) -> None:
        super().__init__()  # type: ignore[call-arg]  # that of what it is mixed with: chains or trees of a draft model
        self._read_head(model)

    def _read_head(self, model: str | Path | StoredHead[HeadConfig] | None) -> None:
        """Keep what was given as the head, whose folder is read in `bind`."""
        self._head: StoredHead[HeadConfig] | None = model if isinstance(model, StoredHead) else None
        self._folder = Path(model) if isinstance(model, (str, Path)) else None
        self._has_capped = False

    @property
    def needs(self) -> Needs:
        """Return the states that the head reads, of every position; complete after `bind`."""
        if self._head is None or self._model is None:
            return Needs()
        return Needs(layers=self._head.config.layers, states=True)

    def models_to_load(self, target_name: str) -> tuple[NamedModel, ...]:
        """Return the head: the given one, or the one that is shipped for a target of this name."""
        folder = self._folder or shipped_folder(target_name, self._example)
        return () if folder is None or self._head is not None else (NamedModel(folder, is_head=True),)

    def bind(self, binding: Binding) -> None:
        """Read the head and fit it to the target.

        Raises:
            DrafterError: no head was given, and none is shipped for the target.
            ModelLoadError: it cannot be read.
            IncompatibleDrafterError: it is the head of another target, or the target has no such states.
        """
        target = binding.target
        if self._head is None:
            self._folder = self._folder or shipped_head(target, self._example)
            if self._folder is None:
                raise DrafterError(
                    f"forerun ships no head for {target.name}. Give the folder of one that was trained for it: "
                    f"drafter='{self._example}:model=path/to/head'."
                )
            self._head = load_head(self._folder, target.num_layers if isinstance(target, Model) else None)
        name = "a head" if self._folder is None else str(self._folder)
        check_target(self._head.fingerprint, target, name)
        model = self._of_head(self._head, target, name)
        _check_states(self._head, target, name)
        trained, served = self._head.number_format, number_format(target)
        if trained and trained != served:
            message = "%s was trained on states of %s in %s, which is served in %s: a little less may be accepted."
            _log.info(message, name, target.name, trained, served)
        self._serve(model, binding)

    @property
    def _head_model(self) -> HeadModel:
        assert isinstance(self._model, HeadModel)
        return self._model

    def _widened(self, logits: Tensor) -> Tensor:
        return self._head_model.widened(logits)

    def _named(self, columns: Tensor) -> Tensor:
        return self._head_model.token_ids[columns]

    @property
    def _num_columns(self) -> int:
        return len(self._head_model.token_ids)

    def _names(self, columns: list[int]) -> list[int]:
        return self._head_model.names(columns)

    def _capped(self, budget: int, most: int, message: str) -> int:
        """Limit a number of draft tokens, and log once that it was larger.

        message: with %(name)s of the head, %(most)d and %(budget)d.
        """
        if budget > most and not self._has_capped:
            self._has_capped = True
            _log.info(message, {"name": self.model.name, "most": most, "budget": budget})
        return min(budget, most)

    @abstractmethod
    def _of_head(self, head: StoredHead[HeadConfig], target: LanguageModel, name: str) -> HeadModel:
        """Build the model that drafts from a head that was trained for the target.

        Raises:
            IncompatibleDrafterError: the target is of another size.
            UnsupportedModelError: it is a head of another kind.
        """


def _check_states(head: StoredHead[HeadConfig], target: LanguageModel, name: str) -> None:
    """Compute one row, and look whether the target has the states that the head was trained on."""
    layers = head.config.layers
    cache = target.new_cache()
    try:
        hidden_outputs = target.forward([Rows(cache, [0], num_logits=0, num_hidden_outputs=1)], layers).hidden_outputs
    except (ConfigError, UnsupportedModelError) as error:
        raise IncompatibleDrafterError(f"The head {name} does not fit {target.name}: {error}") from error
    finally:
        cache.free()
    if hidden_outputs is None or hidden_outputs.shape[1:] != (len(layers), head.config.target_hidden_size):
        raise IncompatibleDrafterError(f"{target.name} does not hand out the states that the head {name} reads.")


# A head's state for one sequence: beside its cache, the target's states that its next rows read.

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
        """Return the position up to which the target's states have been received."""
        return 0 if self.told is None else self.told_from + len(self.told)

    @property
    def next_token(self) -> int:
        """Index in the sequence of the token that the next committed row holds."""
        return self.cache.length + self.shift

    @property
    def is_level(self) -> bool:
        """Return whether the row of the last committed token can be fed: otherwise nothing can be drafted."""
        return self.told_from < len(self.sequence.token_ids) - 1 <= self.told_to

    def tell(self, end: int, states: Tensor) -> None:
        """Store the target's states of the positions up to `end`. states: [n, layers, H]."""
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
            self.drop()

    def skip_prefill(self) -> None:
        """Drop unread states except the last ones, with which a draft begins, behind a gap. Most of what came before is
        contained in the target's states themselves."""
        if self.told is not None and self.told_to - max(self.next_token - 1, self.told_from) > 2 * HELD:
            self.told, self.told_from = self.told[-HELD:].clone(), self.told_to - HELD

    def unfed(self) -> list[int]:
        """Return the committed tokens to be fed whose rows have a state to read."""
        if self.told_from > self.next_token - 1:
            self.settle()
            self.shift += self.told_from - (self.next_token - 1)
        tokens = DraftState.unfed(self)
        return tokens[: max(0, self.told_to - (self.next_token - 1))]

    def may_publish(self) -> bool:
        """Return whether another page can be published; rows behind a gap cannot be adopted."""
        return self.shift == 1 and DraftState.may_publish(self)

    def rewind(self, length: int) -> None:
        DraftState.rewind(self, length)
        self.read = None
        if self.told is not None:
            self.told = self.told[: max(0, length - self.told_from)]

    def told_for(self, count: int) -> Tensor | None:
        """Return [count, layers, H] the target's states that the next rows read, before they are fused; None for rows
        of a draft, which read `outputs_for`."""
        if self.next_token >= len(self.sequence.token_ids):
            return None
        assert self.told is not None
        first = self.next_token - 1 - self.told_from
        return self.told[first : first + count]

    def keep_read(self, fused: Tensor) -> None:
        """Store the fused states, [n, S], of the rows that are fed now."""
        self.read = self.next_token - 2 + len(fused), fused[-1]

    def before_last(self, fuse: Callable[[Tensor], Tensor]) -> Tensor:
        """Return [S] the fused state of the token before the last committed one. fuse: `FusingHeadModel.fuse`."""
        place = len(self.sequence.token_ids) - 2
        if self.read is None or self.read[0] != place:
            assert self.told is not None
            first = place - self.told_from
            self.read = place, fuse(self.told[first : first + 1])[0]
        return self.read[1]

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


# How heads get the target's states: told after each step, kept until the rows that read them are fed.


class HeadFeeding(HeadDrafter):
    """The base of drafters that run a head with a row for each token but the last, which reads what
    `FusingHeadModel.fuse` makes of the target's states."""

    _states: dict[Sequence, HeadState]  # type: ignore[assignment]
    _state_type = HeadState

    def commit(self, steps: Seq[Step]) -> None:
        for step in steps:
            if step.states is not None:
                self._states[step.sequence].tell(step.num_computed, step.states)
        super().commit(steps)

    def _take_over(self, state: HeadState) -> None:  # type: ignore[override]
        """Share rows with another choice of the same request, or adopt published pages."""
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
        """Return the fused states, part by part."""
        if not states:
            return iter(())
        model = self._model
        assert isinstance(model, FusingHeadModel)
        return iter(torch.split(model.fuse(torch.cat(list(states))), [len(part) for part in states]))


def fed_of_pairs(tokens: Seq[int], vocab_size: int) -> list[int]:
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
    """Hold another state's rows of the prompt; whether there was room for them."""
    if other.shift != state.shift:
        return False
    try:
        state.cache.fork(other.cache, min(other.cache.length, state.sequence.num_prompt - 1))
    except OutOfPagesError:
        return False
    state.told, state.told_from = other.told, other.told_from
    return True
