"""Options that look at one row's logits alone, batched over rows. Their meaning follows Transformers.

Every function takes [R, V] float and one value per row, and returns a new or the same tensor. What it
does to a row never depends on the other rows, to the last bit.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as Seq

import torch
from torch import Tensor

_TOP_P_GUESSES = (64, 1024)
"""How many of the most probable tokens are sorted in search of top_p, before all are."""


def scale(logits: Tensor, temperatures: Seq[float]) -> Tensor:
    """(logits - max) / temperature: at most 0, and so finite at the top however small the temperature."""
    smallest = torch.finfo(logits.dtype).tiny
    column = _column([max(value, smallest) for value in temperatures], logits)
    return (logits - logits.amax(-1, keepdim=True)).div_(column)


def keep_top_k(logits: Tensor, top_k: Seq[int]) -> Tensor:
    """Tokens below the k-th largest logit go; all that equal it stay. 0 keeps all."""
    vocab_size = logits.shape[-1]
    counts = [min(k, vocab_size) or vocab_size for k in top_k]
    if min(counts) == vocab_size:
        return logits
    largest = max(k for k in counts if k < vocab_size)
    values = logits.topk(largest, dim=-1).values
    index = torch.tensor([min(k, largest) - 1 for k in counts], device=logits.device)
    lowest = values.gather(-1, index[:, None])
    off = [row for row, k in enumerate(counts) if k == vocab_size]
    if off:
        lowest[off] = -math.inf
    return logits.masked_fill(logits < lowest, -math.inf)


def keep_top_p(logits: Tensor, top_p: Seq[float]) -> Tensor:
    """The smallest set of most probable tokens whose mass reaches top_p; of equal ones the lowest ids first."""
    on = [row for row, value in enumerate(top_p) if value < 1]
    if not on:
        return logits
    if len(on) < len(top_p):
        out = logits.clone()
        out[on] = keep_top_p(logits[on], [top_p[row] for row in on])
        return out
    probs = logits.softmax(-1)
    num_kept, lowest = _nucleus(probs, _column(top_p, probs))
    keep = probs >= lowest
    tied = keep.sum(-1) > num_kept
    if bool(tied.any()):
        keep[tied] = _split_ties(probs[tied], num_kept[tied], lowest[tied])
    return logits.masked_fill(~keep, -math.inf)


def keep_min_p(logits: Tensor, min_p: Seq[float]) -> Tensor:
    """Tokens less probable than min_p times the most probable one go."""
    logs = [math.log(value) if value > 0 else -math.inf for value in min_p]
    return logits.masked_fill(logits < logits.amax(-1, keepdim=True) + _column(logs, logits), -math.inf)


def one_hot_log(tokens: Tensor, vocab_size: int, dtype: torch.dtype) -> Tensor:
    """[R, V] log-probabilities of laws that hold one token each. tokens: [R] int64."""
    law = torch.full((len(tokens), vocab_size), -math.inf, dtype=dtype, device=tokens.device)
    return law.scatter_(-1, tokens[:, None], 0.0)


def _nucleus(probs: Tensor, top_p: Tensor) -> tuple[Tensor, Tensor]:
    """[R] size of each row's set and [R, 1] the smallest probability in it."""
    vocab_size = probs.shape[-1]
    for guess in (*_TOP_P_GUESSES, vocab_size):
        count = min(guess, vocab_size)
        top = probs.topk(count, dim=-1).values
        mass_before = top.cumsum(-1, dtype=torch.float64) - top
        num_kept = (mass_before < top_p).sum(-1)
        if count == vocab_size or int(num_kept.max()) < count:
            break
    return num_kept, top.gather(-1, num_kept[:, None] - 1)


def _split_ties(probs: Tensor, num_kept: Tensor, lowest: Tensor) -> Tensor:
    """[R, V] bool: tokens above `lowest`, and as many equal to it, from the first, as make up num_kept."""
    above = probs > lowest
    ties = probs == lowest
    room = num_kept[:, None] - above.sum(-1, keepdim=True)
    return above | (ties & (ties.cumsum(-1) <= room))


def _column(values: Seq[float], like: Tensor) -> Tensor:
    # A tensor even when all rows agree: division by a number may be compiled to another operation.
    return torch.tensor(values, dtype=like.dtype, device=like.device)[:, None]
