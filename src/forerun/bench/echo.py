"""A target that repeats what the real one has written, for replays: verdicts are the same, forwards cost nothing.

Greedy and seeded texts are known beforehand, whatever drafts for them. So a drafter that does not look at the target's
logits can be replayed against the text alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from forerun.models import Model, Rows

_CERTAIN = 1000.0
"""Logit of the next token of the text, above any noise that a seeded request adds."""


class EchoCache:
    """Tokens in place of keys and values."""

    nbytes = 0

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self._scratch: list[int] = []

    @property
    def length(self) -> int:
        return len(self.tokens)

    def write(self, token_ids: Sequence[int]) -> None:
        """The rows of a forward."""
        self._scratch = list(token_ids)

    def commit(self, kept: Sequence[int]) -> None:
        """Keep these rows of the last forward."""
        self.tokens += [self._scratch[row] for row in kept]

    def truncate(self, length: int) -> None:
        """Keep the first `length` positions."""
        del self.tokens[length:]

    def free(self) -> None:
        """Nothing to give back."""


class EchoModel:
    """Says `text`, and nothing certain where rows have left it; in all else it is the model that wrote it.

    Attributes:
        text: prompt and output of the request that is now in the engine.
    """

    def __init__(self, model: Model) -> None:
        self._model = model
        self.text: Sequence[int] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def new_cache(self) -> EchoCache:
        return EchoCache()

    def forward(self, batch: Sequence[Rows]) -> Tensor:
        """As Model.forward. Token 0 follows rows that are not on the text."""
        said: list[int] = []
        for rows in batch:
            cache: Any = rows.cache
            cache.write(rows.token_ids)
            start, text = cache.length, self.text
            parents = rows.parents or range(-1, len(rows.token_ids) - 1)
            places: list[int] = []  # of each row in the text; -1 off it
            for token_id, parent in zip(rows.token_ids, parents, strict=True):
                place = start if parent < 0 else places[parent] + 1 if places[parent] >= 0 else -1
                on_text = 0 <= place < len(text) and text[place] == token_id
                places.append(place if on_text else -1)
            wanted = len(places) if rows.num_logits is None else rows.num_logits
            last = places[len(places) - wanted :]
            said.extend(text[place + 1] if 0 <= place < len(text) - 1 else 0 for place in last)
        logits = torch.zeros(len(said), self._model.vocab_size)
        logits[torch.arange(len(said)), torch.tensor(said, dtype=torch.int64)] = _CERTAIN
        return logits
