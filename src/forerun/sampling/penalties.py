"""The options that change the logits of particular tokens: bias, penalties, and min_tokens.

Only the tokens concerned are touched, and what the sequence holds is counted as it grows: a step costs
the number of distinct tokens so far, and never rescans the prompt.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence as Seq

import numpy as np
import torch
from torch import Tensor

from forerun.config import SamplingParams
from forerun.types import Sequence


def penalises(params: SamplingParams) -> bool:
    """Return whether logits depend on the tokens that the sequence holds."""
    return params.repetition_penalty != 1 or params.presence_penalty != 0 or params.frequency_penalty != 0


def penalties_in_use(params: SamplingParams) -> bool:
    """Return whether any option of this module is in use."""
    names_tokens = bool(params.logit_bias) or params.allowed_token_ids is not None or bool(params.bad_words)
    return names_tokens or params.min_tokens > 0 or penalises(params)


def dense_bias(params: SamplingParams, logits: Tensor) -> Tensor | None:
    """Return [V] the bias of each token in the form of [R, V] logits, -inf of those that are not allowed; None without
    one."""
    size = logits.shape[-1]
    bias = {token: value for token, value in params.logit_bias.items() if token < size}
    allowed = params.allowed_token_ids
    if not bias and allowed is None:
        return None
    limit = torch.finfo(logits.dtype).max / 4  # a logit and two such numbers add up to a finite one
    dense = torch.zeros(size, dtype=torch.float64)
    dense[list(bias)] = torch.tensor(list(bias.values()), dtype=torch.float64).clamp(-limit, limit)
    if allowed is not None:
        forbidden = torch.ones(size, dtype=torch.bool)
        forbidden[[token for token in allowed if token < size]] = False
        dense[forbidden] = -math.inf
    return dense.to(logits)


class SequencePenalties:
    """The options of one sequence that name tokens, prepared to apply.

    Args:
        sequence: whose options and tokens.
        vocab_size: token ids at and above it are ignored, since a draft model's vocabulary may be smaller.
        eos_token_ids: held back by min_tokens, beside the sequence's stop_token_ids.
        bias: [V] of the request, which its sequences share, as `dense_bias` makes it; None without one.
    """

    def __init__(
        self, sequence: Sequence, vocab_size: int, eos_token_ids: Iterable[int], bias: Tensor | None = None
    ) -> None:
        params = sequence.params
        self.sequence = sequence
        self.bias = bias
        ends = {token for token in (*eos_token_ids, *params.stop_token_ids) if token < vocab_size}
        self._end_ids = torch.tensor(sorted(ends), dtype=torch.int64)
        self._counts = _TokenCounts(sequence, vocab_size) if penalises(params) else None
        words = [word for word in params.bad_words if not isinstance(word, str)]  # the engine's are encoded
        self._bad_words = [word for word in words if word[-1] < vocab_size]

    def apply(self, logits: Tensor, paths: Seq[Seq[int]]) -> None:
        """Change [R, V] logits in place; row r stands after the sequence's tokens and paths[r]."""
        params = self.sequence.params
        device = logits.device
        if self.bias is not None:
            logits += self.bias
        if self._counts is not None:
            self._penalise(self._counts, logits, paths)
        missing = params.min_tokens - self.sequence.num_output
        if missing > 0 and len(self._end_ids):
            held = torch.tensor([[len(path) < missing] for path in paths], device=device)
            ends = self._end_ids.to(device)
            logits[:, ends] = logits[:, ends].masked_fill(held, -math.inf)
        for *before, last in self._bad_words:
            rows = [row for row, path in enumerate(paths) if self._output_ends_with(before, path)]
            logits[rows, last] = -math.inf

    def _output_ends_with(self, token_ids: list[int], path: Seq[int]) -> bool:
        """Return whether the output, followed by the path, ends with these tokens."""
        sequence = self.sequence
        missing = len(token_ids) - len(path)
        if missing > sequence.num_output:
            return False
        end = [*sequence.token_ids[len(sequence.token_ids) - max(missing, 0) :], *path]
        return end[len(end) - len(token_ids) :] == token_ids

    def _penalise(self, counts: _TokenCounts, logits: Tensor, paths: Seq[Seq[int]]) -> None:
        params = self.sequence.params
        counts.update()
        ids, seen, output = (each.to(logits.device) for each in counts.with_paths(paths))
        values = logits.index_select(1, ids)
        if params.repetition_penalty != 1:
            penalty = params.repetition_penalty
            penalised = torch.where(values < 0, values * penalty, values / penalty)
            values = torch.where(seen, penalised, values)
        if params.frequency_penalty != 0:
            values -= params.frequency_penalty * output.to(values.dtype)
        if params.presence_penalty != 0:
            values -= params.presence_penalty * (output > 0).to(values.dtype)
        logits.index_copy_(1, ids, values)


class _TokenCounts:
    """The distinct tokens of prompt and output, and how often each is in the output."""

    def __init__(self, sequence: Sequence, vocab_size: int) -> None:
        self._sequence = sequence
        self._vocab_size = vocab_size
        self._reset()

    def _reset(self) -> None:
        self._counted = 0
        self._slots: dict[int, int] = {}
        self._ids = np.empty(64, dtype=np.int64)
        self._output = np.zeros(64)

    def update(self) -> None:
        """Count the tokens that were appended since the last call; recount if the sequence became shorter."""
        tokens = self._sequence.token_ids
        if len(tokens) < self._counted:
            self._reset()
        for index in range(self._counted, len(tokens)):
            token = tokens[index]
            if token < self._vocab_size:
                slot = self._slots.setdefault(token, len(self._slots))
                if slot == len(self._ids):
                    self._ids = np.resize(self._ids, 2 * slot)
                    self._output = np.concatenate([self._output, np.zeros(slot)])
                self._ids[slot] = token
                self._output[slot] += index >= self._sequence.num_prompt
        self._counted = len(tokens)

    def with_paths(self, paths: Seq[Seq[int]]) -> tuple[Tensor, Tensor, Tensor]:
        """Count the tokens of the sequence and of the paths after it.

        Returns:
            [n] int64 distinct tokens; [R, n] bool, whether a row's prefix holds them; [R, n] float64, how often
            they are in its output.
        """
        columns = {token: None for path in paths for token in path if token < self._vocab_size}
        extra = [token for token in columns if token not in self._slots]
        known = len(self._slots)
        slots = self._slots | {token: known + index for index, token in enumerate(extra)}
        seen = np.ones((len(paths), len(slots)), dtype=bool)
        seen[:, known:] = False
        output = np.zeros((len(paths), len(slots)))
        output[:, :known] = self._output[:known]
        for row, path in enumerate(paths):
            for token in path:
                if token < self._vocab_size:
                    seen[row, slots[token]] = True
                    output[row, slots[token]] += 1
        ids = np.concatenate([self._ids[:known], np.array(extra, dtype=np.int64)])
        return torch.from_numpy(ids), torch.from_numpy(seen), torch.from_numpy(output)
