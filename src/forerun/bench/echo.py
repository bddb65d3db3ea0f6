"""A target that repeats a text which the real target has written, for replays: same verdicts, without its forwards.

A greedy or seeded request has the same text with every drafter. So a drafter that does not read the target's rows can
be replayed against the text alone.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from forerun.cache import Unpaged
from forerun.models import Forward, LanguageModel, Rows, StandIn
from forerun.types import Cache

_CERTAIN = 1000.0
"""Logit of the text's next token, above any noise that a seeded request adds."""


class EchoCache(Unpaged):
    """The tokens of a sequence in place of keys and values.

    Attributes:
        nbytes: bytes of keys and values, 0.
        tokens: of the committed positions.
        scratch: tokens fed since the last commit, and their positions in the text; -1 for a token that differs from the
            text, and for all below it.
    """

    nbytes = 0

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.scratch: list[tuple[int, int]] = []

    @property
    def length(self) -> int:
        """Committed positions."""
        return len(self.tokens)

    @property
    def num_scratch(self) -> int:
        """Rows fed since the last commit."""
        return len(self.scratch)

    def commit(self, path: Sequence[int]) -> None:
        """Keep these of the rows fed since the last commit, and drop the others."""
        self.tokens += [self.scratch[row][0] for row in path]
        self.scratch = []

    def drop(self, keep: int = 0) -> None:
        """Drop the rows fed since the last commit, but for the first `keep`."""
        del self.scratch[keep:]

    def truncate(self, length: int) -> None:
        """Keep the first `length` positions, and no scratch."""
        del self.tokens[length:]
        self.scratch = []

    def free(self) -> None:
        """Nothing to give back."""

    def fork(self, other: Cache, length: int) -> None:
        """Hold the first tokens of another."""
        assert isinstance(other, EchoCache)
        self.tokens = other.tokens[:length]


class EchoModel(StandIn):
    """A model whose most probable next token is the one in the text, and token 0 for rows that differ from the text.

    Args:
        model: the one that wrote the texts.

    Attributes:
        text: of the only request that is in the engine now.
    """

    def __init__(self, model: LanguageModel) -> None:
        super().__init__(model)
        self.text: Sequence[int] = []

    @property
    def pool(self) -> None:
        """None: its caches hold no pages."""

    def new_cache(self) -> EchoCache:
        """An empty cache for one sequence."""
        return EchoCache()

    def forward(self, batch: Sequence[Rows], layers: Sequence[int] = ()) -> Forward:
        """Float32 logits and no taps, otherwise as `LanguageModel.forward`; caches are EchoCaches."""
        echoed: list[int] = []
        for rows in batch:
            cache = rows.cache
            assert isinstance(cache, EchoCache)
            self._feed(cache, rows)
            last = cache.scratch[cache.num_scratch - rows.num_wanted :]
            echoed.extend(self.text[place + 1] if 0 <= place < len(self.text) - 1 else 0 for _, place in last)
        logits = torch.zeros(len(echoed), self.vocab_size)
        logits[torch.arange(len(echoed)), torch.tensor(echoed, dtype=torch.int64)] = _CERTAIN
        return Forward(logits)

    def _feed(self, cache: EchoCache, rows: Rows) -> None:
        """Add the rows to the scratch."""
        scratch, fed = cache.scratch, cache.num_scratch
        parents = range(fed - 1, fed + len(rows.token_ids) - 1) if rows.parents is None else rows.parents
        for token_id, parent in zip(rows.token_ids, parents, strict=True):
            place = cache.length if parent < 0 else scratch[parent][1] + 1 if scratch[parent][1] >= 0 else -1
            on_text = 0 <= place < len(self.text) and self.text[place] == token_id
            scratch.append((int(token_id), place if on_text else -1))
