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

import torch
from torch import Tensor

from forerun.config import SamplingParams
from forerun.errors import SamplingError
from forerun.sampling.counts import TokenCounts, add_ones
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
        self._counts: dict[int, TokenCounts] = {}

    def start(self, sequence: Sequence) -> None:
        """A sequence enters: what its options need of the prompt is counted."""
        if _penalises(sequence.params):
            self._counts_of(sequence)

    def check(self, params: SamplingParams) -> None:
        """Raises SamplingError if an option names a token outside the vocabulary."""
        for name in ("logit_bias", "stop_token_ids"):
            for token in getattr(params, name):
                if token >= self.vocab_size:
                    raise SamplingError(
                        f"{name} names token {token}, but the model's vocabulary ends at {self.vocab_size - 1}. "
                        "Leave the token out."
                    )

    def stop(self, sequence: Sequence) -> None:
        """The sequence leaves; its counts are freed."""
        self._counts.pop(sequence.id, None)

    def is_identity(self, params: SamplingParams) -> bool:
        """Whether the request takes the argmax of the raw logits: greedy, and no option moves it."""
        return params.greedy and not _edits(params)

    def process(self, logits: Tensor, rows: Seq[LogitsRow]) -> Tensor:
        """The processed laws.

        Args:
            logits: [R, V] float32 or float64; not modified.
            rows: where each of them stands.

        Returns:
            [R, V] log-probabilities of the same dtype, without NaN. Greedy rows hold 0 at the argmax (of equal
            ones the lowest id) and -inf elsewhere. A row whose options mask every token keeps the model's law.
        """
        params = [row.sequence.params for row in rows]
        edited = [index for index, each in enumerate(params) if _edits(each)]
        if edited:
            logits = logits.clone()
            logits[edited] = self._edit(logits[edited], [rows[index] for index in edited])
        greedy = [index for index, each in enumerate(params) if each.greedy]
        if len(greedy) == len(rows):
            return one_hot_log(logits.argmax(-1), logits.shape[-1], logits.dtype)
        laws = _warp(logits, params)
        if greedy:
            laws[greedy] = one_hot_log(logits[greedy].argmax(-1), logits.shape[-1], logits.dtype)
        return laws

    def _edit(self, logits: Tensor, rows: Seq[LogitsRow]) -> Tensor:
        """Everything that depends on token ids or on the prefix. logits [R, V] is modified and returned."""
        model_logits = logits.clone()
        for logit, row in zip(logits, rows, strict=True):
            self._add_bias(logit, row.sequence.params)
        penalised = [index for index, row in enumerate(rows) if _penalises(row.sequence.params)]
        if penalised:
            logits[penalised] = self._penalise(logits[penalised], [rows[index] for index in penalised])
        for logit, row in zip(logits, rows, strict=True):
            self._hold_back_end(logit, row)
        logits.clamp_(max=torch.finfo(logits.dtype).max / 4)  # a penalty below 1 may overflow a large bias
        masked = logits.amax(-1, keepdim=True) == -math.inf
        return torch.where(masked, model_logits, logits)

    def _add_bias(self, logit: Tensor, params: SamplingParams) -> None:
        bias = {token: value for token, value in params.logit_bias.items() if token < self.vocab_size}
        if bias:
            limit = torch.finfo(logit.dtype).max / 4  # two such numbers still add up to a finite one
            values = torch.tensor(list(bias.values()), dtype=torch.float64).clamp_(-limit, limit).to(logit)
            logit[list(bias)] += values

    def _penalise(self, logits: Tensor, rows: Seq[LogitsRow]) -> Tensor:
        params = [row.sequence.params for row in rows]
        counts = [self._counts_of(row.sequence) for row in rows]
        seen = torch.stack([count.seen for count in counts]).to(logits.device)
        output = torch.stack([count.output for count in counts]).to(logits.device)
        for index, (row, count) in enumerate(zip(rows, counts, strict=True)):
            if row.path:
                path = count.indices(row.path)
                seen[index, path] = True
                add_ones(output[index], path)
        repetition = _column([each.repetition_penalty for each in params], logits)
        penalised = torch.where(logits < 0, logits * repetition, logits / repetition)
        logits = torch.where(seen, penalised, logits)
        logits -= output.to(logits.dtype) * _column([each.frequency_penalty for each in params], logits)
        logits -= (output > 0).to(logits.dtype) * _column([each.presence_penalty for each in params], logits)
        return logits

    def _hold_back_end(self, logit: Tensor, row: LogitsRow) -> None:
        params = row.sequence.params
        if row.sequence.num_output + len(row.path) < params.min_tokens:
            held = [t for t in {*self.eos_token_ids, *params.stop_token_ids} if t < self.vocab_size]
            logit[held] = -math.inf

    def _counts_of(self, sequence: Sequence) -> TokenCounts:
        counts = self._counts.get(sequence.id)
        if counts is None or counts.sequence is not sequence:
            counts = self._counts[sequence.id] = TokenCounts(sequence, self.vocab_size)
        counts.update()
        return counts


def _warp(logits: Tensor, params: Seq[SamplingParams]) -> Tensor:
    laws = scale(logits, [1.0 if each.greedy else each.temperature for each in params])
    if any(each.top_k for each in params):
        laws = keep_top_k(laws, [each.top_k for each in params])
    if any(each.top_p < 1 for each in params):
        laws = keep_top_p(laws, [each.top_p for each in params])
    if any(each.min_p > 0 for each in params):
        laws = keep_min_p(laws, [each.min_p for each in params])
    return laws.log_softmax(-1)


def _penalises(params: SamplingParams) -> bool:
    return params.repetition_penalty != 1 or params.presence_penalty != 0 or params.frequency_penalty != 0


def _edits(params: SamplingParams) -> bool:
    return bool(params.logit_bias) or params.min_tokens > 0 or _penalises(params)


def _column(values: Seq[float], like: Tensor) -> Tensor:
    return torch.tensor(values, dtype=like.dtype, device=like.device)[:, None]
