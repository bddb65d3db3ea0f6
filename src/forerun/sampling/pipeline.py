"""Logits to laws, position by position, for target and drafter alike.

Order and meaning are those of Transformers' processors in `generate` (5.x): logit bias, repetition
penalty, [presence and frequency penalty, as in OpenAI's interface and vLLM], min_tokens, temperature,
top-k, top-p, min-p. Each row is processed on its own prefix: the committed tokens and the drafted path.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor

from forerun.config import SamplingParams
from forerun.sampling.draw import row_argmax
from forerun.sampling.edits import SequenceEdits, edits
from forerun.sampling.filters import keep_min_p, keep_top_k, keep_top_p, one_hot_log, scale
from forerun.types import Sequence


@dataclass(frozen=True, slots=True)
class LogitsRow:
    """Where one row of logits stands: after `sequence.token_ids` followed by `path`."""

    sequence: Sequence
    path: Seq[int] = ()


class LogitsPipeline:
    """Turns rows of logits into the laws that the requests ask for.

    Keeps token counts of the sequences whose options need them, from `start` (or their first row) to `stop`.

    Args:
        vocab_size: V, the width of the rows. Token ids at and above it are ignored.
        eos_token_ids: the tokens that `min_tokens` holds back, beside the request's stop_token_ids.
    """

    def __init__(self, vocab_size: int, eos_token_ids: Iterable[int] = ()) -> None:
        self.vocab_size = vocab_size
        self.eos_token_ids = frozenset(eos_token_ids)
        self._edits: dict[int, SequenceEdits] = {}

    def start(self, sequence: Sequence) -> None:
        """A sequence enters."""
        if edits(sequence.params):
            self._edits_of(sequence)

    def stop(self, sequence: Sequence) -> None:
        """The sequence leaves; its counts are freed."""
        self._edits.pop(sequence.id, None)

    def is_identity(self, params: SamplingParams) -> bool:
        """Whether the request takes the argmax of the raw logits: greedy, and no option moves it."""
        return params.greedy and not edits(params)

    def process(self, logits: Tensor, rows: Seq[LogitsRow]) -> Tensor:
        """The processed laws.

        Args:
            logits: [R, V] float32 or float64; not modified.
            rows: where each of them stands; rows of one sequence side by side.

        Returns:
            [R, V] log-probabilities of the same dtype, without NaN. Greedy rows hold 0 at the argmax (of equal
            ones the lowest id) and -inf elsewhere. A row whose options mask every token keeps the model's law.
        """
        params = [row.sequence.params for row in rows]
        if any(edits(each) for each in params):
            logits = self._edit(logits, rows)
        greedy = [index for index, each in enumerate(params) if each.greedy]
        if len(greedy) == len(rows):
            return one_hot_log(row_argmax(logits), logits.shape[-1], logits.dtype)
        laws = _warp(logits, params)
        if greedy:
            laws[greedy] = one_hot_log(row_argmax(logits[greedy]), logits.shape[-1], logits.dtype)
        return laws

    def _edit(self, logits: Tensor, rows: Seq[LogitsRow]) -> Tensor:
        """A copy of logits [R, V] after everything that depends on token ids or on the prefix."""
        edited = logits.clone()
        start = 0
        for _, group in groupby(rows, key=lambda row: id(row.sequence)):
            members = list(group)
            sequence = members[0].sequence
            if edits(sequence.params):
                part = edited[start : start + len(members)]
                self._edits_of(sequence).apply(part, [row.path for row in members])
                part.clamp_(max=torch.finfo(part.dtype).max / 4)  # a penalty below 1 may overflow a large bias
            start += len(members)
        masked = edited.amax(-1) == -math.inf
        if bool(masked.any()):
            edited[masked] = logits[masked]
        return edited

    def _edits_of(self, sequence: Sequence) -> SequenceEdits:
        known = self._edits.get(sequence.id)
        if known is None or known.sequence is not sequence:
            known = self._edits[sequence.id] = SequenceEdits(sequence, self.vocab_size, self.eos_token_ids)
        return known


def _warp(logits: Tensor, params: Seq[SamplingParams]) -> Tensor:
    laws = scale(logits, [1.0 if each.greedy else each.temperature for each in params])
    laws = keep_top_k(laws, [each.top_k for each in params])
    laws = keep_top_p(laws, [each.top_p for each in params])
    laws = keep_min_p(laws, [each.min_p for each in params])
    return laws.log_softmax(-1)
