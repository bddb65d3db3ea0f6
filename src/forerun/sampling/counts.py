"""Which tokens a sequence holds, kept up to date so that a step never rescans a long prompt."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import torch
from torch import Tensor

from forerun.types import Sequence


class TokenCounts:
    """Presence in prompt and output, and occurrences in the output, of every token of the vocabulary.

    Attributes:
        seen: [V] bool, whether the token is in prompt or output.
        output: [V] float32, how often it is in the output.
    """

    def __init__(self, sequence: Sequence, vocab_size: int) -> None:
        self.sequence = sequence
        self.seen = torch.zeros(vocab_size, dtype=torch.bool)
        self.output = torch.zeros(vocab_size)
        self._counted = 0

    def update(self) -> None:
        """Counts what was appended since the last call; recounts if the sequence became shorter."""
        tokens = self.sequence.token_ids
        if len(tokens) == self._counted:
            return
        if len(tokens) < self._counted:
            self._counted = 0
            self.seen.zero_()
            self.output.zero_()
        new = self.indices(tokens[self._counted :])
        self.seen[new] = True
        add_ones(self.output, self.indices(tokens[max(self._counted, self.sequence.num_prompt) :]))
        self._counted = len(tokens)

    def indices(self, token_ids: Seq[int]) -> Tensor:
        """[n] the tokens that lie in the vocabulary: a draft model's may be the smaller one."""
        vocab_size = len(self.seen)
        return torch.tensor([t for t in token_ids if t < vocab_size], dtype=torch.int64)


def add_ones(counts: Tensor, indices: Tensor) -> None:
    """Adds one to counts [V] per occurrence in indices [n]."""
    counts.index_add_(0, indices, torch.ones(len(indices), dtype=counts.dtype, device=counts.device))
