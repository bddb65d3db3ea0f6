"""Where heads that draft come from: the given one, or the one that is shipped for the target."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

from forerun.drafters.base import UNKNOWN_ACCEPTANCE, Binding, NamedModel, recorded_acceptance
from forerun.drafters.models.base import BoundModel
from forerun.drafters.models.head_files.folder import load_head, shipped_head
from forerun.drafters.models.heads.config import HeadConfig, StoredHead
from forerun.drafters.models.heads.fingerprint import check_target
from forerun.drafters.models.heads.layers import HeadModel
from forerun.drafters.registry import shipped_folder
from forerun.errors import ConfigError, DrafterError, IncompatibleDrafterError, UnsupportedModelError
from forerun.models import LanguageModel, Model, Rows, number_format
from forerun.types import Needs

_log = logging.getLogger(__name__)


class HeadSource:
    """A head over the target's hidden states (`DraftModelSource`).

    Attributes:
        head: as it was read; None before `read`.

    Args:
        model: its folder, or a head that was read; None takes the one that is shipped for the target.
        kind: name of the drafter, and of the folder of its shipped heads.
        make: builds the model that drafts from a head that was trained for the target, whose name in messages is the
            third argument. Raises IncompatibleDrafterError if the target is of another size, UnsupportedModelError for
            a head of another kind.
    """

    def __init__(
        self,
        model: str | Path | StoredHead[HeadConfig] | None,
        kind: str,
        make: Callable[[StoredHead[HeadConfig], LanguageModel, str], HeadModel],
    ) -> None:
        self.head: StoredHead[HeadConfig] | None = model if isinstance(model, StoredHead) else None
        self._folder = Path(model) if isinstance(model, (str, Path)) else None
        self._kind = kind
        self._make = make
        self._acceptance = UNKNOWN_ACCEPTANCE

    @property
    def is_named(self) -> bool:
        """Return whether a head was given, or has been read."""
        return self.head is not None or self._folder is not None

    def to_load(self, target_name: str) -> tuple[NamedModel, ...]:
        folder = self._folder or shipped_folder(target_name, self._kind)
        return () if folder is None or self.head is not None else (NamedModel(folder, is_head=True),)

    def read(self, binding: Binding) -> BoundModel | None:
        """Read the head and fit it to the target.

        Raises:
            DrafterError: no head was given, and none is shipped for the target.
            ModelLoadError: it cannot be read.
            IncompatibleDrafterError: it is the head of another target, or the target has no such states.
        """
        target = binding.target
        if self.head is None:
            self._folder = self._folder or shipped_head(target, self._kind)
            if self._folder is None:
                raise DrafterError(
                    f"forerun ships no head for {target.name}. Give the folder of one that was trained for it: "
                    f"drafter='{self._kind}:model=path/to/head'."
                )
            self.head = load_head(self._folder, target.num_layers if isinstance(target, Model) else None)
            self._acceptance = recorded_acceptance(self._folder)
        name = "a head" if self._folder is None else str(self._folder)
        check_target(self.head.fingerprint, target, name)
        model = self._make(self.head, target, name)
        _check_states(self.head, target, name)
        trained = self.head.number_format
        served = number_format(target)
        if trained and trained != served:
            message = "%s was trained on states of %s in %s, which is served in %s: a little less may be accepted."
            _log.info(message, name, target.name, trained, served)
        needs = Needs(layers=self.head.config.layers, states=True)
        return BoundModel(model, model, needs, self._acceptance)


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
