"""The contracts of what holds a sequence to a grammar: a matcher, and the constraint that the pipeline asks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence as Seq
from typing import TYPE_CHECKING, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from forerun.errors import GrammarDeadEndError
from forerun.tree import Tree

if TYPE_CHECKING:
    from forerun.types import Sequence

Bits: TypeAlias = NDArray[np.uint8]
"""[ceil(V / 8)] one bit per token, the lowest bit of the first byte for token 0."""
Allowed: TypeAlias = Bits | GrammarDeadEndError | None
"""What may follow a prefix: these tokens; nothing, and why; None: anything, since the output has ended there."""


class Matcher(Protocol):
    """A grammar, somewhere in a text. What it answers is a function of the tokens accepted so far."""

    def accept(self, token_id: int) -> bool:
        """Go on by a token; False, with nothing changed, if the grammar refuses it. No end token is ever given."""

    def undo(self, count: int) -> bool:
        """Take the last accepted tokens back; False if the matcher is of no further use."""

    def allowed(self) -> tuple[Bits, bool]:
        """The tokens that may follow, end tokens apart, in an array of the caller's; whether the text may end here.

        Raises:
            GrammarDeadEndError: it cannot tell. After that the matcher is of no further use.
        """

    def forced(self) -> list[int]:
        """Tokens of which the only text that may follow can be made; perhaps others make the same text."""


class Constraint(Protocol):
    """One sequence's grammar. It follows the sequence's tokens by itself, and holds nothing that they do not tell."""

    def allowed(self, sequence: Sequence, paths: Seq[Seq[int]]) -> list[Allowed]:
        """What may follow the sequence's tokens and each of the paths of tokens after them."""

    def viable(self, sequence: Sequence, tree: Tree) -> list[bool]:
        """[n] whether the output may go on to each node of the tree, along the node's path."""

    def forced(self, sequence: Sequence, limit: int) -> list[int]:
        """At most so many tokens that the grammar leaves no choice about, as far as it tells."""


def is_allowed(bits: Bits, token_id: int) -> bool:
    """Whether the token's bit is set."""
    return bool(bits[token_id >> 3] >> (token_id & 7) & 1)


def allow(bits: Bits, token_ids: Iterable[int]) -> None:
    """Set the bits of these tokens."""
    for token_id in token_ids:
        bits[token_id >> 3] |= 1 << (token_id & 7)


def forbid(bits: Bits, token_id: int) -> None:
    """Clear the token's bit."""
    bits[token_id >> 3] &= 0xFF ^ (1 << (token_id & 7))
