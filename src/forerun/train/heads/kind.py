"""What differs between kinds of heads in training them: shape, first weights, loss, what they guess, how they draft."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar, Generic

from torch import Tensor

from forerun.errors import ConfigError
from forerun.heads import HeadConfig
from forerun.models import LanguageModel
from forerun.train.heads.evaluate import Guess, HeldOut
from forerun.train.heads.options import EVALUATED_TOKENS
from forerun.train.heads.run import Options


class HeadKind(ABC, Generic[Options]):
    """A kind of head, with what its training was told.

    Attributes:
        loss: makes its loss.
        guess: what it predicts of texts.
        module: its tensors for a configuration, not set yet.
        drafter: drafts a chain with a stored head, not yet bound to a target.
        num_draft_tokens: K of the evaluations.

    Raises:
        ConfigError: K was asked for, and the head drafts fewer tokens.
    """

    loss: ClassVar[Any]
    guess: Guess
    module: ClassVar[Any]
    drafter: ClassVar[Any]

    def __init__(self, options: Options, most: int | None = None) -> None:
        """most: tokens of a draft; None for no bound."""
        self.options, asked = options, options.num_draft_tokens
        if asked is not None and most is not None and asked > most:
            raise ConfigError(
                f"num_draft_tokens is {asked}, but such a head drafts {most} tokens at most. Evaluate with no more, "
                "or train a head that drafts more."
            )
        self.num_draft_tokens = asked or min(EVALUATED_TOKENS, most or EVALUATED_TOKENS)

    @abstractmethod
    def config(self, name: str, served: LanguageModel, max_positions: int) -> HeadConfig:
        """Its shape for a target. Raises ConfigError where the target has no such layers, or sizes contradict."""

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
