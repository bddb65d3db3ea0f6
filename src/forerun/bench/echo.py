"""A target that repeats what the real one has written, for replays: verdicts are the same, forwards cost nothing.

Greedy and seeded texts are known beforehand, whatever drafts for them. So a drafter that does not look at the target's
logits can be replayed against the text alone.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from forerun.models import Forward, LanguageModel, Rows, StandIn

_CERTAIN = 1000.0
"""Logit of the next token of the text, above any noise that a seeded request adds."""


class EchoCache:
    """Tokens in place of keys and values."""

    nbytes = 0

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.scratch: list[tuple[int, int]] = []  # tokens fed, and their places in the text; -1 off it

    @property
    def length(self) -> int:
        return len(self.tokens)

    @property
    def num_scratch(self) -> int:
        return len(self.scratch)

    def commit(self, path: Sequence[int]) -> None:
        """Keep these of the rows fed since the last commit."""
        self.tokens += [self.scratch[row][0] for row in path]
        self.scratch = []

    def drop(self, keep: int = 0) -> None:
        """Drop the rows fed since the last commit, but for the first `keep`."""
        del self.scratch[keep:]

    def truncate(self, length: int) -> None:
        """Keep the first `length` positions."""
        del self.tokens[length:]
        self.scratch = []

    def free(self) -> None:
        """Nothing to give back."""


class EchoModel(StandIn):
    """Says `text`, and nothing certain where rows have left it; in all else it is the model that wrote it.

    Attributes:
        text: prompt and output of the request that is now in the engine.
    """

    def __init__(self, model: LanguageModel) -> None:
        super().__init__(model)
        self.text: Sequence[int] = []

    def new_cache(self) -> EchoCache:
        return EchoCache()

    def forward(self, batch: Sequence[Rows], layers: Sequence[int] = ()) -> Forward:
        """As LanguageModel.forward. Token 0 follows rows that are not on the text."""
        said: list[int] = []
        for rows in batch:
            cache = rows.cache
            assert isinstance(cache, EchoCache)
            scratch = cache.scratch
            start, text, fed = cache.length, self.text, len(scratch)
            parents = range(fed - 1, fed + len(rows.token_ids) - 1) if rows.parents is None else rows.parents
            for token_id, parent in zip(rows.token_ids, parents, strict=True):
                place = start if parent < 0 else scratch[parent][1] + 1 if scratch[parent][1] >= 0 else -1
                on_text = 0 <= place < len(text) and text[place] == token_id
                scratch.append((token_id, place if on_text else -1))
            last = scratch[len(scratch) - rows.num_wanted :]
            said.extend(text[place + 1] if 0 <= place < len(text) - 1 else 0 for _, place in last)
        logits = torch.zeros(len(said), self.vocab_size)
        logits[torch.arange(len(said)), torch.tensor(said, dtype=torch.int64)] = _CERTAIN
        return Forward(logits)
