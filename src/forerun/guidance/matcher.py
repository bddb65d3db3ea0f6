"""llguidance's matcher in forerun's terms."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from forerun.constraints import Bits, forbid
from forerun.errors import GrammarDeadEndError

if TYPE_CHECKING:
    from llguidance import LLMatcher


class GuidanceMatcher:
    """One place in a text (`forerun.constraints.Matcher`).

    What llguidance refuses it refuses for good where it was told to consume it, and not where it was told to try. End
    tokens are none of its business: it does not count them among the tokens that it takes back.

    Args:
        matcher: this one's alone.
        end_id: stands for the end of the text.
    """

    def __init__(self, matcher: LLMatcher, end_id: int) -> None:
        self._matcher, self._end_id = matcher, end_id

    def accept(self, token_id: int) -> bool:
        return self._matcher.try_consume_tokens([token_id]) == 1

    def undo(self, count: int) -> bool:
        return not self._matcher.is_error() and self._matcher.rollback(count)

    def allowed(self) -> tuple[Bits, bool]:
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8).copy()
        if self._matcher.is_error():
            raise GrammarDeadEndError(f"The grammar cannot be followed further: {self.error}. Write it in another way.")
        forbid(bits, self._end_id)
        return bits, self._matcher.is_accepting()

    @property
    def error(self) -> str:
        """Why it is of no further use; empty if it is."""
        return said(self._matcher.get_error())

    def forced(self) -> list[int]:
        return self._matcher.compute_ff_tokens()


def said(message: str) -> str:
    """llguidance's message in one line, without the parser's state."""
    return " ".join(message.replace("<non-verbose/>", "").split())[:300].rstrip(" .;")
