"""A target's own multi-token-prediction layer drafts a chain (DeepSeek-V3, 2412.19437).

It is an EAGLE head that was trained with its target and lies in its checkpoint: row by row it reads the target's state
of a token beside the token that follows, and below the first drafted token its own output.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from pathlib import Path

from forerun.drafters.growth.chain import ChainGrowth
from forerun.drafters.model_drafter import ModelDrafter
from forerun.drafters.models.eagle.drafting import EagleHead
from forerun.drafters.models.heads.config import HeadConfig, StoredHead
from forerun.drafters.models.mtp.drafting import MtpSource
from forerun.types import Draft, Sequence, Step


class Mtp(ModelDrafter):
    """Drafts chains with the MTP layer of the target's checkpoint, applied again and again.

    Where the checkpoint has such layers in a form that is not supported, a warning is logged once, and nothing is
    drafted.

    Args:
        model: folder of an MTP layer that was trained for the target (forerun train mtp), or one that was read; None
            takes the target's own.
        draft_vocab: tokens that it can propose (1,000 or more; 0 for all), as in DraftModel.

    Raises:
        ConfigError: draft_vocab is out of range.
    """

    def __init__(
        self, model: str | Path | StoredHead[HeadConfig] | None = None, *, draft_vocab: int | None = None
    ) -> None:
        head = EagleHead(MtpSource(model), draft_vocab)
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
