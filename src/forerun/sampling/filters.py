"""Options that look at one row's logits alone, batched over rows. Their meaning follows Transformers.

Every function takes [R, V] float logits and one value per row, and what it does to a row never depends on
the other rows, to the last bit. `scale` comes first: the others count on rows whose maximum is 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from collections.abc import Sequence as Seq

import torch
from torch import Tensor

_TOP_P_GUESSES = (64, 1024)
"""How many of the most probable tokens are sorted in search of top_p, before all are: most rows need few."""


def scale(logits: Tensor, temperatures: Seq[float]) -> Tensor:
    """(logits - max) / temperature: at most 0, and so finite at the top however small the temperature."""
    smallest = torch.finfo(logits.dtype).tiny
    column = _column([max(value, smallest) for value in temperatures], logits)
    return (logits - logits.amax(-1, keepdim=True)).div_(column)


def keep_top_k(logits: Tensor, top_k: Seq[int]) -> Tensor:
    """Tokens below the k-th largest logit go; all that equal it stay. 0 keeps all."""
    vocab_size = logits.shape[-1]
    return _on_rows(logits, [k if k < vocab_size else 0 for k in top_k], _cut_top_k)


def keep_top_p(logits: Tensor, top_p: Seq[float]) -> Tensor:
    """The smallest set of most probable tokens whose mass reaches top_p; of equal ones the lowest ids first."""
    return _on_rows(logits, [p if p < 1 else 0 for p in top_p], _cut_top_p)


def keep_min_p(logits: Tensor, min_p: Seq[float]) -> Tensor:
    """Tokens less probable than min_p times the most probable one go."""
    return _on_rows(logits, min_p, lambda rows, values: _drop_below(rows, _column(list(map(math.log, values)), rows)))


def one_hot_log(tokens: Tensor, vocab_size: int, dtype: torch.dtype) -> Tensor:
    """[R, V] log-probabilities of laws that hold one token each. tokens: [R] int64."""
    law = torch.full((len(tokens), vocab_size), -math.inf, dtype=dtype, device=tokens.device)
    return law.scatter_(-1, tokens[:, None], 0.0)


def _on_rows(logits: Tensor, values: Seq[float], cut: Callable[[Tensor, Seq[float]], Tensor]) -> Tensor:
    """Cuts the rows whose value is not 0."""
    on = [row for row, value in enumerate(values) if value]
    if len(on) == len(values):
        return cut(logits, values)
    if on:
        logits = logits.clone()
        logits[on] = cut(logits[on], [values[row] for row in on])
    return logits


def _drop_below(logits: Tensor, lowest: Tensor) -> Tensor:
    """Logits below their row's `lowest` [R, 1] become -inf.

    Written without a mask, which costs three times as much: where the difference is not negative it is
    above the logit itself, which is at most 0.
    """
    limits = torch.finfo(logits.dtype)
    difference = logits - lowest.clamp(min=limits.min)
    return torch.minimum(logits, torch.threshold(difference, -limits.tiny, -math.inf))


def _cut_top_k(logits: Tensor, top_k: Seq[float]) -> Tensor:
    values = logits.topk(int(max(top_k)), dim=-1).values
    index = torch.tensor(top_k, dtype=torch.int64, device=logits.device) - 1
    return _drop_below(logits, values.gather(-1, index[:, None]))


def _cut_top_p(logits: Tensor, top_p: Seq[float]) -> Tensor:
    return _cut_nucleus(logits, logits.softmax(-1), _column(top_p, logits), _TOP_P_GUESSES)


def _cut_nucleus(logits: Tensor, probs: Tensor, top_p: Tensor, guesses: Seq[int]) -> Tensor:
    vocab_size = logits.shape[-1]
    count = min([*guesses[:1], vocab_size])
    top = logits.topk(count, dim=-1)
    chances = probs.gather(-1, top.indices)
    num_kept = ((chances.cumsum(-1, dtype=torch.float64) - chances) < top_p).sum(-1, keepdim=True)
    lowest = top.values.gather(-1, num_kept - 1)
    kept = _drop_below(logits, lowest)

    following = top.values.gather(-1, num_kept.clamp(max=count - 1))
    tied = ((num_kept < count) & (following == lowest))[:, 0].nonzero()[:, 0]
    if len(tied):
        kept[tied] = _drop_ties(kept[tied], lowest[tied], num_kept[tied])
    if count < vocab_size:
        short = (num_kept == count)[:, 0].nonzero()[:, 0]
        if len(short):
            kept[short] = _cut_nucleus(logits[short], probs[short], top_p[short], guesses[1:])
    return kept


def _drop_ties(logits: Tensor, lowest: Tensor, num_kept: Tensor) -> Tensor:
    """Of the logits equal to `lowest`, keeps the first, so many that num_kept remain in all."""
    ties = logits == lowest
    room = num_kept - (logits > lowest).sum(-1, keepdim=True)
    return logits.masked_fill(ties & (ties.cumsum(-1) > room), -math.inf)


def _column(values: Seq[float], like: Tensor) -> Tensor:
    # A tensor even when all rows agree: division by a number may be compiled to another operation.
    return torch.tensor(values, dtype=like.dtype, device=like.device)[:, None]
