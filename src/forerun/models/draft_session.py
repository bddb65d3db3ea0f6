"""The interface of draft sessions: chains that grow row by row."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Pick:
    """What to compute from each row's logits.

    Attributes:
        num_columns: from the first, those among which the largest is looked for.
        with_probability: whether its probability is computed.
        num_ahead: rows of each chain that will be fed if every one but the first is fed the token picked before it.
    """

    num_columns: int
    with_probability: bool
    num_ahead: int = 1


@dataclass(frozen=True, slots=True)
class NextTokens:
    """The most probable next token of each chain.

    Attributes:
        logits: [chains, V], as `Forward.logits`; valid until the chains advance again.
        columns: [chains] the first column of the largest logit; -1 if one of the compared logits is not finite.
        probabilities: [chains] of these columns by softmax, 0 where there is none; None if they were not requested.
    """

    logits: Tensor
    columns: list[int]
    probabilities: list[float] | None


class DraftSession(ABC):
    """Rows of some sequences, one after the other, where everything that does not change between them is prepared once.

    Their bits are those of `LanguageModel.forward`.
    """

    @abstractmethod
    def advance(self, tokens: Sequence[Sequence[int]], states: Tensor | None = None) -> NextTokens:
        """Feed tokens, which join the caches' scratch.

        Args:
            tokens: of each chain the next ones, at least one.
            states: [rows, S] what a head reads beside the tokens, chain by chain; None: what the last row of each
                chain has given, or nothing for a model that is no head. The first rows of heads need them.

        Raises:
            IndexError: there is no such token.
            OutOfPagesError: a cache's pool is full.
        """

    @abstractmethod
    def keep(self, indices: Sequence[int]) -> None:
        """Keep only these chains, in this order. indices: of the current chains."""
