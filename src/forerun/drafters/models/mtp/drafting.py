"""An MTP layer as a model that drafts."""

from __future__ import annotations

import logging
from contextlib import suppress
from pathlib import Path

from forerun.drafters.base import Binding, NamedModel
from forerun.drafters.models.base import BoundModel
from forerun.drafters.models.eagle.config import EagleConfig
from forerun.drafters.models.eagle.drafting import make_eagle
from forerun.drafters.models.eagle.model import EagleModel
from forerun.drafters.models.head_files.folder import shipped_head
from forerun.drafters.models.head_files.source import HeadSource
from forerun.drafters.models.heads.config import HeadConfig, StoredHead
from forerun.drafters.models.mtp.checkpoint_format import find_mtp, read_mtp
from forerun.errors import (
    DrafterError,
    ForerunError,
    IncompatibleDrafterError,
    ModelLoadError,
    UnsupportedModelError,
)
from forerun.models import LanguageModel

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
