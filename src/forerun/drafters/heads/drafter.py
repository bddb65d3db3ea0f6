"""The bases of drafters with a head that was trained for its target."""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import Iterator, Sequence as Seq
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from forerun.drafters.base import Binding, NamedModel, recorded_acceptance
from forerun.drafters.draft_model.base import ModelDrafter
from forerun.drafters.heads.config import HeadConfig, StoredHead
from forerun.drafters.heads.drafting import HeadState, _are_choices, _fork, pair_ids as pair_ids
from forerun.drafters.heads.fingerprint import check_target
from forerun.drafters.heads.folder import load_head, shipped_head
from forerun.drafters.heads.layers import FusingHeadModel, HeadModel
from forerun.drafters.registry import shipped_folder
from forerun.errors import ConfigError, DrafterError, IncompatibleDrafterError, UnsupportedModelError
from forerun.models import Forward, LanguageModel, Model, Rows, number_format
from forerun.types import Needs, Sequence, Step

_log = logging.getLogger(__name__)


class HeadDrafter(ModelDrafter):
    """The base of drafters that run a head over the target's hidden states.

    Attributes:
        _head_kind: name of the drafter, and of the folder of its shipped heads.
    """

    _head_kind = "eagle"
    _follows = 64  # twice MAX_HELD_STATES

    def __init__(self, model: str | Path | StoredHead[HeadConfig] | None = None) -> None:
        super().__init__()  # type: ignore[call-arg]  # that of what it is mixed with: chains or trees of a draft model
        self._read_head(model)

    def _read_head(self, model: str | Path | StoredHead[HeadConfig] | None) -> None:
        """Store the given head, whose folder is read in `bind`."""
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
        folder = self._folder or shipped_folder(target_name, self._head_kind)
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
            self._folder = self._folder or shipped_head(target, self._head_kind)
            if self._folder is None:
                raise DrafterError(
                    f"forerun ships no head for {target.name}. Give the folder of one that was trained for it: "
                    f"drafter='{self._head_kind}:model=path/to/head'."
                )
            self._head = load_head(self._folder, target.num_layers if isinstance(target, Model) else None)
            self._acceptance = recorded_acceptance(self._folder)
        name = "a head" if self._folder is None else str(self._folder)
        check_target(self._head.fingerprint, target, name)
        model = self._make_model(self._head, target, name)
        _check_states(self._head, target, name)
        trained, served = self._head.number_format, number_format(target)
        if trained and trained != served:
            message = "%s was trained on states of %s in %s, which is served in %s: a little less may be accepted."
            _log.info(message, name, target.name, trained, served)
        self._use_model(model, binding)

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

    def _capped(self, max_nodes: int, most: int, message: str) -> int:
        """Limit a number of draft tokens, and log once that it was larger.

        message: with %(name)s of the head, %(most)d and %(max_nodes)d.
        """
        if max_nodes > most and not self._has_capped:
            self._has_capped = True
            _log.info(message, {"name": self.model.name, "most": most, "max_nodes": max_nodes})
        return min(max_nodes, most)

    @abstractmethod
    def _make_model(self, head: StoredHead[HeadConfig], target: LanguageModel, name: str) -> HeadModel:
        """Build the model that drafts from a head that was trained for the target.

        Raises:
            IncompatibleDrafterError: the target is of another size.
            UnsupportedModelError: it is a head of another kind.
        """


def _check_states(head: StoredHead[HeadConfig], target: LanguageModel, name: str) -> None:
    """Compute one row to check that the target has the states that the head was trained on."""
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


class FusingHeadDrafter(HeadDrafter):
    """The base of drafters that run a head with a row for each token but the last, which reads the target's fused
    states (`FusingHeadModel.fuse`). The states of each step are kept until the rows that read them are fed."""

    _states: dict[Sequence, HeadState]  # type: ignore[assignment]
    _state_type = HeadState

    def commit(self, steps: Seq[Step]) -> None:
        for step in steps:
            if step.states is not None:
                self._states[step.sequence].add_states(step.num_computed, step.states)
        super().commit(steps)

    def _adopt_prefix(self, state: HeadState) -> None:  # type: ignore[override]
        """Share rows with another choice of the same request, or adopt published pages."""
        sequence = state.sequence
        for other in self._states.values() if sequence.choice and not sequence.num_output else ():
            if _are_choices(other.sequence, sequence) and _fork(state, other):
                return
        super()._adopt_prefix(state)

    def _max_depth(self, sequence: Sequence, max_nodes: int) -> int:
        return super()._max_depth(sequence, max_nodes) if self._states[sequence].is_ready else 0

    def _forward(self, rows: Seq[Rows], states: Seq[HeadState]) -> Forward:  # type: ignore[override]
        target_states = [state.states_for(len(each.token_ids)) for each, state in zip(rows, states, strict=True)]
        fused = self._fused([part for part in target_states if part is not None])
        batch = []
        for each, state, part in zip(rows, states, target_states, strict=True):
            read = state.outputs_for(each) if part is None else next(fused)
            if part is not None:
                state.keep_fused(read)
            batch.append(replace(each, states=read))
        return self.model.forward(batch)

    def _fused(self, states: Seq[Tensor]) -> Iterator[Tensor]:
        """Return the fused states, part by part."""
        if not states:
            return iter(())
        model = self._model
        assert isinstance(model, FusingHeadModel)
        return iter(torch.split(model.fuse(torch.cat(list(states))), [len(part) for part in states]))
