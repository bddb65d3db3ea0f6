"""EAGLE heads as a kind of head that is trained."""

from __future__ import annotations

from torch import Tensor

from forerun.drafters.model.eagle import Eagle
from forerun.heads import EagleConfig, StoredHead
from forerun.models import LanguageModel
from forerun.train.eagle.loss import EagleLoss
from forerun.train.eagle.module import EagleHead, unrolled
from forerun.train.eagle.options import EagleTraining
from forerun.train.eagle.start import head_config, set_first_weights
from forerun.train.heads.kind import HeadKind
from forerun.train.heads.module import HeadModule
from forerun.train.heads.run import COMPUTE, Read


def unrolled_guess(head: HeadModule, read: Read) -> list[tuple[Tensor, Tensor]]:
    """As `evaluate.Guess`, of an EAGLE head."""
    assert isinstance(head, EagleHead)
    outputs, _ = unrolled(head, read.rows, read.states, read.embeddings, COMPUTE[read.states.device.type])
    own = head.config.own_output_rows
    return [(outputs, head.get_parameter("lm_head.weight") if own else read.target.output_rows)]


class EagleKind(HeadKind[EagleTraining]):
    """EAGLE heads."""

    loss = EagleLoss
    guess = staticmethod(unrolled_guess)

    def config(self, name: str, served: LanguageModel, max_positions: int) -> EagleConfig:
        """As `HeadKind.config`."""
        return head_config(name, served, self.options.shape, max_positions)

    def module(self, config: EagleConfig) -> EagleHead:
        """As `HeadKind.module`."""
        return EagleHead(config)

    def set_first_weights(self, head: EagleHead, last_states: Tensor, output_rows: Tensor) -> None:
        """As `HeadKind.set_first_weights`."""
        set_first_weights(head, last_states, output_rows, self.options.seed)

    def drafter(self, head: StoredHead[EagleConfig]) -> Eagle:
        """As `HeadKind.drafter`."""
        return Eagle(head)
