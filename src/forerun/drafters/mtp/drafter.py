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
from forerun.drafters.eagle.config import EagleConfig
from forerun.drafters.eagle.drafter import EagleHead, make_eagle
from forerun.drafters.eagle.model import EagleModel
from forerun.drafters.growth.chain import ChainGrowth
from forerun.drafters.heads.config import HeadConfig, StoredHead
from forerun.drafters.heads.folder import shipped_head
from forerun.drafters.heads.source import HeadSource
from forerun.drafters.model_drafter import ModelDrafter
from forerun.drafters.models.base import BoundModel
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


class MtpSource(HeadSource):
    """The given layer, the target's own, or the one that is shipped for the target."""

    def __init__(self, model: str | Path | StoredHead[HeadConfig] | None) -> None:
        super().__init__(model, "mtp", _make)

    def to_load(self, target_name: str) -> tuple[NamedModel, ...]:
        if not self.is_named:
            with suppress(ForerunError):
                find_mtp(target_name)
                return (NamedModel(target_name, is_head=True),)
        return super().to_load(target_name)

    def read(self, binding: Binding) -> BoundModel | None:
        """Read the layer and fit it to the target; None if its form is not supported.

        Raises:
            DrafterError: the target has none.
            ModelLoadError, IncompatibleDrafterError: as `HeadSource.read`.
        """
        if not self.is_named:
            target = binding.target
            try:
                self.head = read_mtp(target, target.name)
            except UnsupportedModelError as error:
                _log.warning("%s Nothing is drafted; the text is the same.", error)
                return None
            except ModelLoadError as error:
                if shipped_head(target, "mtp") is None:
                    raise DrafterError(str(error)) from error
        return super().read(binding)


def _make(head: StoredHead[HeadConfig], target: LanguageModel, name: str) -> EagleModel:
    if not isinstance(head.config, EagleConfig) or not head.config.is_mtp:
        raise IncompatibleDrafterError(f"{name} is no MTP layer but a head of the kind {head.config.kind}.")
    return make_eagle(head, target, name)


class Mtp(ModelDrafter):
    """Drafts chains with the MTP layer of the target's checkpoint, applied again and again.

    Where the checkpoint has such layers in a form that is not supported, a warning is logged once, and nothing is
    drafted.

    Args:
        model: folder of an MTP layer that was trained for the target (forerun train mtp), or one that was read; None
            takes the target's own.
    """

    def __init__(self, model: str | Path | StoredHead[HeadConfig] | None = None) -> None:
        head = EagleHead(MtpSource(model))
        super().__init__("Mtp", head, ChainGrowth(head))

    @property
    def _is_disabled(self) -> bool:
        return not self.drafting_model.is_bound

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
