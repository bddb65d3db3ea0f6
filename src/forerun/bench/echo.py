"""A target that repeats a text which the real target has written, for replays: same verdicts, without its forwards.

A greedy or seeded request has the same text with every drafter. So a drafter that does not read the target's logits
can be replayed against the text alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from forerun.models import Model, Rows

_CERTAIN = 1000.0
"""Logit of the text's next token, above any noise that a seeded request adds."""


class EchoCache:
    """The tokens of a sequence in place of keys and values.

    Attributes:
        nbytes: bytes of keys and values, 0.
        tokens: of the committed positions.
    """

    nbytes = 0

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self._scratch: list[int] = []

    @property
    def length(self) -> int:
        """Committed positions."""
        return len(self.tokens)

    def write(self, token_ids: Sequence[int]) -> None:
        """Take the rows of a forward as scratch."""
        self._scratch = list(token_ids)

    def commit(self, kept: Sequence[int]) -> None:
        """Keep these rows of the last forward, and drop the others."""
        self.tokens += [self._scratch[row] for row in kept]
        self._scratch = []

    def truncate(self, length: int) -> None:
        """Keep the first `length` positions."""
        del self.tokens[length:]

    def free(self) -> None:
        """Nothing to give back."""


class EchoModel:
    """A model whose most probable next token is the one in `text`, and token 0 for rows that differ from the text.

    Args:
        model: the one that wrote the text; its description is copied.

    Attributes:
        text: prompt and output of the request that is in the engine now.
    """

    def __init__(self, model: Model) -> None:
        self.name = model.name
        self.vocab_size = model.vocab_size
        self.context_length = model.context_length
        self.eos_token_ids = model.eos_token_ids
        self.dtype = model.dtype
        self.num_parameters = model.num_parameters
        self.exactness = model.exactness
        self.text: Sequence[int] = []

    def new_cache(self) -> EchoCache:
        """An empty cache for one sequence."""
        return EchoCache()

    def forward(self, batch: Sequence[Rows]) -> Tensor:
        """[sum of num_logits, V] float32 logits in packed order, as Model.forward; caches are EchoCaches."""
        echoed: list[int] = []
        for rows in batch:
            cache: Any = rows.cache
            cache.write(rows.token_ids)
            places = self._places(cache.length, rows)
            wanted = len(places) if rows.num_logits is None else rows.num_logits
            last = places[len(places) - wanted :]
            echoed.extend(self.text[place + 1] if 0 <= place < len(self.text) - 1 else 0 for place in last)
        logits = torch.zeros(len(echoed), self.vocab_size)
        logits[torch.arange(len(echoed)), torch.tensor(echoed, dtype=torch.int64)] = _CERTAIN
        return logits

    def _places(self, start: int, rows: Rows) -> list[int]:
        """The position of each row in the text; -1 where it or a row above it differs from the text."""
        places: list[int] = []
        parents = rows.parents or range(-1, len(rows.token_ids) - 1)
        for token_id, parent in zip(rows.token_ids, parents, strict=True):
            place = start if parent < 0 else places[parent] + 1 if places[parent] >= 0 else -1
            on_text = 0 <= place < len(self.text) and self.text[place] == token_id
            places.append(place if on_text else -1)
        return places
