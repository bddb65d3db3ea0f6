"""What differs between kinds of heads in training them: shape, first weights, loss, what they guess, how they draft."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Generic

from torch import Tensor

from forerun.drafters import Drafter
from forerun.errors import ConfigError
from forerun.heads import HeadConfig, StoredHead
from forerun.models import LanguageModel
from forerun.train.heads.evaluate import Guess, HeldOut
from forerun.train.heads.module import HeadModule
from forerun.train.heads.options import EVALUATED_TOKENS
from forerun.train.heads.run import LossOf, Options


class HeadKind(ABC, Generic[Options]):
    """A kind of head, with what its training was told.

    Attributes:
        loss: makes its loss.
        guess: what it predicts of texts.
        num_draft_tokens: K of the evaluations.

    Raises:
        ConfigError: K was asked for, and the head drafts fewer tokens.
    """

    def __init__(self, options: Options) -> None:
        self.options = options
        asked, most = options.num_draft_tokens, self.most_draft_tokens
        if asked is not None and most is not None and asked > most:
            raise ConfigError(
                f"num_draft_tokens is {asked}, but such a head drafts {most} tokens at most. Evaluate with no more, "
                "or train a head that drafts more."
            )
        self.num_draft_tokens = asked or min(EVALUATED_TOKENS, most or EVALUATED_TOKENS)

    @property
    def most_draft_tokens(self) -> int | None:
        """Tokens of a draft at most; None for no bound."""
        return None

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
