"""What every drafter with a head that was trained for its target does: find the head, and fit it to the target."""

from __future__ import annotations

import logging
from abc import abstractmethod
from pathlib import Path

from torch import Tensor

from forerun.drafters.base import Binding, NamedModel
from forerun.drafters.model.model_drafter import ModelDrafter
from forerun.drafters.table import shipped_folder
from forerun.errors import ConfigError, DrafterError, IncompatibleDrafterError, UnsupportedModelError
from forerun.heads import HeadConfig, StoredHead, load_head
from forerun.heads.fingerprint import check_target
from forerun.heads.shipped import shipped_head
from forerun.models import LanguageModel, Model, Rows, number_format
from forerun.models.heads import HeadModel
from forerun.types import Needs

_log = logging.getLogger(__name__)


class HeadDrafter(ModelDrafter):
    """The base of drafters that run a head over the target's hidden states.

    Attributes:
        _example: the name of such a drafter, and of the folder of heads that come with forerun.
    """

    _example = "eagle"
    _catches_up = False

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
        """The states that the head reads, of every position; complete after `bind`."""
        if self._head is None or self._model is None:
            return Needs()
        return Needs(layers=self._head.config.layers, states=True)

    def models_to_load(self, target_name: str) -> tuple[NamedModel, ...]:
        """The head: the one that was given, or the one that is shipped for a target of this name."""
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
        _say_formats(self._head, target, name)
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
        """A budget of at most so many tokens. That one was larger is logged once.

        message: with %(name)s of the head, %(most)d and %(budget)d.
        """
        if budget > most and not self._has_capped:
            self._has_capped = True
            _log.info(message, {"name": self.model.name, "most": most, "budget": budget})
        return min(budget, most)

    @abstractmethod
    def _of_head(self, head: StoredHead[HeadConfig], target: LanguageModel, name: str) -> HeadModel:
        """The model that drafts, of a head that is the target's.

        Raises:
            IncompatibleDrafterError: the target is of another size.
            UnsupportedModelError: it is a head of another kind.
        """


def _check_states(head: StoredHead[HeadConfig], target: LanguageModel, name: str) -> None:
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


def _say_formats(head: StoredHead[HeadConfig], target: LanguageModel, name: str) -> None:
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
