"""A target's own multi-token-prediction layer drafts a chain (DeepSeek-V3, 2412.19437).

It is an EAGLE head that was trained with its target and lies in its checkpoint: row by row it reads the target's state
of a token beside the token that follows, and below the first drafted token its own output.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence as Seq
from contextlib import suppress
from pathlib import Path

from forerun.drafters.base import Binding, NamedModel
from forerun.drafters.draft_model.chain import ChainDrafter
from forerun.drafters.eagle.config import EagleConfig
from forerun.drafters.eagle.drafter import EagleDrafter
from forerun.drafters.eagle.model import EagleModel
from forerun.drafters.heads.config import HeadConfig, StoredHead
from forerun.drafters.heads.folder import shipped_head
from forerun.drafters.mtp.checkpoint_format import find_mtp, read_mtp
from forerun.errors import (
    DrafterError,
    ForerunError,
    IncompatibleDrafterError,
    ModelLoadError,
    UnsupportedModelError,
)
from forerun.models import LanguageModel
from forerun.types import Draft, Sequence, Step

_log = logging.getLogger(__name__)


class Mtp(EagleDrafter, ChainDrafter):
    """Drafts chains with the MTP layer of the target's checkpoint, applied again and again.

    Where the checkpoint has such layers in a form that is not supported, a warning is logged once, and nothing is
    drafted.

    Args:
        model: folder of an MTP layer that was trained for the target (forerun train mtp), or one that was read; None
            takes the target's own.
    """

    _head_kind = "mtp"

    def __init__(self, model: str | Path | StoredHead[HeadConfig] | None = None) -> None:
        super().__init__(model)
        self._is_disabled = False

    def models_to_load(self, target_name: str) -> tuple[NamedModel, ...]:
        """Return the layer: the given one, the target's own, or the one that is shipped for a target of this name."""
        if self._head is None and self._folder is None:
            with suppress(ForerunError):
                find_mtp(target_name)
                return (NamedModel(target_name, is_head=True),)
        return super().models_to_load(target_name)

    def bind(self, binding: Binding) -> None:
        """Read the layer and fit it to the target.

        Raises:
            DrafterError: the target has none.
            ModelLoadError, IncompatibleDrafterError: as `HeadDrafter.bind`.
        """
        if self._head is None and self._folder is None:
            target = binding.target
            try:
                self._head = read_mtp(target, target.name)
            except UnsupportedModelError as error:
                _log.warning("%s Nothing is drafted; the text is the same.", error)
                self._is_disabled = True
                return
            except ModelLoadError as error:
                if shipped_head(target, self._head_kind) is None:
                    raise DrafterError(str(error)) from error
        super().bind(binding)

    def _make_model(self, head: StoredHead[HeadConfig], target: LanguageModel, name: str) -> EagleModel:
        if not isinstance(head.config, EagleConfig) or not head.config.is_mtp:
            raise IncompatibleDrafterError(f"{name} is no MTP layer but a head of the kind {head.config.kind}.")
        return super()._make_model(head, target, name)

    def start(self, sequence: Sequence) -> None:
        if not self._is_disabled:
            super().start(sequence)

    def draft(
        self, sequences: Seq[Sequence], num_draft_tokens: Seq[int], min_acceptance_prob: float = 0.0
    ) -> list[Draft]:
        if self._is_disabled:
            return [Draft.empty() for _ in sequences]
        return super().draft(sequences, num_draft_tokens, min_acceptance_prob)

    def commit(self, steps: Seq[Step]) -> None:
        if not self._is_disabled:
            super().commit(steps)

    def rewind(self, sequence: Sequence, length: int) -> None:
        if not self._is_disabled:
            super().rewind(sequence, length)
