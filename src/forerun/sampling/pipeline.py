"""The pipeline from logits to distributions, position by position, for target and drafter alike.

Order and meaning are those of Transformers' processors in `generate` (5.x): logit bias, repetition
penalty, [presence and frequency penalty, as in OpenAI's interface and vLLM], min_tokens, [the grammar], temperature,
top-k, top-p, min-p. Each row is processed on its own prefix: the committed tokens and the drafted path.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence as Seq
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor

from forerun.config import SamplingParams
from forerun.kernels.cpu import paced_threads
from forerun.sampling import filters, penalties
from forerun.sampling.draw import row_argmax
from forerun.sampling.grammar import DeadRows, mask_logits, no_token
from forerun.sampling.penalties import SequencePenalties
from forerun.types import Sequence

_PLAIN_TEMPERATURE = 1e-3
"""Below it, dividing logits by the temperature may overflow; `scale` subtracts the maximum before."""


@dataclass(frozen=True, slots=True)
class LogitsRow:
    """Where one row of logits stands: after `sequence.token_ids` followed by `path`."""

    sequence: Sequence
    path: Seq[int] = ()


class LogitsPipeline:
    """Turns rows of logits into the distributions that the requests' options define.

    Keeps token counts of the sequences whose options need them, from their first row to `stop`.

    Args:
        vocab_size: V, the width of the rows. Token ids at and above it are ignored.
        eos_token_ids: the tokens that `min_tokens` holds back, beside the request's stop_token_ids.
    """

    def __init__(self, vocab_size: int, eos_token_ids: Iterable[int] = ()) -> None:
        self.vocab_size = vocab_size
        self.eos_token_ids = frozenset(eos_token_ids)
        self._penalties: dict[int, SequencePenalties] = {}

    def stop(self, sequence: Sequence) -> None:
        """Free the counts of a sequence that leaves."""
        self._penalties.pop(sequence.id, None)

    def is_identity(self, params: SamplingParams) -> bool:
        """Return whether the request takes the argmax of the raw logits: greedy, and no option moves it."""
        return takes_argmax(params) and params.grammar is None

    @paced_threads()
    def process(self, logits: Tensor, rows: Seq[LogitsRow], dead: DeadRows | None = None) -> Tensor:
        """Compute the processed distributions, as log-probabilities.

        Args:
            logits: [R, V] float32 or float64; not modified.
            rows: where each of them stands; rows of one sequence side by side.
            dead: gets the rows whose grammar leaves no token, and why. They are left unmasked.

        Returns:
            [R, V] log-probabilities of the same dtype, without NaN. Greedy rows hold 0 at the argmax (of equal
            ones the lowest id) and -inf elsewhere. A row whose options mask every token keeps the model's distribution.
        """
        params = [row.sequence.params for row in rows]
        logits = self.adjust(logits, rows, dead)
        greedy = [index for index, each in enumerate(params) if each.greedy]
        if len(greedy) == len(rows):
            return filters.one_hot_log(row_argmax(logits), logits.shape[-1], logits.dtype)
        logprobs = _warp(logits, params)
        if greedy:
            logprobs[greedy] = filters.one_hot_log(row_argmax(logits[greedy]), logits.shape[-1], logits.dtype)
        return logprobs

    @paced_threads()
    def probabilities(self, logits: Tensor, rows: Seq[LogitsRow], dead: DeadRows | None = None) -> Tensor:
        """Return [R, V] the exponentials of `process`, to rounding: drafters draw from them, and rejection compares
        them. Arguments as of `process`.

        Where no option but the temperature is in use, in one operation, with different last bits.
        """
        if not all(_is_plain(row.sequence) for row in rows):
            return self.process(logits, rows, dead).exp_()
        temperatures = [row.sequence.params.temperature for row in rows]
        if any(temperature != 1 for temperature in temperatures):
            logits = logits / torch.tensor(temperatures, dtype=logits.dtype, device=logits.device)[:, None]
        return logits.softmax(-1)

    def adjust(self, logits: Tensor, rows: Seq[LogitsRow], dead: DeadRows | None = None) -> Tensor:
        """Apply all options that depend on token ids or on the prefix to logits; arguments as of `process`.

        Returns:
            [R, V], a copy unless no row has such an option.
        """
        if not any(
            row.sequence.constraint is not None or penalties.penalties_in_use(row.sequence.params) for row in rows
        ):
            return logits
        adjusted = logits.clone()
        found: DeadRows = {}
        start = 0
        for _, group in groupby(rows, key=lambda row: id(row.sequence)):
            members = list(group)
            sequence = members[0].sequence
            part = adjusted[start : start + len(members)]
            paths = [row.path for row in members]
            if penalties.penalties_in_use(sequence.params):
                self._penalties_of(sequence, logits).apply(part, paths)
                part.clamp_(max=torch.finfo(part.dtype).max / 4)  # a penalty below 1 may overflow a large bias
            if sequence.constraint is not None:
                errors = mask_logits(part, sequence.constraint.allowed(sequence, paths))
                found |= {start + row: error for row, error in errors.items()}
            start += len(members)
        for row in (adjusted.amax(-1) == -math.inf).nonzero()[:, 0].tolist():
            adjusted[row] = logits[row]
            params = rows[row].sequence.params
            if rows[row].sequence.constraint is not None:
                found[row] = no_token()
            elif params.allowed_token_ids is not None or params.bad_words:
                found[row] = no_token("allowed_token_ids and bad_words leave")
        if dead is not None:
            dead.update(found)
        return adjusted

    def _penalties_of(self, sequence: Sequence, logits: Tensor) -> SequencePenalties:
        found = self._penalties.get(sequence.id)
        if found is None or found.sequence is not sequence:
            params = sequence.params
            others = (each for each in self._penalties.values() if each.sequence.params is params)
            same = next(others, None)
            bias = penalties.dense_bias(params, logits) if same is None else same.bias
            found = SequencePenalties(sequence, self.vocab_size, self.eos_token_ids, bias)
            self._penalties[sequence.id] = found
        return found


def takes_argmax(params: SamplingParams) -> bool:
    """Return whether a request takes the argmax, of the raw logits or of those that its grammar allows."""
    return params.greedy and not penalties.penalties_in_use(params)


def _is_plain(sequence: Sequence) -> bool:
    """Return whether the temperature alone changes the distribution, and dividing by it cannot overflow."""
    params = sequence.params
    if params.temperature < _PLAIN_TEMPERATURE or sequence.constraint is not None:
        return False
    return not filters.filters_in_use(params) and not penalties.penalties_in_use(params)


def _warp(logits: Tensor, params: Seq[SamplingParams]) -> Tensor:
    """Return [R, V] log-probabilities after temperature and filters; greedy rows without the temperature."""
    temperatures = [1.0 if each.greedy else each.temperature for each in params]
    filtered = any(filters.filters_in_use(each) for each in params)
    if not filtered and all(temperature == 1 for temperature in temperatures):
        return logits.log_softmax(-1)  # it subtracts the maximum first, as `scale` does: the same bits
    return filters.log_distributions(logits, temperatures, params)
