"""What differs between kinds of heads in training them: shape, first weights, loss, what they guess, how they draft."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Generic

from torch import Tensor

from forerun.drafters import Drafter
from forerun.heads import HeadConfig, StoredHead
from forerun.models import LanguageModel
from forerun.train.heads.evaluate import Guess, HeldOut
from forerun.train.heads.module import HeadModule
from forerun.train.heads.run import LossOf, Options


class HeadKind(ABC, Generic[Options]):
    """A kind of head, with what its training was told.

    Attributes:
        loss: makes its loss.
        guess: what it predicts of texts.
    """

    def __init__(self, options: Options) -> None:
        self.options = options

    @property
    @abstractmethod
    def loss(self) -> LossOf[Options]: ...

    @property
    @abstractmethod
    def guess(self) -> Guess: ...

    @abstractmethod
    def config(self, name: str, served: LanguageModel, max_positions: int) -> HeadConfig:
        """Its shape for a target. Raises ConfigError where the target has no such layers, or sizes contradict."""

    @abstractmethod
    def module(self, config: Any) -> HeadModule:
        """Its tensors, not set yet."""

    @abstractmethod
    def set_first_weights(self, head: Any, last_states: Tensor, output_rows: Tensor) -> None:
        """Set all tensors.

        Args:
            last_states: [n, hidden] of some tokens, after the target's final norm.
            output_rows: [V, hidden] of the draft vocabulary.
        """

    def finish(self, head: Any, held_out_of: Callable[[int], HeldOut]) -> None:
        """Keep beside a trained head what drafting wants to know of held-out answers.

        Args:
            held_out_of: K -> some of them, for drafts of K tokens.
        """

    @abstractmethod
    def drafter(self, head: StoredHead[Any]) -> Drafter:
        """That drafts a chain with it, not yet bound to a target."""
