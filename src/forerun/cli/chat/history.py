"""What has been said in a chat, and how much of it fits the target's context."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from forerun.errors import PromptError

Message = dict[str, str]


class Turn(NamedTuple):
    """A user's message and what was answered, as far as it came."""

    user: str
    answer: str


class Fitted(NamedTuple):
    """The prompt of the next answer.

    Attributes:
        messages: the system message, the turns that are kept, and the new message.
        size: tokens of the prompt.
        dropped: turns, the oldest, that are left out.
    """

    messages: list[Message]
    size: int
    dropped: int


@dataclass
class History:
    """The turns of a chat after its system message.

    Attributes:
        system: the system message; None without one. It is never dropped.
        turns: the oldest first.
    """

    system: str | None = None
    turns: list[Turn] = field(default_factory=list)

    def messages(self, first: int = 0) -> list[Message]:
        """The system message and the turns from the one of this number on, as chat templates read them."""
        said = [] if self.system is None else [{"role": "system", "content": self.system}]
        for turn in self.turns[first:]:
            said.append({"role": "user", "content": turn.user})
            said.append({"role": "assistant", "content": turn.answer})
        return said

    def fitted(
        self, text: str, count: Callable[[Sequence[Message]], int], context_length: int, max_tokens: int
    ) -> Fitted:
        """The prompt for a new message, without the oldest turns where all of them would not fit.

        Places for an answer of max_tokens are kept free, or half of the context where that is less; a message that
        does not leave them even alone is taken as long as it leaves one. Nothing is changed here.

        Args:
            count: tokens of a prompt.

        Raises:
            PromptError: the message with the system message alone does not fit.
        """
        limit = context_length - min(max_tokens, context_length // 2)
        for dropped in range(len(self.turns) + 1):
            messages = [*self.messages(dropped), {"role": "user", "content": text}]
            size = count(messages)
            alone = dropped == len(self.turns)
            if size <= limit or (alone and size < context_length):
                return Fitted(messages, size, dropped)
        beside = "The message" if self.system is None else "The message with the system message"
        raise PromptError(
            f"{beside} makes a prompt of {size} tokens, but the context holds {context_length}, and at least one place "
            "is needed for the answer. Shorten it; what was said before is kept."
        )
